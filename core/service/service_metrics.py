"""Service-wide metrics for Prometheus: jobs, queues, attempts, eval runs and webhooks, from the database, and whether
the blob store responds.

Every process returns the same values from the database, so aggregate over processes with max, not sum.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import ColumnElement, and_, func, not_, or_, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core.database.engine import Database, db_now
from core.database.states import JOB
from core.database.tables import Attempt, Checkpoint, EvalRun, Job, WebhookDelivery
from core.evals import lifecycle as eval_runs
from core.hardware import NO_HARDWARE, Hardware
from core.jobs import fairness
from core.jobs.methods import OFFLINE
from core.refreshed import Refreshed
from core.service import queues
from core.storage.self_test import new_key, self_test
from core.storage.store import BlobStore
from core.tenancy.limits import NO_LIMITS, Limits

log = logging.getLogger(__name__)

# KEDA subtracts each Job whose pod is not ready from the metric that it reads. A pod that never gets ready, such as one
# without its image, would otherwise keep a queued job waiting for ever.
RETRY_POD_SECONDS = 600.0

# Minimum interval between reads of the database, regardless of the number of scrapes.
FRESH_SECONDS = 10.0
# Shorter than Prometheus' 10 s scrape timeout, so a hung database is still reported.
PATIENCE_SECONDS = 3.0
KINDS = ("validation", "run")
OUTCOMES = (
    "validated",
    "succeeded",
    "failed",
    "cancelled",
    "paused",
    "drained",
    "put_off",
    "crashed",
    "expired",
)


class SlowCollector(ABC):
    """Metrics that come from another server: read in a thread, and at most every FRESH_SECONDS."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, patience: float = PATIENCE_SECONDS
    ) -> None:
        self.patience = patience
        self._refreshed: Refreshed[list[Metric]] = Refreshed(FRESH_SECONDS, clock)

    @abstractmethod
    def _figures(self) -> Iterator[Metric]:
        """Read the metrics."""

    @abstractmethod
    def _if_silent(self) -> Metric:
        """The only metric if the server is silent: stale values would look current."""

    def collect(self) -> Iterable[Metric]:
        reading = self._refreshed.latest(lambda: list(self._figures()))
        try:
            return reading.result(self.patience)
        except TimeoutError:
            silent = self._if_silent()
            log.warning("%s is 0: no response within %g s", silent.name, self.patience)
            return [silent]


class StoreCollector(SlowCollector):
    """Whether the blob store accepts and returns an object. `blobs` must not retry."""

    def __init__(self, blobs: BlobStore, **options: Any) -> None:
        super().__init__(**options)
        self.blobs = blobs
        # One key, so that a store that refuses to delete keeps one object.
        self._key = new_key()

    def _figures(self) -> Iterator[Metric]:
        cause = self_test(self.blobs, self._key).cause
        if cause is not None:
            log.warning("the blob store does not respond: %r", cause)
        yield _blob_store_up(cause is None)

    def _if_silent(self) -> Metric:
        return _blob_store_up(False)


class ServiceCollector(SlowCollector):
    """Collects the service-wide metrics.

    Args:
        defaults: limits of projects without their own.
        default_classes: of jobs that name none. These and those of the hardware have a queue, also without jobs.
        hardware: returns that of now. For its classes that Kubernetes Jobs run KEDA reads a number: 0, not an error.
        fleet_models: base models with a rollout fleet, for which KEDA reads a number, too.
    """

    def __init__(
        self,
        database: Database,
        defaults: Limits = NO_LIMITS,
        default_classes: Collection[str] = (),
        hardware: Callable[[], Hardware] = lambda: NO_HARDWARE,
        fleet_models: Collection[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.database = database
        self.defaults = defaults
        self.default_classes = default_classes
        self.hardware = hardware
        self.fleet_models = fleet_models

    def _if_silent(self) -> Metric:
        return _database_up(False)

    def _figures(self) -> Iterator[Metric]:
        figures: list[Metric] = []
        hardware = self.hardware()
        classes = {*hardware.gpu_classes, *self.default_classes}
        try:
            with self.database.read() as session:
                figures = [
                    *_connections(session),
                    _jobs(session),
                    *_queues(session, self.defaults, classes, hardware.pod_classes),
                    _fleet_jobs(session, self.defaults, self.fleet_models),
                    _attempts(session),
                    _checkpoint_ages(session, classes),
                    *_eval_runs(session, self.defaults),
                    *_webhooks(session),
                ]
        except SQLAlchemyError as cause:
            log.warning("no figures from the database: %s", type(cause).__name__)
        yield _database_up(bool(figures))
        yield from figures


def _database_up(answered: bool) -> Metric:
    return GaugeMetricFamily(
        "regraft_database_up", "1 if the database responds, else 0.", value=float(answered)
    )


def _connections(session: Session) -> Iterator[Metric]:
    """Of PostgreSQL, which every role may count; without samples for SQLite, which has no server."""
    used = GaugeMetricFamily(
        "regraft_database_connections", "Open connections of all clients to the PostgreSQL server."
    )
    most = GaugeMetricFamily(
        "regraft_database_max_connections", "Connections that it accepts from roles without reserved ones."
    )
    if session.get_bind().dialect.name == "postgresql":
        [opened, accepted] = session.execute(_COUNT_CONNECTIONS).one()
        used.add_metric([], opened)
        most.add_metric([], accepted)
    yield used
    yield most


# `reserved_connections` is of PostgreSQL 16 and later.
_COUNT_CONNECTIONS = text(
    "select (select sum(numbackends) from pg_stat_database), current_setting('max_connections')::int"
    " - current_setting('superuser_reserved_connections')::int"
    " - coalesce(current_setting('reserved_connections', true)::int, 0)"
)


def _blob_store_up(answered: bool) -> Metric:
    return GaugeMetricFamily(
        "regraft_blob_store_up",
        "1 if the blob store takes and returns an object, else 0.",
        value=float(answered),
    )


def _jobs(session: Session) -> Metric:
    family = GaugeMetricFamily("regraft_jobs", "Number of jobs.", labels=["status", "gpu_class"])
    count = select(Job.status, Job.gpu_class, func.count()).group_by(Job.status, Job.gpu_class)
    for status, gpu_class, jobs in session.execute(count):
        family.add_metric([status, gpu_class], jobs)
    return family


def _queues(
    session: Session, defaults: Limits, gpu_classes: Collection[str], pod_classes: Collection[str]
) -> Iterator[Metric]:
    length = GaugeMetricFamily(
        "regraft_queue_length", "Number of jobs that a free worker would start.", labels=["gpu_class"]
    )
    oldest = GaugeMetricFamily(
        "regraft_queue_oldest_seconds",
        "Waiting time of the longest-waiting of these jobs.",
        labels=["gpu_class"],
    )
    wanted = GaugeMetricFamily(
        "regraft_jobs_wanted",
        "Jobs of regraft_queue_length in pools of Jobs, and each again for every 10 minutes of waiting. KEDA reads it.",
        labels=["gpu_class"],
    )
    without_pod = GaugeMetricFamily(
        "regraft_jobs_without_pod_seconds",
        "Waiting time of the longest-waiting of them that does not wait for quota of Kueue.",
        labels=["gpu_class"],
    )
    waiting_jobs = queues.waiting_jobs(session, defaults)
    for gpu_class in {*gpu_classes, *pod_classes, *waiting_jobs}:
        jobs = waiting_jobs.get(gpu_class, [])
        length.add_metric([gpu_class], len(jobs))
        oldest.add_metric([gpu_class], max((job.seconds for job in jobs), default=0.0))
        if gpu_class in pod_classes:
            wanted.add_metric([gpu_class], sum(1 + job.seconds // RETRY_POD_SECONDS for job in jobs))
            oldest_of = max((job.seconds for job in jobs if not job.for_quota), default=0.0)
            without_pod.add_metric([gpu_class], oldest_of)
    yield length
    yield wanted
    yield without_pod
    yield oldest
    waiting, seconds = queues.validation_queue(session)
    yield GaugeMetricFamily(
        "regraft_validation_queue_length",
        "Number of jobs whose files a free worker would validate.",
        value=waiting,
    )
    yield GaugeMetricFamily(
        "regraft_validation_queue_oldest_seconds",
        "Waiting time of the longest-waiting of these jobs.",
        value=seconds,
    )


def _fleet_jobs(session: Session, defaults: Limits, fleet_models: Collection[str]) -> Metric:
    family = GaugeMetricFamily(
        "regraft_fleet_jobs",
        "Jobs that sample answers of a base model with a rollout fleet and that run or that a free worker would start. "
        "KEDA reads it.",
        labels=["model"],
    )
    if not fleet_models:
        return family
    startable = fairness.RUNS.startable(defaults).with_only_columns(Job.seq)
    counted = (
        select(Job.model, func.count())
        .where(Job.model.in_(fleet_models), _samples())
        .where(or_(Job.status.in_(JOB.running), Job.seq.in_(startable)))
        .group_by(Job.model)
    )
    jobs = dict.fromkeys(fleet_models, 0)
    for model, number in session.execute(counted):
        jobs[model] = number
    for model, number in jobs.items():
        family.add_metric([model], number)
    return family


def _samples() -> ColumnElement[bool]:
    """Whether a job's method samples answers, by its `methods.variant`."""
    learns_logits = and_(
        Job.method == "distillation", Job.body["mode"].as_string().is_not_distinct_from("logits")
    )
    return not_(or_(Job.method.in_(OFFLINE), learns_logits))


def _attempts(session: Session) -> Metric:
    family = CounterMetricFamily(
        "regraft_attempts", "Number of finished attempts of jobs.", labels=["kind", "outcome"]
    )
    count = select(Attempt.kind, Attempt.outcome, func.count()).where(Attempt.outcome.is_not(None))
    # Start at 0: Prometheus' increase() misses a series that starts at 1.
    attempts: dict[tuple[str, str | None], int] = dict.fromkeys(product(KINDS, OUTCOMES), 0)
    for kind, outcome, number in session.execute(count.group_by(Attempt.kind, Attempt.outcome)):
        attempts[kind, outcome] = number
    for (kind, outcome), number in attempts.items():
        family.add_metric([kind, str(outcome)], number)
    return family


def _checkpoint_ages(session: Session, gpu_classes: Collection[str]) -> Metric:
    family = GaugeMetricFamily(
        "regraft_checkpoint_age_seconds",
        "Seconds since the newest checkpoint of a running job, or since its attempt began; the longest.",
        labels=["gpu_class"],
    )
    newest = select(func.max(Checkpoint.created_at)).where(Checkpoint.job_id == Job.id).scalar_subquery()
    begun = (
        select(func.max(Attempt.started_at))
        .where(Attempt.job_id == Job.id, Attempt.kind == "run")
        .scalar_subquery()
    )
    ages = dict.fromkeys(gpu_classes, 0.0)
    running = select(Job.gpu_class, newest, begun, db_now()).where(Job.status == "running")
    for gpu_class, checkpoint, start, now in session.execute(running):
        since = max(checkpoint or 0.0, start or 0.0) or now
        ages[gpu_class] = max(ages.get(gpu_class, 0.0), now - since)
    for gpu_class, seconds in ages.items():
        family.add_metric([gpu_class], seconds)
    return family


def _eval_runs(session: Session, defaults: Limits) -> Iterator[Metric]:
    runs = GaugeMetricFamily("regraft_eval_runs", "Number of eval runs.", labels=["status"])
    count = select(EvalRun.status, func.count()).where(EvalRun.deleted_at.is_(None))
    for status, number in session.execute(count.group_by(EvalRun.status)):
        runs.add_metric([status], number)
    yield runs
    waiting = eval_runs.startable(defaults).subquery()
    [since] = waiting.c
    length, seconds = session.execute(
        select(func.count(), db_now() - func.min(since)).select_from(waiting)
    ).one()
    yield GaugeMetricFamily(
        "regraft_eval_queue_length", "Number of eval runs that a free worker would start.", value=length
    )
    yield GaugeMetricFamily(
        "regraft_eval_queue_oldest_seconds",
        "Waiting time of the longest-waiting of these runs.",
        value=max(0.0, seconds or 0.0),
    )


def _webhooks(session: Session) -> Iterator[Metric]:
    waits = WebhookDelivery.settled.is_(False)
    failed = func.count(WebhookDelivery.last_error)  # counts the non-null ones
    count, failing = session.execute(select(func.count(), failed).where(waits)).one()
    yield GaugeMetricFamily("regraft_webhooks_waiting", "Number of undelivered webhooks.", value=count)
    yield GaugeMetricFamily(
        "regraft_webhooks_failing", "Number of undelivered webhooks whose last attempt failed.", value=failing
    )
