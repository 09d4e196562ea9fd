"""What the rows say about the service as a whole: jobs, queues, attempts and webhooks, for Prometheus.

Each process that asks gets the same answer, so sums over processes mean nothing; take the maximum.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import product

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core import waiting
from core.db import Database, db_now
from core.jobs import RESUMING
from core.limits import NO_LIMITS, Limits
from core.models import Attempt, Event, Job, WebhookDelivery

log = logging.getLogger(__name__)

# However often it is asked: the database is read once in this time.
FRESH_SECONDS = 10.0
# Less than Prometheus waits for all figures together (10 s), so that it hears of a database that says nothing at all.
PATIENCE_SECONDS = 3.0
KINDS = ("validation", "run")
OUTCOMES = ("validated", "succeeded", "failed", "cancelled", "paused", "drained", "crashed", "expired")


class ServiceFigures:
    """Collects them. `defaults` are the limits of projects that have none of their own."""

    def __init__(
        self,
        database: Database,
        defaults: Limits = NO_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.database = database
        self.defaults = defaults
        self.patience = patience
        self._clock = clock
        self._lock = threading.Lock()
        self._begun_at: float | None = None
        self._reading: Future[list[Metric]] | None = None

    def collect(self) -> Iterable[Metric]:
        """Only `regraft_database_up` 0 while the database is away: old numbers would look like news."""
        reading = self._latest()
        try:
            return reading.result(self.patience)
        except TimeoutError:
            log.warning("no figures from the database: it is silent")
            return [_up(False)]

    def _latest(self) -> "Future[list[Metric]]":
        with self._lock:
            now = self._clock()
            stale = self._begun_at is None or now - self._begun_at >= FRESH_SECONDS
            if self._reading is None or (stale and self._reading.done()):
                self._reading, self._begun_at = Future(), now
                threading.Thread(target=self._read, args=[self._reading], daemon=True).start()
            return self._reading

    def _read(self, reading: "Future[list[Metric]]") -> None:
        try:
            reading.set_result(list(self._figures()))
        except BaseException as cause:
            reading.set_exception(cause)

    def _figures(self) -> Iterator[Metric]:
        figures: list[Metric] = []
        try:
            with self.database.read() as session:
                figures = [
                    _jobs(session),
                    *_queues(session, self.defaults),
                    _attempts(session),
                    *_webhooks(session),
                ]
        except SQLAlchemyError as cause:
            log.warning("no figures from the database: %s", type(cause).__name__)
        yield _up(bool(figures))
        yield from figures


def _up(answered: bool) -> Metric:
    return GaugeMetricFamily("regraft_database_up", "1 if the database answered.", value=float(answered))


def _jobs(session: Session) -> Metric:
    family = GaugeMetricFamily("regraft_jobs", "Jobs there are.", labels=["status", "gpu_class"])
    count = select(Job.status, Job.gpu_class, func.count()).group_by(Job.status, Job.gpu_class)
    for status, gpu_class, jobs in session.execute(count):
        family.add_metric([status, gpu_class], jobs)
    return family


def _queues(session: Session, defaults: Limits) -> Iterator[Metric]:
    length = GaugeMetricFamily(
        "regraft_queue_length", "Jobs that a free worker would take.", labels=["gpu_class"]
    )
    oldest = GaugeMetricFamily(
        "regraft_queue_oldest_seconds",
        "How long the one that waits longest has waited.",
        labels=["gpu_class"],
    )
    # A job waits since its last attempt ended (a validation at least), its back-off was over, or it was resumed.
    ended = select(func.max(Attempt.ended_at)).where(Attempt.job_id == Job.id).scalar_subquery()
    resumed = (
        select(func.max(Event.created_at))
        .where(Event.job_id == Job.id, Event.message == RESUMING)
        .scalar_subquery()
    )
    waits = select(Job.gpu_class, Job.created_at, Job.next_run_at, ended, resumed, db_now())
    classes = session.scalars(select(Job.gpu_class).distinct())
    seconds: dict[str, list[float]] = {gpu_class: [] for gpu_class in classes}
    for gpu_class, *begins, now in session.execute(waits.where(Job.seq.in_(waiting.startable(defaults)))):
        since = max(begin for begin in begins if begin is not None)
        seconds[gpu_class].append(max(0.0, now - since))
    for gpu_class, each in seconds.items():
        length.add_metric([gpu_class], len(each))
        oldest.add_metric([gpu_class], max(each, default=0.0))
    yield length
    yield oldest


def _attempts(session: Session) -> Metric:
    family = CounterMetricFamily(
        "regraft_attempts", "Turns of workers at jobs that have ended.", labels=["kind", "outcome"]
    )
    count = select(Attempt.kind, Attempt.outcome, func.count()).where(Attempt.outcome.is_not(None))
    # 0 from the start: a series that begins at 1 has not grown, says Prometheus.
    attempts: dict[tuple[str, str | None], int] = dict.fromkeys(product(KINDS, OUTCOMES), 0)
    for kind, outcome, number in session.execute(count.group_by(Attempt.kind, Attempt.outcome)):
        attempts[kind, outcome] = number
    for (kind, outcome), number in attempts.items():
        family.add_metric([kind, str(outcome)], number)
    return family


def _webhooks(session: Session) -> Iterator[Metric]:
    waits = WebhookDelivery.settled.is_(False)
    failed = func.count(WebhookDelivery.last_error)  # of those that have one
    count, failing = session.execute(select(func.count(), failed).where(waits)).one()
    yield GaugeMetricFamily("regraft_webhooks_waiting", "Webhooks that have not arrived yet.", value=count)
    yield GaugeMetricFamily("regraft_webhooks_failing", "Those whose last attempt failed.", value=failing)
