"""What the rows say of the service, for Prometheus."""

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core.database.engine import Database, Work
from core.database.tables import Attempt, Checkpoint, EvalRun, Job, Project, WebhookDelivery
from core.hardware import GpuClass, Hardware
from core.jobs import events, lifecycle
from core.jobs.distillation import LogitsDistillation, OnPolicyDistillation
from core.jobs.methods import METHODS, OFFLINE, variant
from core.jobs.pods import PodNote, PodState
from core.service import queues
from core.service.service_metrics import FRESH_SECONDS, ServiceCollector, SlowCollector, StoreCollector
from core.settings import Settings
from core.storage.store import BlobWriter
from core.telemetry.metrics import served
from core.tenancy.limits import Limits
from tests import factories
from tests.present import untyped
from tests.watched_blobs import WatchedBlobs

pytestmark = pytest.mark.both_databases

MODES = [
    mode
    for kind in (OnPolicyDistillation, LogitsDistillation)
    for mode in get_args(kind.model_fields["mode"].annotation)
]


@pytest.fixture
def project(database: Database) -> Project:
    with database.write() as session:
        return factories.project(session)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def patient(database: Database, **options: Any) -> ServiceCollector:
    """However busy the machine is: whether it takes long is not what these tests are about."""
    return ServiceCollector(database, **options, patience=60)


def in_pods(*gpu_classes: str) -> Callable[[], Hardware]:
    """Classes whose jobs Kubernetes Jobs run."""
    known = Hardware(gpu_classes={name: GpuClass(in_kubernetes_jobs=True) for name in gpu_classes})
    return lambda: known


def read(figures: SlowCollector) -> dict[tuple[str, ...], float]:
    """The values by name and labels' values, without the label names."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in figures.collect()
        for sample in family.samples
    }


def waits(session: Session, project: Project, *, since: float, **fields: Any) -> Job:
    """A queued job whose validation ended so many seconds ago."""
    at = time.time() - since
    job = factories.job(session, project, **{"created_at": int(at) - 1} | fields)
    ended = {"kind": "validation", "worker": "w", "started_at": at - 1, "ended_at": at}
    session.add(Attempt(job_id=job.id, epoch=job.epoch, outcome="validated", **ended))
    session.flush()
    return job


def test_jobs_are_counted_by_status_and_class(database: Database, project: Project) -> None:
    with database.write() as session:
        for status in ("running", "running", "failed"):
            factories.job(session, project, status=status)
        waits(session, project, since=5, gpu_class="h200")

    figures = read(patient(database))

    assert figures["regraft_jobs", "running", "cpu"] == 2
    assert figures["regraft_jobs", "failed", "cpu"] == 1
    assert figures["regraft_jobs", "queued", "h200"] == 1
    assert figures["regraft_database_up",] == 1


def test_open_connections_are_counted_where_the_database_limits_them(database: Database) -> None:
    figures = read(patient(database))

    if database.engine.dialect.name == "sqlite":
        assert ("regraft_database_connections",) not in figures
        return
    used, most = (figures[f"regraft_database_{name}",] for name in ("connections", "max_connections"))
    with database.read() as session:
        accepted = int(session.scalar(text("show max_connections")) or 0)
    assert used >= 1
    assert 0 < most < accepted, "some are reserved for administrators"


def test_a_queue_is_as_old_as_the_job_that_waits_longest(database: Database, project: Project) -> None:
    with database.write() as session:
        waits(session, project, since=300)
        waits(session, project, since=20)
        factories.job(session, project, status="succeeded", gpu_class="h200")

    figures = read(patient(database))

    assert figures["regraft_queue_length", "cpu"] == 2
    assert figures["regraft_queue_oldest_seconds", "cpu"] == pytest.approx(300, abs=5)
    assert (figures["regraft_queue_length", "h200"], figures["regraft_queue_oldest_seconds", "h200"]) == (
        0,
        0,
    )


def runs(session: Session, project: Project, *, since: float, checkpoint: float | None) -> None:
    """A running job whose attempt began, and whose newest checkpoint was written, so many seconds ago."""
    at = time.time()
    job = factories.job(session, project, status="running", lease_owner="w", lease_expires_at=at + 60)
    session.add(Attempt(job_id=job.id, epoch=1, kind="run", worker="w", started_at=at - since))
    for step, age in enumerate([] if checkpoint is None else [checkpoint + 1000, checkpoint]):
        made = {"created_at": int(at - age), "blob_prefix": "p"}
        session.add(Checkpoint(job_id=job.id, step=step, epoch=1, **made))


def test_the_age_of_a_checkpoint_is_that_of_the_job_that_would_repeat_most(
    database: Database, project: Project
) -> None:
    with database.write() as session:
        runs(session, project, since=500, checkpoint=None)
        runs(session, project, since=9000, checkpoint=100)
        runs(session, project, since=50, checkpoint=5000)  # paused for long, and resumed

    figures = read(
        patient(
            database, default_classes=["cpu"], hardware=lambda: Hardware(gpu_classes={"h200": GpuClass()})
        )
    )

    assert figures["regraft_checkpoint_age_seconds", "cpu"] == pytest.approx(500, abs=10)
    assert figures["regraft_checkpoint_age_seconds", "h200"] == 0


def test_a_job_that_waits_long_asks_for_more_pods(database: Database, project: Project) -> None:
    """KEDA subtracts a Job whose pod never gets ready, which must not cancel a queued job for ever."""
    with database.write() as session:
        waits(session, project, since=20)
        waits(session, project, since=1500)

    figures = read(patient(database, hardware=in_pods("cpu", "h200")))

    assert figures["regraft_queue_length", "cpu"] == 2
    assert figures["regraft_jobs_wanted", "cpu"] == 1 + 3
    assert figures["regraft_jobs_wanted", "h200"] == 0


def test_jobs_that_wait_for_quota_are_not_without_a_pod_and_hide_no_others(database: Database) -> None:
    """Those behind them in the same queue of Kueue have no Kubernetes Job yet."""
    no_quota, epoch = PodNote(PodState.QUOTA, "team-a"), 3
    with database.write() as session:
        team = factories.project(session, kueue={"queue": "team-a"})
        waits(session, team, since=900, gpu_class="a100", epoch=epoch, pod=no_quota.to_row(epoch))
        waits(session, team, since=800, gpu_class="a100")
    with database.read() as session:
        [queue] = [one for one in queues.queues(session, Limits(), [], {"a100"}) if one.kind == "jobs"]
    figures = read(patient(database, hardware=in_pods("a100")))

    assert queue.reason == "they wait for quota of Kueue"
    assert figures["regraft_queue_oldest_seconds", "a100"] == pytest.approx(900, abs=5)
    assert figures["regraft_jobs_without_pod_seconds", "a100"] == 0

    with database.write() as session:
        waits(session, factories.project(session), since=700, gpu_class="a100")
        outdated = no_quota.to_row(epoch - 1)
        waits(session, factories.project(session), since=50, gpu_class="h200", epoch=epoch, pod=outdated)
    figures = read(patient(database, hardware=in_pods("a100", "h200")))

    assert figures["regraft_jobs_without_pod_seconds", "a100"] == pytest.approx(700, abs=5)
    assert figures["regraft_jobs_without_pod_seconds", "h200"] == pytest.approx(50, abs=5)


@pytest.mark.parametrize("state", sorted({*PodState} - {PodState.QUOTA}))
def test_a_job_whose_own_pod_does_not_start_does_not_wait_for_quota(
    database: Database, state: PodState
) -> None:
    """Also while Kueue suspends the Job of another one in the same queue."""
    with database.write() as session:
        team = factories.project(session, kueue={"queue": "team-a"})
        no_quota, own = PodNote(PodState.QUOTA, "team-a"), PodNote(state)
        waits(session, team, since=900, gpu_class="a100", epoch=1, pod=no_quota.to_row(1))
        waits(session, team, since=800, gpu_class="a100", epoch=1, pod=own.to_row(1))
    figures = read(patient(database, hardware=in_pods("a100")))

    assert figures["regraft_jobs_without_pod_seconds", "a100"] == pytest.approx(800, abs=5)


def test_only_pools_of_jobs_want_pods(database: Database, project: Project) -> None:
    with database.write() as session:
        waits(session, project, since=20)

    figures = read(patient(database, default_classes=["cpu"], hardware=in_pods("h200")))

    assert {
        gpu_class for name, *labels in figures if name == "regraft_jobs_wanted" for gpu_class in labels
    } == {"h200"}


@pytest.mark.both_databases
def test_a_fleet_is_wanted_by_the_jobs_that_sample_its_model_and_run_or_may_start(
    database: Database, project: Project
) -> None:
    with database.write() as session:
        for status in ("queued", "running", "succeeded", "validating_files"):
            factories.job(session, project, model="large", status=status)
        factories.job(session, project, model="large", next_run_at=time.time() + 600)
        factories.job(session, project, model="small")
        for method, body in (("supervised", {}), ("distillation", {"mode": "logits"}), ("distillation", {})):
            factories.job(session, project, model="mixed", method=method, body=body)

    figures = read(patient(database, fleet_models=("large", "mixed", "idle")))

    assert {key[1]: value for key, value in figures.items() if key[0] == "regraft_fleet_jobs"} == {
        "large": 2,
        "mixed": 1,
        "idle": 0,
    }


def test_a_fleet_counts_the_jobs_of_each_method_whose_variant_samples(
    database: Database, project: Project
) -> None:
    bodies = [{}, *({"mode": mode} for mode in MODES)]
    variants = {f"{method}-{n}": (method, body) for method in METHODS for n, body in enumerate(bodies)}
    with database.write() as session:
        for model, (method, body) in variants.items():
            factories.job(session, project, model=model, method=method, body=body)

    figures = read(patient(database, fleet_models=tuple(variants)))

    counted = {model for model in variants if figures["regraft_fleet_jobs", model]}
    assert counted == {
        model for model, (method, body) in variants.items() if variant(method, body) not in OFFLINE
    }


def test_a_job_that_its_own_project_holds_back_is_nobodys_delay(database: Database, project: Project) -> None:
    """More workers would not start it: it is no reason to wake an operator."""
    with database.write() as session:
        factories.job(session, project, status="running")
        waits(session, project, since=3000)
        waits(session, factories.project(session), since=60, next_run_at=time.time() + 30)

    figures = read(patient(database, defaults=Limits(running_jobs=1)))

    assert figures["regraft_queue_length", "cpu"] == 0
    assert figures["regraft_jobs", "queued", "cpu"] == 2


def test_time_that_a_job_was_paused_is_no_time_in_the_queue(database: Database, project: Project) -> None:
    with database.write() as session:
        job = waits(session, project, since=86400, status="paused")
        lifecycle.resume(Work(session), job)
        events.append(session, job.id, "something else")

    assert read(patient(database))["regraft_queue_oldest_seconds", "cpu"] < 5


def test_lost_workers_are_counted_for_good(database: Database, project: Project) -> None:
    with database.write() as session:
        job = waits(session, project, since=1)
        claim = lifecycle.claim(session, gpu_class="cpu", owner="w", lease_seconds=-1)
        assert claim is not None and claim.job_id == job.id
        lifecycle.expire_leases(session, max_failures=3)

    figures = read(patient(database))

    assert figures["regraft_attempts_total", "run", "expired"] == 1
    assert figures["regraft_attempts_total", "validation", "validated"] == 1


def test_attempts_that_are_put_off_are_counted_from_the_first_one_on(database: Database) -> None:
    """Prometheus sees no increase in a series that begins at 1."""
    assert read(patient(database))["regraft_attempts_total", "run", "put_off"] == 0


def test_the_queue_of_validations_is_measured_without_those_that_a_worker_has(
    database: Database, project: Project
) -> None:
    at, free = int(time.time()), {"lease_owner": None, "lease_expires_at": None}
    with database.write() as session:
        factories.job(session, project, status="validating_files", created_at=at - 300, **free)
        factories.job(session, project, status="validating_files", created_at=at - 9000)

    figures = read(patient(database))

    assert figures["regraft_validation_queue_length",] == 1
    assert figures["regraft_validation_queue_oldest_seconds",] == pytest.approx(300, abs=60)
    assert figures["regraft_queue_length", "cpu"] == 0


def eval_run(session: Session, project: Project, **fields: Any) -> EvalRun:
    run = EvalRun(**{"eval_id": "eval_1", "name": "", "data_source": {}, "total": 1} | fields)
    run.project_id = project.id
    session.add(run)
    session.flush()
    return run


def test_eval_runs_are_counted_by_status_without_deleted_ones(database: Database, project: Project) -> None:
    with database.write() as session:
        for status in ("in_progress", "completed", "completed"):
            eval_run(session, project, status=status)
        eval_run(session, project, status="completed", deleted_at=1)

    figures = read(patient(database))

    assert figures["regraft_eval_runs", "in_progress"] == 1
    assert figures["regraft_eval_runs", "completed"] == 2
    assert (figures["regraft_eval_queue_length",], figures["regraft_eval_queue_oldest_seconds",]) == (0, 0)


def test_the_queue_of_eval_runs_is_as_old_as_the_run_that_waits_longest(
    database: Database, project: Project
) -> None:
    at = int(time.time())
    with database.write() as session:
        eval_run(session, project, created_at=at - 20)
        eval_run(session, project, created_at=at - 9000, next_run_at=at - 300)  # was put back then
        eval_run(session, project, created_at=at - 9000, next_run_at=at + 30)  # backs off

    figures = read(patient(database))

    assert figures["regraft_eval_queue_length",] == 2
    assert figures["regraft_eval_queue_oldest_seconds",] == pytest.approx(300, abs=5)


def test_an_eval_run_that_its_own_project_holds_back_is_nobodys_delay(
    database: Database, project: Project
) -> None:
    with database.write() as session:
        eval_run(session, project, status="in_progress")
        eval_run(session, project, created_at=1)

    figures = read(patient(database, defaults=Limits(running_eval_runs=1)))

    assert figures["regraft_eval_queue_length",] == 0
    assert figures["regraft_eval_runs", "queued"] == 1


def test_webhooks_that_do_not_arrive_are_told_from_those_that_wait(
    database: Database, project: Project
) -> None:
    sent = {"endpoint_id": "whep_1", "job_id": "ftjob-1", "type": "t", "body": "{}"}
    with database.write() as session:
        session.add(WebhookDelivery(**sent))
        session.add(WebhookDelivery(**sent, attempts=2, last_error="refused"))
        session.add(WebhookDelivery(**sent, attempts=9, last_error="refused", settled=True))

    figures = read(patient(database))

    assert (figures["regraft_webhooks_waiting",], figures["regraft_webhooks_failing",]) == (2, 1)


@pytest.mark.slow
def test_the_database_is_asked_no_more_often_than_it_must(database: Database, project: Project) -> None:
    clock = Clock()
    figures = patient(database, clock=clock)
    read(figures)
    with database.write() as session:
        factories.job(session, project)

    assert ("regraft_jobs", "queued", "cpu") not in read(figures)
    clock.now += FRESH_SECONDS
    assert read(figures)["regraft_jobs", "queued", "cpu"] == 1


class Away:
    def read(self) -> NoReturn:
        raise OperationalError("select", {}, Exception("connection refused"))


def test_a_scrape_succeeds_without_the_database_and_says_so() -> None:
    assert read(ServiceCollector(untyped(Away()))) == {("regraft_database_up",): 0}


def test_a_database_that_says_nothing_does_not_keep_prometheus_waiting() -> None:
    speaks, asked = threading.Event(), []

    class Silent:
        @contextmanager
        def read(self) -> Iterator[None]:
            asked.append(1)
            speaks.wait(30)
            raise OperationalError("", None, Exception("too late"))
            yield

    clock = Clock()
    figures = ServiceCollector(untyped(Silent()), clock=clock, patience=0.01)
    for _ in range(2):
        assert read(figures) == {("regraft_database_up",): 0}
        clock.now += FRESH_SECONDS
    assert len(asked) == 1, "nothing more is asked while there is no answer"
    speaks.set()


def test_a_blob_store_is_up_while_it_takes_and_returns_an_object(tmp_path: Path) -> None:
    blobs, clock = WatchedBlobs(tmp_path), Clock()
    figures = StoreCollector(blobs, clock=clock, patience=60)

    def value() -> float:
        clock.now += FRESH_SECONDS
        return read(figures)["regraft_blob_store_up",]

    assert (value(), list(blobs.list(""))) == (1, [])
    blobs.writable = False
    assert value() == 0
    blobs.writable, blobs.reachable = True, False
    assert [value() for _ in range(3)] == [1, 1, 1]
    assert len(list(blobs.list(""))) == 1, "a store that deletes nothing keeps one object"


def test_a_blob_store_that_says_nothing_is_not_up(tmp_path: Path) -> None:
    speaks = threading.Event()

    class Silent(WatchedBlobs):
        def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
            speaks.wait(30)
            return super().writer(key, if_absent=if_absent)

    assert read(StoreCollector(Silent(tmp_path), patience=0.01)) == {("regraft_blob_store_up",): 0}
    speaks.set()


@pytest.mark.slow
def test_prometheus_reads_them_at_a_port_of_their_own(sqlite_database: Database) -> None:
    figures = [patient(sqlite_database)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        with served(listening, Settings(), figures), urllib.request.urlopen(address) as answer:
            text = answer.read().decode()

    assert "regraft_database_up 1.0" in text
    assert "process_resident_memory_bytes" in text
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(address)
