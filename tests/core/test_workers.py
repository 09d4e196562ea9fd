"""The workers and the queues of the service, as an operator sees them."""

import time
from collections.abc import Collection
from dataclasses import replace

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from core.database.tables import EvalRun, Project, Worker
from core.service import queues, workers
from core.service.queues import Queue
from core.service.workers import FORGOTTEN_SECONDS, GpuUse, Report
from core.telemetry.silence import SILENT_SECONDS
from core.tenancy.limits import NO_LIMITS, Limits
from tests import factories

pytestmark = pytest.mark.both_databases

GPU = GpuUse("0", "NVIDIA H200", 1 << 30, 140 << 30, None)
REPORT = Report(
    name="a/1",
    host="a",
    gpu_class="cpu",
    version="0.1.0",
    machines=1,
    ranks=2,
    gpus=[GPU],
    memory_used_bytes=3,
    memory_total_bytes=8,
    draining=False,
    findings=[],
)


def silence(session: Session, name: str, seconds: float) -> None:
    session.execute(update(Worker).where(Worker.name == name).values(seen_at=Worker.seen_at - seconds))
    session.expire_all()


def found(
    session: Session, defaults: Limits = NO_LIMITS, pod_classes: Collection[str] = ()
) -> dict[str, Queue]:
    listed = queues.queues(session, defaults, workers.listed(session), pod_classes)
    return {queue.gpu_class or queue.kind: queue for queue in listed}


def eval_run(session: Session, project: Project, **fields: object) -> EvalRun:
    row = EvalRun(eval_id="eval_1", project_id=project.id, name="e", data_source={}, total=1, **fields)
    session.add(row)
    session.flush()
    return row


def test_a_worker_that_reports_again_is_one_worker_that_started_once(session: Session) -> None:
    workers.begin(session, REPORT)
    silence(session, "a/1", 30)
    session.execute(update(Worker).values(started_at=Worker.started_at - 30))
    workers.report(session, replace(REPORT, memory_used_bytes=5))

    [seen] = workers.listed(session)

    assert (seen.status, seen.worker.memory_used_bytes, seen.worker.ranks) == ("idle", 5, 2)
    assert seen.worker.gpus[0]["name"] == "NVIDIA H200" and seen.worker.gpus[0]["utilization"] is None
    assert seen.silent_seconds < 30
    assert seen.worker.seen_at - seen.worker.started_at == pytest.approx(30, abs=5)


def test_a_process_that_starts_with_the_name_of_an_earlier_one_started_now(session: Session) -> None:
    """In a container the process id is always 1."""
    workers.begin(session, REPORT)
    session.execute(update(Worker).values(started_at=0))
    session.expire_all()
    workers.begin(session, REPORT)

    [seen] = workers.listed(session)

    assert seen.worker.started_at == pytest.approx(time.time(), abs=30)


def test_a_worker_shows_what_it_works_on(session: Session, project: Project) -> None:
    workers.begin(session, REPORT)
    mine = {"lease_owner": "a/1", "lease_expires_at": time.time() + 60, "epoch": 1}
    progress = {"epoch": 1, "step": 3, "phase": "sampling", "done": 1, "of": 8, "since": 0}
    run = factories.job(session, project, status="running", progress=progress, **mine)
    checked = factories.job(session, project, status="validating_files", **mine)
    graded = eval_run(session, project, status="in_progress", model="tiny", **mine)
    factories.job(session, project, status="running")  # of another worker

    [seen] = workers.listed(session)

    assert seen.status == "busy"
    assert [(task.kind, task.id) for task in seen.tasks] == [
        ("run", run.id),
        ("validation", checked.id),
        ("eval_run", graded.id),
    ]
    assert seen.tasks[0].progress == {"step": 3, "phase": "sampling", "done": 1, "of": 8, "since": 0}


def test_a_worker_that_only_validates_is_free_for_a_run(session: Session, project: Project) -> None:
    workers.begin(session, REPORT)
    factories.job(session, project, status="validating_files", lease_owner="a/1")

    assert [seen.status for seen in workers.listed(session)] == ["idle"]


def test_a_worker_that_stops_drains_and_is_gone(session: Session) -> None:
    workers.begin(session, REPORT)
    workers.report(session, replace(REPORT, draining=True))
    assert [seen.status for seen in workers.listed(session)] == ["draining"]

    workers.end(session, "a/1")

    assert workers.listed(session) == []


def test_a_worker_that_was_killed_is_silent_for_a_day_and_then_forgotten(session: Session) -> None:
    workers.begin(session, REPORT)
    workers.begin(session, replace(REPORT, name="b/1"))
    silence(session, "a/1", SILENT_SECONDS + 5)
    workers.forget(session)
    assert [seen.status for seen in workers.listed(session)] == ["silent", "idle"]

    silence(session, "a/1", FORGOTTEN_SECONDS)
    workers.forget(session)

    assert [seen.worker.name for seen in workers.listed(session)] == ["b/1"]


def test_a_queue_without_a_worker_says_so(session: Session, project: Project) -> None:
    factories.job(session, project, gpu_class="h200", created_at=int(time.time()) - 300)

    queue = found(session)["h200"]

    assert (queue.kind, queue.length, queue.workers) == ("jobs", 1, 0)
    assert queue.oldest_seconds == pytest.approx(300, abs=30)
    assert queue.reason == "no worker of class h200 reports itself"


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        (300, "a pod of class h200 will be started for each"),
        (
            1200,
            "no pod of class h200 was started in 20 minutes; see `kubectl get scaledjobs,jobs,pods` and "
            "the dispatcher, if there is one",
        ),
    ],
)
def test_the_queue_of_a_pool_of_jobs_waits_for_pods(
    session: Session, project: Project, seconds: int, reason: str
) -> None:
    factories.job(session, project, gpu_class="h200", created_at=int(time.time()) - seconds)

    assert found(session, pod_classes={"h200"})["h200"].reason == reason


def test_a_queue_waits_for_busy_workers_and_not_for_silent_ones(session: Session, project: Project) -> None:
    workers.begin(session, REPORT)
    workers.begin(session, replace(REPORT, name="b/1"))
    factories.job(session, project)
    assert found(session)["cpu"].reason == "a free worker is about to start the next one"

    factories.job(session, project, status="running", lease_owner="a/1")
    silence(session, "b/1", SILENT_SECONDS + 5)

    queue = found(session)["cpu"]
    assert (queue.reason, queue.workers, queue.running) == ("every worker of class cpu is busy", 1, 1)


def test_workers_that_all_stop_start_nothing(session: Session, project: Project) -> None:
    workers.begin(session, replace(REPORT, draining=True))
    factories.job(session, project)

    assert found(session)["cpu"].reason == "every worker of class cpu is stopping"


def test_jobs_of_a_project_at_its_limit_are_held_back(session: Session, project: Project) -> None:
    workers.begin(session, REPORT)
    for status in ("running", "queued", "queued"):
        factories.job(session, project, status=status)

    queue = found(session, Limits(running_jobs=1))["cpu"]

    assert (queue.length, queue.held_back) == (0, 2)
    assert queue.reason == "their projects run as many jobs as they may"


def test_jobs_that_back_off_are_counted_apart(session: Session, project: Project) -> None:
    factories.job(session, project, next_run_at=time.time() + 600)

    queue = found(session)["cpu"]

    assert (queue.length, queue.backing_off) == (0, 1)
    assert queue.reason == "they back off after an interruption"


def test_an_idle_service_has_queues_in_which_nothing_waits(session: Session) -> None:
    workers.begin(session, REPORT)

    listed = found(session)

    assert list(listed) == ["cpu", "validations", "eval_runs"]
    assert [queue.reason for queue in listed.values()] == [None, None, None]
    assert [queue.workers for queue in listed.values()] == [1, 1, 1]


def test_validations_and_eval_runs_have_queues_of_their_own(session: Session, project: Project) -> None:
    factories.job(session, project, status="validating_files", lease_owner=None, lease_expires_at=None)
    eval_run(session, project, status="queued", created_at=int(time.time()) - 60)
    eval_run(session, project, status="in_progress")

    listed = found(session)

    assert (listed["validations"].length, listed["validations"].reason) == (1, "no worker reports itself")
    runs = listed["eval_runs"]
    assert (runs.length, runs.running, runs.reason) == (1, 1, "no worker reports itself")
    assert runs.oldest_seconds == pytest.approx(60, abs=30)


def test_the_pod_of_a_job_takes_no_validation_and_no_eval_run(session: Session, project: Project) -> None:
    factories.job(session, project, status="validating_files", lease_owner=None, lease_expires_at=None)
    eval_run(session, project, status="queued", created_at=int(time.time()) - 60)
    workers.begin(session, REPORT)

    listed = found(session, pod_classes={REPORT.gpu_class})

    for kind in ("validations", "eval_runs"):
        assert (listed[kind].workers, listed[kind].reason) == (0, "no worker reports itself")
    assert listed["cpu"].workers == 1


def test_eval_runs_of_a_project_at_its_limit_are_held_back(session: Session, project: Project) -> None:
    for status in ("in_progress", "queued"):
        eval_run(session, project, status=status)

    runs = found(session, Limits(running_eval_runs=1))["eval_runs"]

    assert (runs.length, runs.held_back) == (0, 1)
    assert runs.reason == "their projects run as many eval runs as they may"
