import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from core.claims import Claim, LeaseLost
from core.database.engine import Database, Work, db_now
from core.database.states import JOB, JOB_EDGES
from core.database.tables import Checkpoint, Event, Job, Project
from core.errors import InvalidJobState, InvalidRequest, JobNotFound
from core.jobs import events, lifecycle, queue
from tests import factories
from tests.present import present, untyped

pytestmark = pytest.mark.both_databases

WAKE_CPU = (queue.RUN, "gpu.cpu")
WAKE_VALIDATION = (queue.VALIDATE, queue.DEFAULT_QUEUE)


def claim(session: Session, **how: Any) -> Claim | None:
    asked: dict[str, Any] = {"gpu_class": "cpu", "owner": "worker", "lease_seconds": 60}
    return lifecycle.claim(session, **asked | how)


def claim_validation(session: Session, **how: Any) -> Claim | None:
    asked: dict[str, Any] = {"owner": "worker", "lease_seconds": 60}
    return lifecycle.claim_validation(session, **asked | how)


def messages(session: Session, job: Job) -> list[Any]:
    """Oldest first."""
    return list(session.scalars(select(Event.message).where(Event.job_id == job.id).order_by(Event.seq)))


def last_event(session: Session, job: Job) -> Event | None:
    return session.scalars(select(Event).where(Event.job_id == job.id).order_by(Event.seq.desc())).first()


def is_held(job: Job) -> bool:
    return (job.lease_owner, job.lease_expires_at) != (None, None)


def fresh(session: Session, job: Job) -> Job:
    session.flush()
    session.refresh(job)
    return job


# The graph.


def test_every_edge_leads_to_a_known_status() -> None:
    assert {status for further in JOB_EDGES.values() for status in further} <= set(JOB_EDGES)


def test_nothing_follows_the_statuses_that_openais_clients_wait_for() -> None:
    assert set(JOB.final) == {"succeeded", "failed", "cancelled"}


def test_cancel_is_possible_from_everywhere_else() -> None:
    assert all("cancelled" in JOB_EDGES[status] for status in set(JOB_EDGES) - JOB.final)


def test_the_graph_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        untyped(JOB_EDGES)["failed"] = frozenset({"queued"})


# Create, read, list.


def create(work: Work, project: Project, **fields: Any) -> Job:
    asked: dict[str, Any] = {
        "project": project,
        "model": "tiny",
        "training_file": factories.file(work.session, project, id="file-train"),
        "validation_file": None,
        "suffix": "mine",
        "seed": 7,
        "metadata": {"team": "a"},
        "body": {"grader": {"type": "string_check"}},
        "gpu_class": "h200",
    }
    return lifecycle.create(work, **asked | fields)


def test_a_new_job_is_what_was_asked_for_and_waits_for_its_validation(work: Work, project: Project) -> None:
    job = fresh(work.session, create(work, project))

    assert job.id.startswith("ftjob-")
    assert (job.status, job.epoch, job.seed, job.suffix) == ("validating_files", 0, 7, "mine")
    assert (job.project_id, job.organization_id) == (project.id, project.organization_id)
    assert (job.training_file, job.validation_file) == ("file-train", None)
    assert (job.metadata_, job.gpu_class) == ({"team": "a"}, "h200")
    assert not is_held(job)


def test_a_new_job_says_so_in_openais_words_and_wakes_a_validator(work: Work, project: Project) -> None:
    job = create(work, project)

    created = f"Created fine-tuning job: {job.id}"
    assert messages(work.session, job) == [created, "Validating training file: file-train"]
    assert work.outbox == [(*WAKE_VALIDATION, job.id)]


def test_a_validation_file_is_named_and_announced(work: Work, project: Project) -> None:
    valid = factories.file(work.session, project, id="file-valid")

    job = create(work, project, validation_file=valid)

    assert job.validation_file == "file-valid"
    expected = "Validating training file: file-train and validation file: file-valid"
    assert messages(work.session, job)[-1] == expected


def test_a_job_is_found_in_its_project_only(session: Session, project: Project) -> None:
    job = factories.job(session, project)

    assert lifecycle.get(session, project.id, job.id) is job
    with pytest.raises(JobNotFound, match=job.id):
        lifecycle.get(session, factories.project(session).id, job.id)


def test_an_unknown_job_is_not_found(session: Session, project: Project) -> None:
    with pytest.raises(JobNotFound):
        lifecycle.get(session, project.id, "ftjob-nothing")


def test_a_list_has_the_projects_jobs_newest_first(session: Session, project: Project) -> None:
    first, second, third = (factories.job(session, project) for _ in range(3))
    factories.job(session, factories.project(session))

    page = lifecycle.page(session, project.id, limit=2)
    rest = lifecycle.page(session, project.id, after=second.id, limit=2)

    assert (list(page.items), page.has_more) == ([third, second], True)
    assert (list(rest.items), rest.has_more) == ([first], False)


def test_a_list_does_not_start_behind_another_projects_job(session: Session, project: Project) -> None:
    theirs = factories.job(session, factories.project(session))

    with pytest.raises(InvalidRequest):
        lifecycle.page(session, project.id, after=theirs.id, limit=2)


def test_a_list_can_be_narrowed_to_jobs_with_all_of_some_metadata(session: Session, project: Project) -> None:
    both = factories.job(session, project, metadata_={"team": "a", "run": "1"})
    factories.job(session, project, metadata_={"team": "a", "run": "2"})
    factories.job(session, project, metadata_={"team": "a"})
    factories.job(session, project)

    page = lifecycle.page(session, project.id, limit=9, metadata={"team": "a", "run": "1"})

    assert list(page.items) == [both]


@pytest.mark.parametrize("key", ['the "best"', "größe", "a.b", "back\\slash", "$", "[0]", "0", "it's 5%", ""])
def test_metadata_is_found_whatever_its_key_looks_like(session: Session, project: Project, key: str) -> None:
    job = factories.job(session, project, metadata_={key: "válue"})

    assert list(lifecycle.page(session, project.id, limit=9, metadata={key: "válue"}).items) == [job]
    assert list(lifecycle.page(session, project.id, limit=9, metadata={key: "other"}).items) == []


def test_a_list_can_be_narrowed_to_jobs_without_metadata(session: Session, project: Project) -> None:
    factories.job(session, project, metadata_={"team": "a"})
    bare = factories.job(session, project)

    assert list(lifecycle.page(session, project.id, limit=9, without_metadata=True).items) == [bare]


# What users ask of a job in each status: the status it has then, or None for a refusal.

REFUSED = None
ANSWERS: dict[Callable[[Work, Job], None], dict[str, str | None]] = {
    lifecycle.cancel: {
        "validating_files": "cancelled",
        "queued": "cancelled",
        "running": "cancelled",
        "pausing": "cancelled",
        "paused": "cancelled",
        "succeeded": REFUSED,
        "failed": REFUSED,
        "cancelled": "cancelled",
    },
    lifecycle.pause: {
        "validating_files": REFUSED,
        "queued": "paused",
        "running": "pausing",
        "pausing": "pausing",
        "paused": "paused",
        "succeeded": REFUSED,
        "failed": REFUSED,
        "cancelled": REFUSED,
    },
    lifecycle.resume: {
        "validating_files": REFUSED,
        "queued": REFUSED,
        "running": REFUSED,
        "pausing": REFUSED,
        "paused": "queued",
        "succeeded": REFUSED,
        "failed": REFUSED,
        "cancelled": REFUSED,
    },
}


@pytest.mark.parametrize("action", ANSWERS, ids=lambda action: action.__name__)
@pytest.mark.parametrize("status", JOB_EDGES)
def test_a_user_gets_the_next_status_or_a_reason(
    work: Work, project: Project, action: Callable[[Work, Job], None], status: str
) -> None:
    job = factories.job(work.session, project, status=status)
    expected = ANSWERS[action][status]

    if expected is REFUSED:
        with pytest.raises(InvalidJobState, match=job.id):
            action(work, job)
        assert (job.status, messages(work.session, job)) == (status, [])
    else:
        action(work, job)
        assert fresh(work.session, job).status == expected
        assert len(messages(work.session, job)) == (expected != status)


def test_a_job_that_has_ended_is_refused_in_openais_words(work: Work, project: Project) -> None:
    job = factories.job(work.session, project, status="succeeded")

    with pytest.raises(InvalidJobState, match=f"^Job has already completed: {job.id}$"):
        lifecycle.cancel(work, job)


@pytest.mark.parametrize("status", sorted(JOB.leased))
def test_cancel_takes_the_job_from_its_worker_at_once(database: Database, status: str) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session), status=status, epoch=4)
        lifecycle.cancel(Work(session), job)

    worker = Claim(job.id, 4, "worker")
    assert (job.epoch, is_held(job), job.finished_at is not None) == (5, False, True)
    with database.write() as session:
        assert not lifecycle.heartbeat(session, worker, 60)
    with pytest.raises(LeaseLost), lifecycle.fenced(database, worker):
        pass


def test_a_second_cancel_changes_nothing(work: Work, project: Project) -> None:
    job = factories.job(work.session, project)
    lifecycle.cancel(work, job)
    job.finished_at = 123

    lifecycle.cancel(work, job)

    assert (job.epoch, job.finished_at) == (1, 123)


@pytest.mark.parametrize("action", [lifecycle.cancel, lifecycle.pause])
def test_the_row_decides_and_not_what_was_read_of_it_earlier(
    work: Work, project: Project, action: Callable[[Work, Job], None]
) -> None:
    job = factories.job(work.session, project, status="running")
    ended = update(Job).values(status="succeeded").execution_options(synchronize_session=False)
    work.session.execute(ended)
    assert job.status == "running"

    with pytest.raises(InvalidJobState):
        action(work, job)


def test_a_job_that_is_asked_to_pause_stays_with_its_worker_until_it_has(
    work: Work, project: Project
) -> None:
    job = factories.job(work.session, project, status="running")

    lifecycle.pause(work, job)

    assert is_held(job)
    assert lifecycle.heartbeat(work.session, Claim(job.id, job.epoch, "worker"), 60)


def test_resume_wakes_the_workers_of_the_jobs_class(work: Work, project: Project) -> None:
    job = factories.job(work.session, project, status="paused", gpu_class="h200")

    lifecycle.resume(work, job)

    assert work.outbox == [(queue.RUN, "gpu.h200", job.id)]


# Claims.


def test_a_claim_starts_the_job_and_holds_it(session: Session, project: Project) -> None:
    job = factories.job(session, project)

    held = claim(session, owner="worker-1", lease_seconds=30)

    assert held == Claim(job.id, 1, "worker-1")
    assert (fresh(session, job).status, job.lease_owner) == ("running", "worker-1")
    assert job.lease_expires_at == pytest.approx(present(session.scalar(select(db_now()))) + 30, abs=5)
    assert job.started_at is not None
    assert messages(session, job) == ["Fine-tuning job started"]


def test_there_may_be_nothing_to_claim(session: Session, project: Project) -> None:
    for status in JOB_EDGES.keys() - {"queued"}:
        factories.job(session, project, status=status)

    assert claim(session) is None


def test_a_worker_gets_jobs_of_its_class_only(session: Session, project: Project) -> None:
    factories.job(session, project, gpu_class="h200")

    assert claim(session, gpu_class="cpu") is None
    assert claim(session, gpu_class="h200") is not None


def test_a_job_that_backs_off_is_not_claimed_before_its_time(session: Session, project: Project) -> None:
    later = present(session.scalar(select(db_now()))) + 60
    factories.job(session, project, next_run_at=later)

    assert claim(session) is None


@pytest.mark.both_databases
def test_a_worker_leaves_a_job_that_does_not_fit_and_takes_none_behind_it(
    session: Session, project: Project
) -> None:
    first = factories.job(session, project, model="large")
    second = factories.job(session, project, model="small")

    assert claim(session, fits=lambda job: job.model == "small") is None
    assert [(fresh(session, job).status, job.epoch) for job in (first, second)] == [("queued", 0)] * 2
    claimed = claim(session, fits=lambda job: job.model == "large")
    assert claimed is not None and claimed.job_id == first.id


def test_a_job_that_starts_again_says_which_attempt_it_is_and_keeps_its_first_start(
    session: Session, project: Project
) -> None:
    job = factories.job(session, project, epoch=5)  # the epoch counts more than attempts
    claim(session)
    job.started_at = 123
    lifecycle.release(session, job)
    claim(session)

    event = last_event(session, job)
    assert event is not None
    assert (event.message, event.data) == ("Fine-tuning job resumed", {"attempt": 2})
    assert fresh(session, job).started_at == 123


def test_the_project_with_the_fewest_running_jobs_is_next(session: Session) -> None:
    busy, quiet = factories.project(session), factories.project(session)
    names = {factories.job(session, busy).id: f"busy {n}" for n in (1, 2, 3)}
    names |= {factories.job(session, quiet).id: f"quiet {n}" for n in (1, 2)}

    order = [names[present(claim(session)).job_id] for _ in range(5)]

    assert order == ["busy 1", "quiet 1", "busy 2", "quiet 2", "busy 3"]


def test_a_job_that_is_pausing_still_counts_as_running(session: Session) -> None:
    busy, quiet = factories.project(session), factories.project(session)
    factories.job(session, busy, status="pausing")
    factories.job(session, busy)
    fair = factories.job(session, quiet)

    assert present(claim(session)).job_id == fair.id


@pytest.mark.slow
def test_each_job_is_claimed_once_however_many_ask(database: Database) -> None:
    with database.write() as session:
        owners = [factories.project(session) for _ in range(4)]
        expected = {factories.job(session, owners[n % 4]).id for n in range(40)}
    together = threading.Barrier(8)

    def take_all(worker: Any) -> list[Claim]:
        together.wait()
        taken: list[Any] = []
        while True:
            with database.write() as session:
                held = claim(session, owner=f"worker-{worker}")
            if held is None:
                return taken
            taken.append(held)

    with ThreadPoolExecutor(8) as threads:
        taken = [held for each in threads.map(take_all, range(8)) for held in each]

    assert len(taken) == 40
    assert {held.job_id for held in taken} == expected
    assert {held.epoch for held in taken} == {1}


def test_a_job_that_somebody_is_just_taking_is_passed_over_and_not_waited_for(
    postgres_database: Database,
) -> None:
    with postgres_database.write() as session:
        project = factories.project(session)
        first, second = factories.job(session, project), factories.job(session, project)

    with postgres_database.write() as slow, postgres_database.write() as quick:
        quick.execute(text("set local lock_timeout = '2s'"))
        assert present(claim(slow)).job_id == first.id
        assert present(claim(quick)).job_id == second.id
        assert claim(quick) is None


# Validation.


def test_the_oldest_job_that_nobody_validates_is_next(session: Session, project: Project) -> None:
    factories.job(session, project)
    factories.job(session, project, status="validating_files")  # with a live lease
    free = {"status": "validating_files", "lease_owner": None, "lease_expires_at": None}
    first, second = factories.job(session, project, **free), factories.job(session, project, **free)

    assert claim_validation(session, owner="a") == Claim(first.id, 2, "a")
    assert claim_validation(session, owner="b") == Claim(second.id, 2, "b")
    assert claim_validation(session) is None
    assert (fresh(session, first).status, first.lease_owner) == ("validating_files", "a")


def test_a_validation_whose_worker_is_lost_can_be_taken_over(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="validating_files", lease_expires_at=1.0)

    assert claim_validation(session) == Claim(job.id, 2, "worker")


def test_good_files_put_the_job_in_the_queue(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="validating_files", failures=1, dispatched_at=9.0)

    wake = lifecycle.validated(session, job)

    assert wake == (*WAKE_CPU, job.id)
    assert (fresh(session, job).status, is_held(job)) == ("queued", False)
    assert (job.failures, job.dispatched_at) == (0, 0.0)
    assert messages(session, job) == ["Files validated, moving job to queued state"]


# The end of a run, in each status.


def fail(session: Session, job: Job) -> None:
    lifecycle.fail(session, job, code="invalid_training_file", message="line 3: no", param="training_file")


def succeed(session: Session, job: Job) -> None:
    lifecycle.succeed(session, job, fine_tuned_model="ft:tiny:acme::1")


def crash(session: Session, job: Job) -> None:
    lifecycle.crashed(session, job, reason="exit code 9", max_failures=3)


ENDS = {
    lifecycle.validated: {"validating_files": "queued"},
    succeed: {"running": "succeeded", "pausing": "succeeded"},
    fail: {"validating_files": "failed", "running": "failed", "pausing": "failed"},
    lifecycle.release: {"validating_files": "validating_files", "running": "queued", "pausing": "paused"},
    crash: {"validating_files": "validating_files", "running": "queued", "pausing": "paused"},
}


@pytest.mark.parametrize(
    ("end", "status", "expected"),
    [(end, status, expected) for end, statuses in ENDS.items() for status, expected in statuses.items()],
)
def test_however_a_claim_ends_the_job_is_free_again(
    session: Session, project: Project, end: Any, status: Any, expected: Any
) -> None:
    job = factories.job(session, project, status=status, estimated_finish=123)

    end(session, job)

    assert (fresh(session, job).status, is_held(job), job.estimated_finish) == (expected, False, None)
    assert (job.finished_at is not None) == (expected in JOB.final)
    assert messages(session, job)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (end, status)
        for end, ends in ((succeed, ENDS[succeed]), (fail, ENDS[fail]))
        for status in JOB_EDGES
        if status not in ends
    ],
)
def test_a_job_does_not_end_twice_or_before_it_has_begun(
    session: Session, project: Project, end: Any, status: Any
) -> None:
    job = factories.job(session, project, status=status)

    with pytest.raises(InvalidJobState):
        end(session, job)

    assert (job.status, messages(session, job)) == (status, [])


def test_success_names_the_model_and_says_so_in_openais_words(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="running")

    succeed(session, job)

    assert job.fine_tuned_model == "ft:tiny:acme::1"
    assert messages(session, job) == [
        "New fine-tuned model created: ft:tiny:acme::1",
        "The job has successfully completed",
    ]


def test_failure_is_kept_on_the_job_and_told_as_an_error(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="running")

    fail(session, job)

    error = {"code": "invalid_training_file", "message": "line 3: no", "param": "training_file"}
    assert fresh(session, job).error == error
    event = last_event(session, job)
    assert event is not None
    assert (event.level, event.message) == ("error", "line 3: no")


def test_a_drained_run_goes_on_at_once_and_has_spent_no_failure(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="running", failures=2)

    lifecycle.release(session, job)

    assert job.failures == 2
    assert present(claim(session)).job_id == job.id


# Crashes.


@pytest.mark.parametrize(("failures", "seconds"), [(0, 2), (1, 4), (4, 32), (5, 60), (30, 60)])
def test_each_crash_doubles_the_wait_up_to_a_minute(
    session: Session, project: Project, failures: int, seconds: int
) -> None:
    job = factories.job(session, project, status="running", failures=failures)

    lifecycle.crashed(session, job, reason="exit code 9", max_failures=99)

    wait = job.next_run_at - present(session.scalar(select(db_now())))
    assert wait == pytest.approx(seconds, abs=1)
    assert claim(session) is None


def test_a_crash_is_told_as_a_warning_with_its_reason(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="running")

    crash(session, job)

    event = last_event(session, job)
    assert event is not None
    assert (event.level, event.data) == ("warn", {"failures": 1})
    assert "exit code 9" in event.message


@pytest.mark.parametrize(("failures", "level"), [(0, "warn"), (3, "error")])
def test_however_much_a_run_said_its_crash_is_told_in_one_short_line(
    session: Session, project: Project, failures: int, level: str
) -> None:
    job = factories.job(session, project, status="running", failures=failures)

    lifecycle.crashed(session, job, reason=f"\r 9%|#\r{'x' * 500}\nmore\r", max_failures=3)

    event = last_event(session, job)
    assert event is not None
    assert (event.level, len(event.message)) == (level, lifecycle.MAX_CRASH_MESSAGE)
    assert event.message.endswith(f"xxx…. Log: GET /v1/regraft/jobs/{job.id}/logs")
    assert not set("\r\n#") & set(event.message)


@pytest.mark.parametrize("status", ["running", "validating_files"])
def test_one_crash_too_many_fails_the_job(session: Session, project: Project, status: str) -> None:
    job = factories.job(session, project, status=status, failures=3)

    crash(session, job)

    assert (job.status, job.failures) == ("failed", 4)
    assert job.error is not None
    assert job.error["code"] == "internal_error"
    assert "exit code 9" in job.error["message"]


def test_no_crash_fails_a_job_that_was_to_pause_anyway(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="pausing", failures=3)

    crash(session, job)

    assert (job.status, job.failures) == ("paused", 4)


# Fencing.


def test_a_claim_writes_while_it_holds(database: Database) -> None:
    with database.write() as session:
        factories.job(session, factories.project(session))
        held = claim(session)

    assert held is not None
    with lifecycle.fenced(database, held) as (session, job):
        events.append(session, job.id, "Step 1/2")

    with database.read() as session:
        assert messages(session, job) == ["Fine-tuning job started", "Step 1/2"]


def test_a_worker_that_was_replaced_writes_nothing(database: Database) -> None:
    with database.write() as session:
        factories.job(session, factories.project(session))
        stale = claim(session, owner="first", lease_seconds=-1)
        lifecycle.expire_leases(session, max_failures=3)
        session.execute(update(Job).values(next_run_at=0.0))
        current = claim(session, owner="second")
    assert stale is not None
    assert current is not None
    assert (stale.epoch, current.epoch) == (1, 3)

    with pytest.raises(LeaseLost, match="first"), lifecycle.fenced(database, stale) as (session, job):
        job.result_file = "file-of-the-first"

    with database.read() as session:
        job = session.scalars(select(Job)).one()
        assert (job.result_file, job.lease_owner) == (None, "second")


@pytest.mark.parametrize("status", sorted(set(JOB_EDGES) - JOB.leased))
def test_nobody_writes_to_a_job_that_nobody_holds(database: Database, status: str) -> None:
    """Not even with the right epoch: the run that has ended its job is done with it."""
    with database.write() as session:
        job = factories.job(session, factories.project(session), status=status, epoch=1)

    with pytest.raises(LeaseLost), lifecycle.fenced(database, Claim(job.id, 1, "worker")):
        pass


def test_nobody_writes_to_a_job_that_does_not_exist(database: Database) -> None:
    with pytest.raises(LeaseLost), lifecycle.fenced(database, Claim("ftjob-nothing", 1, "worker")):
        pass


def test_what_fails_inside_the_fence_leaves_nothing_behind(database: Database) -> None:
    with database.write() as session:
        factories.job(session, factories.project(session))
        held = claim(session)

    def stumble() -> None:
        assert held is not None
        with lifecycle.fenced(database, held) as (session, job):
            lifecycle.release(session, job)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()

    assert held is not None
    with lifecycle.fenced(database, held) as (session, job):
        assert job.status == "running"


# Leases.


def test_a_heartbeat_keeps_the_job(session: Session, project: Project) -> None:
    factories.job(session, project)
    held = claim(session, lease_seconds=-1)

    assert held is not None
    assert lifecycle.heartbeat(session, held, 60)
    assert lifecycle.expire_leases(session, max_failures=3) == 0


def test_a_lost_worker_costs_a_failure_and_the_job_waits_for_another(
    session: Session, project: Project
) -> None:
    job = factories.job(session, project)
    held = claim(session, lease_seconds=-1)

    assert lifecycle.expire_leases(session, max_failures=3) == 1

    assert (fresh(session, job).status, job.epoch, job.failures) == ("queued", 2, 1)
    assert "the worker stopped answering" in present(last_event(session, job)).message
    assert held is not None
    assert not lifecycle.heartbeat(session, held, 60)


@pytest.mark.parametrize(
    ("status", "expected"), [("pausing", "paused"), ("validating_files", "validating_files")]
)
def test_a_lost_worker_leaves_the_job_where_it_can_go_on(
    session: Session, project: Project, status: str, expected: str
) -> None:
    job = factories.job(session, project, status=status, lease_expires_at=1.0)

    assert lifecycle.expire_leases(session, max_failures=3) == 1
    assert lifecycle.expire_leases(session, max_failures=3) == 0

    assert (fresh(session, job).status, job.epoch, job.failures) == (expected, 2, 1)


def test_a_job_that_loses_its_worker_while_it_pauses_is_paused_without_a_checkpoint(
    session: Session, project: Project
) -> None:
    """It waits for no other worker, which would only save what it has: clients find no checkpoint, and an event."""
    job = factories.job(session, project)
    assert claim(session, lease_seconds=-1) is not None
    lifecycle.pause(Work(session), job)

    lifecycle.expire_leases(session, max_failures=3)

    assert fresh(session, job).status == "paused"
    assert session.scalars(select(Checkpoint).where(Checkpoint.job_id == job.id)).all() == []
    assert "interrupted: the worker stopped answering" in present(last_event(session, job)).message


def test_a_job_that_loses_every_worker_fails(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="running", lease_expires_at=1.0, failures=3)

    lifecycle.expire_leases(session, max_failures=3)

    assert job.status == "failed"


def test_a_job_that_is_put_off_again_waits_longer(session: Session, project: Project) -> None:
    job, waits = factories.job(session, project), list[float]()

    for cause in ("put off", "put off", "crashed", "put off", "put off", "put off", "put off"):
        job.next_run_at = 0.0
        session.flush()
        assert claim(session) is not None
        if cause == "crashed":
            lifecycle.crashed(session, fresh(session, job), reason="no CUDA", max_failures=3)
            continue
        lifecycle.put_off(session, fresh(session, job), reason="its GPU is in use")
        waits.append(round(job.next_run_at - time.time()))

    assert waits == [120, 240, 120, 240, 480, 600]


def test_a_job_that_runs_smaller_several_times_in_a_row_backs_off(session: Session, project: Project) -> None:
    job = factories.job(session, project)
    waits = []

    for _ in range(3):
        job.next_run_at = 0.0
        session.flush()
        assert claim(session)
        lifecycle.run_smaller(session, fresh(session, job), reason="out of memory")
        waits.append(round(job.next_run_at - time.time()))

    assert waits == [0, 2, 4]


def test_a_worker_that_starts_shortens_no_wait_of_a_job_that_was_put_off(
    session: Session, project: Project
) -> None:
    """Its first pass bounds the times of a database whose clock was set back."""
    job = factories.job(session, project)
    assert claim(session) is not None
    lifecycle.put_off(session, fresh(session, job), reason="its GPU is in use")
    due = job.next_run_at

    lifecycle.bound_times(session, 60.0)

    assert fresh(session, job).next_run_at == due


def test_a_live_lease_is_left_alone(session: Session, project: Project) -> None:
    for status in JOB.leased:
        factories.job(session, project, status=status)

    assert lifecycle.expire_leases(session, max_failures=3) == 0


# Wake-ups.


def test_work_that_nobody_was_told_of_is_announced_once_for_each_queue(
    session: Session, project: Project
) -> None:
    for gpu_class in ("cpu", "cpu", "h200"):
        factories.job(session, project, gpu_class=gpu_class)
    for _ in range(2):
        factories.job(session, project, status="validating_files", lease_expires_at=None)

    assert set(lifecycle.to_wake(session, older_than=30)) == {
        WAKE_CPU,
        (queue.RUN, "gpu.h200"),
        WAKE_VALIDATION,
    }
    assert lifecycle.to_wake(session, older_than=30) == []


@pytest.mark.slow
def test_what_was_announced_long_ago_is_announced_again(session: Session, project: Project) -> None:
    factories.job(session, project, dispatched_at=present(session.scalar(select(db_now()))) - 40)

    assert lifecycle.to_wake(session, older_than=50) == []
    assert lifecycle.to_wake(session, older_than=30) == [WAKE_CPU]


def test_a_job_that_is_put_back_is_announced_without_waiting_for_the_last_time_to_be_old(
    session: Session, project: Project
) -> None:
    job = factories.job(session, project)
    lifecycle.to_wake(session, older_than=30)
    claim(session)
    lifecycle.release(session, job)

    assert lifecycle.to_wake(session, older_than=30) == [WAKE_CPU]


def test_what_is_noted_for_a_long_line_is_one_row_of_it(session: Session, project: Project) -> None:
    waiting = [factories.job(session, project) for _ in range(5)]
    lifecycle.to_wake(session, older_than=30)

    session.expire_all()
    assert [job.dispatched_at > 0 for job in waiting] == [False] * 4 + [True]


def test_a_project_whose_jobs_must_wait_does_not_keep_anothers_from_being_announced(
    session: Session, project: Project
) -> None:
    factories.job(session, project)
    lifecycle.to_wake(session, older_than=30)
    factories.job(session, factories.project(session))

    assert lifecycle.to_wake(session, older_than=30) == [WAKE_CPU]


def test_nobody_is_woken_for_work_that_is_taken_over_or_not_due(session: Session, project: Project) -> None:
    for status in JOB_EDGES.keys() - {"queued"}:
        factories.job(session, project, status=status)
    factories.job(session, project, next_run_at=present(session.scalar(select(db_now()))) + 60)

    assert lifecycle.to_wake(session, older_than=0) == []


# Attempts


def outcomes(session: Session, job: Job) -> list[Any]:
    return [(one.kind, one.worker, one.outcome) for one in lifecycle.attempts(session, job.id)]


def test_every_turn_at_a_job_is_an_attempt_with_an_outcome(session: Session, project: Project) -> None:
    job = factories.job(session, project, status="validating_files", lease_owner=None, lease_expires_at=None)

    lifecycle.claim_validation(session, owner="first", lease_seconds=60)
    lifecycle.validated(session, job)
    lifecycle.claim(session, gpu_class="cpu", owner="second", lease_seconds=60)
    lifecycle.crashed(session, job, reason="out of memory", max_failures=3)
    job.next_run_at = 0.0
    lifecycle.claim(session, gpu_class="cpu", owner="third", lease_seconds=60)
    lifecycle.release(session, job)
    lifecycle.claim(session, gpu_class="cpu", owner="fourth", lease_seconds=60)
    lifecycle.cancel(Work(session), job)

    assert outcomes(session, job) == [
        ("validation", "first", "validated"),
        ("run", "second", "crashed"),
        ("run", "third", "drained"),
        ("run", "fourth", "cancelled"),
    ]
    assert all(one.started_at <= present(one.ended_at) for one in lifecycle.attempts(session, job.id))
    assert lifecycle.attempts(session, job.id)[1].reason == "out of memory"


def test_a_validation_that_is_taken_over_ends_the_attempt_of_the_silent_one(
    session: Session, project: Project
) -> None:
    job = factories.job(session, project, status="validating_files", lease_owner=None, lease_expires_at=None)

    lifecycle.claim_validation(session, owner="first", lease_seconds=-1)
    lifecycle.claim_validation(session, owner="second", lease_seconds=60)

    assert outcomes(session, job) == [
        ("validation", "first", "expired"),
        ("validation", "second", None),
    ]


def test_a_validation_that_was_given_back_writes_no_more(database: Database) -> None:
    with database.write() as session:
        factories.job(session, factories.project(session), status="validating_files", lease_expires_at=0.0)
        ours = claim_validation(session)
    assert ours is not None
    with lifecycle.fenced(database, ours) as (session, job):
        lifecycle.release(session, job)

    with pytest.raises(LeaseLost), lifecycle.fenced(database, ours):
        pass
    with database.write() as session:
        assert ours is not None
        assert not lifecycle.heartbeat(session, ours, 60)
