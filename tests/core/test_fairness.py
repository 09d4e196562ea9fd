"""Whose turn it is, and that what waiting jobs are told about it comes true."""

from collections import Counter, deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.orm import Session

from core.claims import Claim
from core.database import pages
from core.database.engine import Database, Work, db_now
from core.database.states import JOB, JOB_EDGES
from core.database.tables import Job, Project, Worker
from core.jobs import fairness, lifecycle
from core.service.archiving import archive_project
from core.tenancy.limits import NO_LIMITS, Limits
from tests import factories
from tests.present import present

pytestmark = pytest.mark.both_databases


def claim(session: Session, **how: Any) -> Claim | None:
    asked: dict[str, Any] = {"gpu_class": "cpu", "owner": "worker", "lease_seconds": 60}
    return lifecycle.claim(session, **asked | how)


def place(session: Session, job: Job, defaults: Limits = Limits()) -> fairness.QueuePosition:
    return fairness.places(session, [job], defaults)[job.id]


def shown_order(session: Session, defaults: Limits = Limits()) -> list[Any]:
    """The ids of all queued jobs by the position they are told."""
    queued = session.scalars(select(Job).where(Job.status == "queued")).all()
    places = fairness.places(session, queued, defaults)
    assert sorted(place.position for place in places.values()) == list(range(1, len(queued) + 1))
    return sorted(places, key=lambda id: places[id].position)


def queue_of(session: Session, *, projects: int, each: int, mixed: bool) -> dict[str, Any]:
    """So many jobs of each project: one project's after the other's, or in a random order."""
    owners = [factories.project(session) for _ in range(projects)]
    order = [owner for owner in owners for _ in range(each)]
    if mixed:
        Random(1).shuffle(order)
    return {factories.job(session, owner).id: owner.id for owner in order}


def finish(session: Session, claim: Claim | None) -> None:
    assert claim is not None
    lifecycle.succeed(
        session, session.scalars(select(Job).where(Job.id == claim.job_id)).one(), fine_tuned_model="m"
    )


@pytest.mark.parametrize(("slots", "each"), [(4, 20), (1, 3)])
@pytest.mark.slow
def test_two_hundred_jobs_of_ten_projects_start_in_the_order_they_were_told(
    session: Session, slots: int, each: int
) -> None:
    owner_of = queue_of(session, projects=10, each=each, mixed=False)
    promised = shown_order(session)

    running: deque[Any] = deque()
    order: list[Any] = []
    while len(order) < 10 * each:
        if len(running) == slots:
            finish(session, running.popleft())
        running.append(claim(session))
        order.append(running[-1].job_id)

    assert order == promised
    for first in range(0, 10 * each, 10):  # every project once in each round, however long its queue is
        assert len({owner_of[id] for id in order[first : first + 10]}) == 10


@pytest.mark.slow
def test_positions_are_the_order_of_claims_whatever_runs_already(session: Session) -> None:
    owner_of = queue_of(session, projects=5, each=8, mixed=True)
    random = Random(2)
    for _ in range(9):
        held = claim(session)
        if random.random() < 0.5:
            finish(session, held)
    promised = shown_order(session)

    claimed = [present(claim(session)).job_id for _ in promised]

    assert claimed == promised
    assert len(Counter(owner_of[id] for id in claimed)) == 5


def test_one_worker_goes_round_even_when_one_project_has_a_thousandfold_queue(session: Session) -> None:
    greedy, modest = factories.project(session), factories.project(session)
    for _ in range(50):
        factories.job(session, greedy)
    urgent = factories.job(session, modest)

    finish(session, claim(session))

    assert present(claim(session)).job_id == urgent.id


def test_a_project_at_its_limit_is_passed_over(session: Session) -> None:
    limited, free = factories.project(session, limits={"running_jobs": 1}), factories.project(session)
    for owner in (limited, limited, free, free, free):
        factories.job(session, owner)
    owners = dict(session.execute(select(Job.id, Job.project_id)).all())
    promised = shown_order(session)

    claimed = [held.job_id for held in iter(lambda: claim(session), None)]

    assert [owners[id] == limited.id for id in claimed] == [True, False, False, False]
    assert promised[:4] == claimed  # the last one cannot start now, and stands behind all that can


def test_a_claim_of_one_job_takes_it_out_of_turn_and_no_other(session: Session) -> None:
    project = factories.project(session)
    first, second = (factories.job(session, project) for _ in range(2))

    assert present(claim(session, job_id=second.id)).job_id == second.id
    assert claim(session, job_id=second.id) is None
    assert first.status == "queued"


def test_a_claim_of_one_job_keeps_to_its_class_and_to_the_limit_of_its_project(session: Session) -> None:
    project = factories.project(session, limits={"running_jobs": 1})
    first, second, other = (
        factories.job(session, project, gpu_class=gpu_class) for gpu_class in ("cpu", "cpu", "h200")
    )

    assert claim(session, job_id=other.id) is None
    assert claim(session, job_id=first.id) is not None
    assert claim(session, job_id=second.id) is None


def test_the_jobs_that_may_start_come_in_the_order_of_claims_and_within_the_limits(session: Session) -> None:
    limited, free = factories.project(session, limits={"running_jobs": 2}), factories.project(session)
    first, second, _ = (factories.job(session, limited) for _ in range(3))
    others = [factories.job(session, free) for _ in range(2)]
    factories.job(session, free, gpu_class="h200")
    factories.job(session, free, next_run_at=2e10)

    def start(*, without: Collection[str] = (), most: int = 9) -> list[str]:
        found = fairness.in_turn(session, "cpu", NO_LIMITS, without=without, most=most)
        assert all(job.project_id == project.id for job, project in found)
        return [job.id for job, _ in found]

    order = [first.id, others[0].id, second.id, others[1].id]
    assert start() == order
    assert start(most=2) == order[:2]
    assert start(without=[first.id]) == order[1:], "one that is left out counts toward the limit"
    assert start(most=0) == []
    assert not fairness.in_turn(session, "h100", NO_LIMITS, without=(), most=9)


def test_jobs_whose_queue_of_kueue_is_full_let_others_start(session: Session) -> None:
    projects = [
        factories.project(session, kueue=kueue) for kueue in ({"queue": "a"}, {"priority_class": "p"}, None)
    ]
    jobs = [factories.job(session, project).id for project in projects]

    def start(*full: str, pool_queue: str = "") -> list[str]:
        found = fairness.in_turn(
            session, "cpu", NO_LIMITS, without=(), most=9, full_queues=full, pool_queue=pool_queue
        )
        return [job.id for job, _ in found]

    assert start() == jobs
    assert start("a") == jobs[1:]
    assert start("") == start("pool", pool_queue="pool") == jobs[:1]
    assert start("a", pool_queue="a") == []


def test_the_operators_default_limits_those_that_have_no_limit_of_their_own(session: Session) -> None:
    ordinary, special = factories.project(session), factories.project(session, limits={"running_jobs": 2})
    for owner in (ordinary, special) * 3:
        factories.job(session, owner)

    claims = list(iter(lambda: claim(session, defaults=Limits(running_jobs=1)), None))

    running = select(Job.project_id).where(Job.id.in_([held.job_id for held in claims]))
    assert Counter(session.scalars(running)) == {ordinary.id: 1, special.id: 2}


def test_a_limit_of_nothing_stops_a_project(session: Session) -> None:
    factories.job(session, factories.project(session, limits={"running_jobs": 0}))

    assert claim(session) is None


def test_workers_that_ask_at_once_do_not_exceed_a_limit_together(database: Database) -> None:
    with database.write() as session:
        project = factories.project(session, limits={"running_jobs": 2})
        for _ in range(12):
            factories.job(session, project)
    together = Barrier(6)

    def ask(worker: Any) -> Claim | None:
        together.wait()
        with database.write() as session:
            return claim(session, owner=f"worker-{worker}")

    with ThreadPoolExecutor(6) as threads:
        claims = [held for held in threads.map(ask, range(6)) if held]

    assert len(claims) == 2


def test_a_claim_that_came_too_late_for_the_last_place_takes_nothing(postgres_database: Database) -> None:
    """The second worker chose before it could see the first one's claim; it finds out, and lets go."""
    with postgres_database.write() as session:
        project = factories.project(session, limits={"running_jobs": 1})
        for _ in range(2):
            factories.job(session, project)

    with ThreadPoolExecutor(1) as thread:
        with postgres_database.write() as first:
            held = claim(first)

            def second() -> Claim | None:
                with postgres_database.write() as session:
                    return claim(session)

            late = thread.submit(second)
            _until_somebody_waits(postgres_database)
        assert held is not None
        assert late.result(30) is None
    with postgres_database.read() as session:
        statuses = session.scalars(select(Job.status).order_by(Job.seq)).all()
    assert statuses == ["running", "queued"]


def test_a_project_that_adds_rows_all_the_time_gets_no_further_turn(postgres_database: Database) -> None:
    """An insert of a row locks its project until the commit."""
    with postgres_database.write() as session:
        busy, other = (factories.project(session).id for _ in range(2))
        for project in (busy, busy, busy, other):
            factories.job(session, session.get_one(Project, project))

    claimed: list[str] = []
    for _ in range(2):
        with postgres_database.write() as adding:
            pages.keep_order(adding, busy)
            with postgres_database.write() as session:
                held = claim(session)
                assert held is not None
                job = session.get_one(Job, session.scalar(select(Job.seq).where(Job.id == held.job_id)))
                finish(session, held)
                claimed.append(job.project_id)

    assert claimed == [busy, other]


@pytest.mark.parametrize(("limit", "most"), [(None, 5), (5, 7)])
def test_a_claim_sends_few_statements_of_its_own(database: Database, limit: int | None, most: int) -> None:
    """Turn, row and note, in a savepoint; with a limit also the lock of the project and the count."""
    with database.write() as session:
        project = factories.project(session, limits={"running_jobs": limit})
        for _ in range(3):
            factories.job(session, project)
    with database.write() as session:
        claim(session)  # the project's first turn takes one more
    sent: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *about: Any) -> None:
        sent.append(statement)

    with database.write() as session:
        bind = session.connection()
        event.listen(bind, "before_cursor_execute", note)
        fairness.RUNS.claim(session, owner="worker", lease_seconds=60, gpu_class="cpu")

    assert len(sent) == most, sent


def _until_somebody_waits(database: Database) -> None:
    waits = text("select count(*) from pg_stat_activity where wait_event_type = 'Lock'")
    for _ in range(100_000):
        with database.read() as session:
            if session.scalars(waits).one():
                return
    raise AssertionError("the second claim never waited for the first")


# What a waiting job is told.


def reports(session: Session, gpu_class: str, *, ago: float = 0.0) -> None:
    """A worker of this class that reported itself so many seconds ago."""
    at = present(session.scalar(select(db_now()))) - ago
    session.add(
        Worker(
            name=f"host/{gpu_class}",
            host="host",
            gpu_class=gpu_class,
            version="1",
            machines=1,
            ranks=1,
            gpus=[],
            draining=False,
            findings=[],
            started_at=at,
            seen_at=at,
        )
    )
    session.flush()


def test_a_job_without_a_worker_says_that_none_reports_itself(session: Session) -> None:
    project = factories.project(session)
    free = {"status": "validating_files", "lease_owner": None, "lease_expires_at": None}
    files, run = factories.job(session, project, **free), factories.job(session, project)

    nobody = [place(session, job).reason for job in (files, run)]
    reports(session, "h200")
    another = [place(session, job).reason for job in (files, run)]
    reports(session, "cpu", ago=3600)  # silent since
    silent = place(session, run).reason

    assert nobody == ["no worker reports itself", "no worker of class cpu reports itself"]
    assert another == ["waiting for its files to be validated", "no worker of class cpu reports itself"]
    assert silent == "no worker of class cpu reports itself"


def test_a_job_of_a_pool_of_jobs_waits_for_a_pod_whether_or_not_one_reports_itself(session: Session) -> None:
    project = factories.project(session)
    first, second = (factories.job(session, project, gpu_class="h200") for _ in range(2))

    def reasons() -> list[str]:
        places = fairness.places(session, [first, second], pod_classes={"h200"})
        return [places[job.id].reason for job in (first, second)]

    before = reasons()
    reports(session, "h200")

    pod = "a pod of class h200 will be started for it"
    assert before == reasons() == [pod, f"{pod}, 1 job is ahead"]


def test_the_next_job_waits_for_a_worker_and_the_others_for_those_ahead(session: Session) -> None:
    project = factories.project(session)
    first, second, third = (factories.job(session, project, gpu_class="h200") for _ in range(3))
    factories.job(session, project, gpu_class="cpu")  # another line
    reports(session, "h200")

    assert place(session, first) == fairness.QueuePosition(1, "waiting for a free worker of class h200")
    assert place(session, second).reason == "waiting for a free worker of class h200, 1 job is ahead"
    assert place(session, third) == fairness.QueuePosition(
        3, "waiting for a free worker of class h200, 2 jobs are ahead"
    )


def test_a_job_beyond_its_projects_limit_says_so(session: Session) -> None:
    project = factories.project(session, limits={"running_jobs": 1})
    factories.job(session, project, status="running")
    held_up = factories.job(session, project)

    assert place(session, held_up).reason == "the project runs its maximum of 1 jobs"


def test_a_job_that_will_be_beyond_the_limit_says_so_too(session: Session) -> None:
    project = factories.project(session)
    _, second = factories.job(session, project), factories.job(session, project)

    reason = place(session, second, Limits(running_jobs=1)).reason

    assert reason == "the project will run its maximum of 1 jobs"


def test_a_job_that_backs_off_says_until_when_and_stands_last(session: Session) -> None:
    project = factories.project(session)
    late = present(session.scalar(select(db_now()))) + 3600
    backing_off = factories.job(session, project, next_run_at=late)
    factories.job(session, project)

    shown = place(session, backing_off)

    assert shown.position == 2
    assert shown.reason.startswith("backing off until 20")
    assert shown.reason.endswith("+00:00 after an interruption")


def test_a_job_waits_for_its_files_before_it_waits_for_a_worker(session: Session) -> None:
    project = factories.project(session)
    factories.job(session, project)
    factories.job(session, factories.project(session), status="validating_files")
    free = {"status": "validating_files", "lease_owner": None, "lease_expires_at": None}
    reports(session, "cpu")
    next_one = factories.job(session, project, **free)

    reason = "waiting for its files to be validated, 1 job is ahead"
    assert place(session, next_one) == fairness.QueuePosition(2, reason)


def test_files_are_validated_in_turns_that_go_round_the_projects_as_they_were_told(session: Session) -> None:
    flood, other = factories.project(session), factories.project(session)
    free = {"status": "validating_files", "lease_owner": None, "lease_expires_at": None}
    made = [factories.job(session, owner, **free) for owner in (flood,) * 6 + (other,) * 3]
    owner_of = {job.id: job.project_id for job in made}

    def told() -> list[Any]:
        listed = fairness.places(session, [job for job in made if job.lease_owner is None])
        return sorted(listed, key=lambda id: listed[id].position)

    promised, taken = told(), []
    for left in range(9, 0, -1):
        assert told() == promised[-left:]
        held = lifecycle.claim_validation(session, owner="worker", lease_seconds=60)
        assert held is not None
        taken.append(held.job_id)
        session.expire_all()

    assert taken == promised
    assert [owner_of[id] for id in taken] == [flood.id, other.id] * 3 + [flood.id] * 3


def test_a_job_whose_files_are_being_validated_says_so(session: Session) -> None:
    job = factories.job(session, factories.project(session), status="validating_files")

    assert place(session, job) == fairness.QueuePosition(1, "its files are being validated")


@pytest.mark.parametrize("status", sorted(JOB_EDGES.keys() - set(JOB.waiting)))
def test_a_job_that_does_not_wait_has_no_place(session: Session, status: str) -> None:
    job = factories.job(session, factories.project(session), status=status)

    assert fairness.places(session, [job]) == {}


def test_a_hundred_jobs_cost_one_query(session: Session) -> None:
    project = factories.project(session)
    many = [factories.job(session, project) for _ in range(100)]
    statements = []
    event.listen(session.get_bind(), "before_cursor_execute", lambda *about: statements.append(about[2]))

    assert len(fairness.places(session, many)) == 100
    assert len(statements) == 1


def test_an_archived_project_waits_for_nothing(session: Session) -> None:
    project = factories.project(session)
    factories.job(session, project)

    archive_project(Work(session), project)

    assert claim(session) is None
