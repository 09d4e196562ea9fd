"""The leases of each table that workers claim from, driven in any order by users, workers, crashes and the reconciler.

Hypothesis picks the order and the state is looked at after every step: what must hold does not depend on who is
first. Time passes by moving the lease, not by waiting.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.claims import MAX_BACK_OFF, Claim, LeaseLost, Leases
from core.database.engine import Database, Work, db_now
from core.database.states import EVAL_RUN, JOB_EDGES
from core.database.tables import EvalRun, Event, Job, Leased, Pipeline, Project
from core.errors import ServiceError
from core.evals import lifecycle as eval_runs
from core.evals import summary
from core.jobs import events
from core.jobs import lifecycle as jobs
from core.pipelines import lifecycle as pipelines
from tests import factories
from tests.budgets import examples
from tests.databases import SharedDatabase
from tests.present import present

pytestmark = pytest.mark.slow

MAX_FAILURES = 2
LEASE = 60.0
HOUR = 3600.0
TIMES = ["lease", "lease and reconciler", "reconciler", "back-off", "wake-up", "outage", "clock"]

Write = Callable[[Session, Any], object]


@dataclass(frozen=True)
class Kind:
    """What the machine has to know of a table."""

    leases: Leases[Any]
    edges: Mapping[str, frozenset[str]]
    create: Callable[[Work, Project], Leased]
    # By the statuses in which a row waits for a worker.
    claims: Mapping[str, Callable[[Session, str], Claim | None]]
    asks: Sequence[Callable[[Work, Any], object]]  # of users, as often as they are likely
    writes: Sequence[Write]  # of workers, inside the fence. What ends a row is rarer than what keeps it going
    expire: Callable[[Session], int] | None = None  # None: another worker just claims the row
    to_wake: Callable[[Session, float], object] | None = None
    first: Callable[[Database], None] = lambda database: None  # with the first row

    @property
    def kept(self) -> frozenset[str]:
        """The statuses that a row has only while a worker holds it."""
        return self.leases.claimed - self.claims.keys()


# Jobs.


def new_job(work: Work, project: Project) -> Job:
    return jobs.create(
        work,
        project=project,
        model="tiny",
        training_file=factories.file(work.session, project),
        validation_file=None,
        suffix=None,
        seed=1,
        metadata=None,
        body={},
        gpu_class="cpu",
    )


def run_job(session: Session, owner: str) -> Claim | None:
    return jobs.claim(session, gpu_class="cpu", owner=owner, lease_seconds=LEASE)


def validate_job(session: Session, owner: str) -> Claim | None:
    return jobs.claim_validation(session, owner=owner, lease_seconds=LEASE)


def validate_first(database: Database) -> None:
    """Most of what can happen happens behind that."""
    with database.write() as session:
        claim = present(validate_job(session, "a"))
    with jobs.fenced(database, claim) as (session, job):
        jobs.validated(session, job)


def note(session: Session, job: Job) -> None:
    events.append(session, job.id, "Step")


def train(session: Session, job: Job) -> None:
    job.trained_tokens += 1


def finish_job(session: Session, job: Job) -> None:
    if job.status == "validating_files":
        jobs.validated(session, job)
    else:
        jobs.succeed(session, job, fine_tuned_model="ft:tiny")


JOBS = Kind(
    jobs.LEASES,
    JOB_EDGES,
    new_job,
    {"validating_files": validate_job, "queued": run_job},
    [jobs.pause, jobs.resume, jobs.resume, jobs.cancel],
    [
        note,
        note,
        train,
        finish_job,
        jobs.release,
        partial(jobs.crashed, reason="x", max_failures=MAX_FAILURES),
        partial(jobs.fail, code="x", message="x"),
    ],
    partial(jobs.expire_leases, max_failures=MAX_FAILURES),
    lambda session, seconds: jobs.to_wake(session, older_than=seconds),
    validate_first,
)


# Eval runs.


def new_run(work: Work, project: Project) -> EvalRun:
    run = EvalRun(eval_id="e", project_id=project.id, name="r", data_source={}, total=1)
    run.summary = summary.empty([])
    eval_runs.create(work, run)
    return run


EVAL_RUNS = Kind(
    eval_runs.LEASES,
    {
        "queued": frozenset({"in_progress", "canceled"}),
        "in_progress": frozenset({"queued", "completed", "failed", "canceled"}),
    }
    | dict.fromkeys(EVAL_RUN.final, frozenset()),
    new_run,
    {"queued": lambda session, owner: eval_runs.claim(session, owner=owner, lease_seconds=LEASE)},
    [eval_runs.cancel],
    [
        lambda session, run: eval_runs.progressed(run),
        lambda session, run: eval_runs.complete(run),
        eval_runs.release,
        eval_runs.release,
        partial(eval_runs.crashed, reason="x", max_failures=MAX_FAILURES),
        lambda session, run: eval_runs.fail(run, code="x", message="x"),
    ],
    eval_runs.expire_leases,
    lambda session, seconds: eval_runs.to_wake(session, older_than=seconds),
)


# Pipelines.


def new_pipeline(work: Work, project: Project) -> Pipeline:
    stage = {"name": "m", "kind": "mix", "spec": {}, "after": [], "status": "waiting"}
    pipeline = Pipeline(project_id=project.id, actor="key", stages=[stage])
    pipelines.create(work, pipeline)
    return pipeline


def end_stage(session: Session, pipeline: Pipeline, status: str) -> None:
    pipelines.update_stage(pipeline, "m", status=status)
    pipelines.settle(Work(session), pipeline)


PIPELINES = Kind(
    pipelines.LEASES,
    {
        "running": frozenset({"paused", "succeeded", "failed", "cancelled"}),
        "paused": frozenset({"running", "cancelled", "succeeded", "failed"}),
        "failed": frozenset({"running"}),
        "cancelled": frozenset({"running"}),
        "succeeded": frozenset(),
    },
    new_pipeline,
    {"running": pipelines.claim, "paused": pipelines.claim},
    [pipelines.pause, pipelines.resume, pipelines.retry, pipelines.cancel],
    [
        lambda session, pipeline: pipelines.update_stage(pipeline, "m", note="x"),
        partial(pipelines.release, after=0.0),
        partial(pipelines.release, after=MAX_BACK_OFF),
        partial(end_stage, status="succeeded"),
        partial(end_stage, status="failed"),
    ],
)


@dataclass
class Seen:
    """A row as it was after the last step."""

    status: str
    epoch: int = 0
    failures: int = 0
    log: list[str] = field(default_factory=list)  # the ids of its events
    outcome: dict[str, Any] = field(default_factory=dict)  # once nothing can follow


class Machine(RuleBasedStateMachine):
    kind: Kind
    shared: SharedDatabase
    empty: Path  # the file of an empty database
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.table: type[Leased] = self.kind.leases.table
        file = Path(self.shared.url.removeprefix("sqlite:///"))
        for old in file.parent.glob(f"{file.name}*"):
            old.unlink()
        shutil.copy(self.empty, file)
        self.lent = ExitStack()
        self.database = self.lent.enter_context(self.shared.lent())
        self.seen: dict[str, Seen] = {}
        # Who was given each row last, until it is given back or taken away.
        self.given: dict[str, Claim] = {}
        self.lapsed: set[str] = set()  # rows whose lease has ended, before the reconciler sees it

    def teardown(self) -> None:
        self.lent.close()

    @initialize()
    def a_row_in_each_of_two_projects(self) -> None:
        with self.database.write() as session:
            self.projects = [factories.project(session) for _ in range(2)]
        self.create(0)
        self.kind.first(self.database)
        for row in self.rows():
            self.seen[row.id] = Seen(row.status, row.epoch)
        self.create(1)

    # Users.

    def create(self, which: int) -> None:
        with self.database.write() as session:
            work = Work(session)
            row = self.kind.create(work, self.projects[which])
            assert bool(work.outbox) == (self.kind.to_wake is not None)
            self.seen[row.id] = Seen(row.status)

    @rule(number=st.integers(0, 5), which=st.integers(0, 5))
    def somebody_asks(self, number: int, which: int) -> None:
        """For a new row, or for something to happen to one."""
        if which >= len(self.kind.asks):
            if sum(bool(self.kind.edges[seen.status]) for seen in self.seen.values()) < 3:
                self.create(number % 2)
            return
        ask = self.kind.asks[which]
        row_id = list(self.seen)[number % len(self.seen)]
        before = self.row(row_id)
        try:
            with self.database.write() as session:
                ask(Work(session), self.row(row_id, session))
        except ServiceError:
            assert self.values(self.row(row_id)) == self.values(before)
            assert ask not in (jobs.cancel, eval_runs.cancel) or not self.kind.edges[before.status]

    # Workers: several, each of which may be slow, dead, or late.

    @precondition(lambda self: self.waiting())
    @rule(target=claims, owner=st.sampled_from("abc"), number=st.integers(0, 5))
    def take(self, owner: str, number: int) -> MultipleResults[Any] | Claim:
        """A worker of the kind that one of the waiting rows needs; which row it gets is not for it to say."""
        waiting = self.waiting()
        how = self.kind.claims[self.seen[waiting[number % len(waiting)]].status]
        with self.database.write() as session:
            claim = how(session, owner)
        if claim is None:
            return multiple()
        assert self.kind.claims[self.seen[claim.job_id].status] is how
        assert claim.job_id not in self.given or claim.job_id in self.lapsed
        self.given[claim.job_id] = claim
        self.lapsed.discard(claim.job_id)
        return claim

    @rule(claim=claims)
    def heartbeat(self, claim: Claim) -> None:
        with self.database.write() as session:
            assert self.kind.leases.is_current(session, claim) == self.is_holder(claim)
            alive = self.kind.leases.heartbeat(session, claim, LEASE)
        assert alive == self.is_holder(claim)
        if alive:
            self.lapsed.discard(claim.job_id)

    @rule(claim=claims, which=st.integers(0, 9))
    def write(self, claim: Claim, which: int) -> None:
        """What a worker writes, as it does: inside `fenced`."""
        holds, before = self.is_holder(claim), self.everything(claim.job_id)
        try:
            with self.kind.leases.fenced(self.database, claim) as (session, row):
                assert holds, "a claim that is not the row's came through the fence"
                self.kind.writes[which % len(self.kind.writes)](session, row)
        except LeaseLost:
            assert not holds
        else:
            return
        assert self.everything(claim.job_id) == before, "who was refused wrote something"

    # Time, and who puts things right.

    @rule(number=st.integers(0, 5), what=st.sampled_from(TIMES))
    def time_passes(self, number: int, what: str) -> None:
        if "lease" in what and self.given:
            row_id = list(self.given)[number % len(self.given)]
            self.set(self.table.id == row_id, lease_expires_at=db_now() - 1)
            self.lapsed.add(row_id)
        if "reconciler" in what and self.kind.expire is not None:
            with self.database.write() as session:
                assert self.kind.expire(session) == len(self.lapsed)
            assert all(row.epoch > self.seen[row.id].epoch for row in self.rows() if row.id in self.lapsed)
        if what in ("back-off", "lease and reconciler"):
            self.set(self.table.next_run_at > 0, next_run_at=0.0)
        if what == "wake-up" and self.kind.to_wake is not None:
            with self.database.write() as session:
                self.kind.to_wake(session, float(number))
                assert self.kind.to_wake(session, 10.0) == [], "a worker was woken a moment ago"
        if what in ("outage", "clock"):
            self.nobody_is_late(clock=what == "clock")

    def nobody_is_late(self, clock: bool) -> None:
        """After an outage all leases begin anew, and after the clock was set back no time is far ahead."""
        if clock:
            for column in (self.table.lease_expires_at, self.table.next_run_at, self.table.dispatched_at):
                self.set(column > 0, **{column.key: column + HOUR})
        with self.database.write() as session:
            changed = {row.id for row in self.kind.leases.extend_leases(session, LEASE)}
            assert self.kind.leases.extend_leases(session, LEASE) == []
            self.kind.leases.bound_times(session, LEASE)
        assert self.lapsed <= changed <= self.given.keys()
        self.lapsed.clear()

    @precondition(lambda self: self.table is Job)
    @rule(number=st.integers(0, 5), limit=st.integers(1, 4), more=st.integers(0, 2))
    def a_reader_follows_the_pages(self, number: int, limit: int, more: int) -> None:
        """Newest first, while events are appended between the pages."""
        job_id = list(self.seen)[number % len(self.seen)]
        expected = self.event_ids(job_id)[::-1]
        seen: list[str] = []
        has_more, after = True, None
        while has_more:
            with self.database.read() as session:
                page = events.page(session, job_id, after=after, limit=limit)
            seen += [event.id for event in page.items]
            after, has_more = seen[-1], page.has_more
            if len(seen) <= 3 * limit:  # after every page, the log would triple with each call
                for _ in range(more):
                    with self.database.write() as session:
                        events.append(session, job_id, "meanwhile")
        assert seen == expected

    # What must hold after every step.

    @invariant()
    def all_is_well(self) -> None:
        with self.database.read() as session:
            rows = session.scalars(select(self.table)).all()
            logs: dict[str, list[str]] = {row.id: [] for row in rows}
            for event in session.scalars(select(Event).order_by(Event.seq)):
                logs[event.job_id].append(event.id)
            now = session.scalars(select(db_now())).one()
        assert {row.id for row in rows} == set(self.seen)
        for row in rows:
            seen = self.seen[row.id]
            self.moved_along_an_edge(row, seen)
            self.is_held_by_one_or_none(row, now)
            self.is_tried_again_a_few_times(row, seen, now)
            assert logs[row.id][: len(seen.log)] == seen.log, "an event was added before others, or lost"
            outcome = self.outcome(row)
            self.seen[row.id] = Seen(
                row.status, row.epoch, getattr(row, "failures", 0), logs[row.id], outcome
            )
            if seen.outcome:
                assert outcome == seen.outcome, "what is final has changed"

    def moved_along_an_edge(self, row: Leased, seen: Seen) -> None:
        assert row.status == seen.status or row.status in self.kind.edges[seen.status]
        assert row.epoch >= seen.epoch

    def is_held_by_one_or_none(self, row: Leased, now: float) -> None:
        if row.lease_owner is None:
            assert row.lease_expires_at is None
            assert row.status not in self.kind.kept
            self.given.pop(row.id, None)
            self.lapsed.discard(row.id)
        else:
            assert present(row.lease_expires_at) <= now + LEASE
            assert row.status in self.kind.leases.claimed
            assert self.given[row.id] == Claim(row.id, row.epoch, row.lease_owner)

    def is_tried_again_a_few_times(self, row: Leased, seen: Seen, now: float) -> None:
        failures = getattr(row, "failures", 0)
        assert failures <= seen.failures + 1
        if failures > seen.failures and row.status in self.kind.claims:
            assert failures <= MAX_FAILURES
        assert row.next_run_at <= now + self.kind.leases.max_wait
        assert row.dispatched_at <= now

    def outcome(self, row: Leased) -> dict[str, Any]:
        """Empty until nothing can follow."""
        if self.kind.edges[row.status]:
            return {}
        values = self.values(row)
        assert values["finished_at"] is not None
        return {name: value for name, value in values.items() if name not in ("next_run_at", "dispatched_at")}

    # Looking.

    def waiting(self) -> list[str]:
        """The rows that a worker may be given now, unless they wait for a back-off to pass."""
        return [
            row_id
            for row_id, seen in self.seen.items()
            if seen.status in self.kind.claims and (row_id not in self.given or row_id in self.lapsed)
        ]

    def is_holder(self, claim: Claim) -> bool:
        """By what this test has seen, not by the row."""
        return self.given.get(claim.job_id) == claim

    def rows(self) -> Sequence[Leased]:
        with self.database.read() as session:
            return session.scalars(select(self.table)).all()

    def row(self, row_id: str, session: Session | None = None) -> Leased:
        if session is not None:
            return session.scalars(select(self.table).where(self.table.id == row_id)).one()
        return next(row for row in self.rows() if row.id == row_id)

    def values(self, row: Leased) -> dict[str, Any]:
        deferred = ("content",)  # of eval runs
        columns = self.table.__mapper__.column_attrs
        return {column.key: getattr(row, column.key) for column in columns if column.key not in deferred}

    def everything(self, row_id: str) -> tuple[dict[str, Any], list[str]]:
        return self.values(self.row(row_id)), self.event_ids(row_id)

    def event_ids(self, row_id: str) -> list[str]:
        with self.database.read() as session:
            return list(session.scalars(select(Event.id).where(Event.job_id == row_id).order_by(Event.seq)))

    def set(self, where: Any, **columns: Any) -> None:
        with self.database.write() as session:
            session.execute(update(self.table).where(where).values(**columns))


@pytest.mark.parametrize("kind", [JOBS, EVAL_RUNS, PIPELINES], ids=["jobs", "eval runs", "pipelines"])
def test_rows_have_one_holder_and_lose_nothing_in_whatever_order_things_happen(
    kind: Kind, migrated_sqlite: Path, tmp_path: Path
) -> None:
    budget = settings(
        max_examples=examples(15, 200),
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    parts = {
        "kind": kind,
        "shared": SharedDatabase(f"sqlite:///{tmp_path}/rows.db"),
        "empty": migrated_sqlite,
    }
    run_state_machine_as_test(type("Machine", (Machine,), parts), settings=budget)
