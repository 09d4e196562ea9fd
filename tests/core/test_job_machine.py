"""The job's state machine, driven in any order by users, workers, crashes and the reconciler at once.

Hypothesis picks the order and the state is looked at after every step: what must hold does not depend on who is
first. Time passes by moving the lease, not by waiting.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
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
)
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.database.engine import Database, Work, db_now
from core.database.tables import Event, Job, Table
from core.errors import InvalidJobState
from core.jobs import events, lifecycle
from core.jobs.claim import Claim, LeaseLost
from core.jobs.lifecycle import EDGES, FINAL, HELD
from tests import factories

pytestmark = pytest.mark.slow

MAX_FAILURES = 2
LEASE = 60.0
# What makes a job end is rarer than what keeps it going: most of what can go wrong is on the way.
WRITES = ["heartbeat", "event", "progress", "finish", "event", "release", "crash", "fail"]
ASKS = [None, None, lifecycle.pause, lifecycle.resume, lifecycle.resume, lifecycle.cancel]
TIMES = ["lease", "lease and reconciler", "reconciler", "back-off", "wake-up"]


@dataclass
class Seen:
    """A job as it was after the last step."""

    status: str
    epoch: int = 0
    failures: int = 0
    log: list[str] = field(default_factory=list)  # the ids of its events
    outcome: tuple[Any, ...] = ()


class Jobs(RuleBasedStateMachine):
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.database = Database(f"sqlite:///{Path(self.folder.name) / 'jobs.db'}")
        Table.metadata.create_all(self.database.engine)
        self.seen: dict[str, Seen] = {}
        # Who was given each job last, until it is given back or taken away.
        self.given: dict[str, Claim] = {}
        self.lapsed: set[str] = set()  # jobs whose lease has ended, and nobody has noticed yet

    def teardown(self) -> None:
        self.database.close()
        self.folder.cleanup()

    @initialize()
    def a_job_in_each_of_two_projects(self) -> None:
        """The first one is validated already: most of what can happen happens behind that."""
        with self.database.write() as session:
            self.projects = [factories.project(session) for _ in range(2)]
            self.files = [factories.file(session, project) for project in self.projects]
        self.create(0)
        with self.database.write() as session:
            claim = lifecycle.claim_validation(session, owner="a", lease_seconds=LEASE)
        assert claim is not None
        with lifecycle.fenced(self.database, claim) as (session, job):
            lifecycle.validated(session, job)
        self.seen[claim.job_id] = Seen("queued", claim.epoch)
        self.create(1)

    # Users.

    def create(self, which: int) -> None:
        with self.database.write() as session:
            work = Work(session)
            job = lifecycle.create(
                work,
                project=self.projects[which],
                model="tiny",
                training_file=self.files[which],
                validation_file=None,
                suffix=None,
                seed=1,
                metadata=None,
                body={},
                gpu_class="cpu",
            )
            assert work.outbox
        self.seen[job.id] = Seen("validating_files")

    @rule(number=st.integers(0, 5), ask=st.sampled_from(ASKS))
    def somebody_asks(self, number: int, ask: Callable[[Work, Job], object] | None) -> None:
        """For a new job, or for something to happen to one."""
        if ask is None:
            if sum(seen.status not in FINAL for seen in self.seen.values()) < 3:
                self.create(number % 2)
            return
        job_id = list(self.seen)[number % len(self.seen)]
        before = self.row(job_id).status
        try:
            with self.database.write() as session:
                ask(Work(session), session.scalars(select(Job).where(Job.id == job_id)).one())
        except InvalidJobState:
            assert self.row(job_id).status == before
            assert ask is not lifecycle.cancel or before in FINAL

    # Workers: several, each of which may be slow, dead, or late.

    @precondition(lambda self: self.waiting())
    @rule(target=claims, owner=st.sampled_from("abc"), number=st.integers(0, 5))
    def take(self, owner: str, number: int) -> MultipleResults[Any] | Claim:
        """A worker of the kind that one of the waiting jobs needs; which job it gets is not for it to say."""
        waiting = self.waiting()
        validating = self.seen[waiting[number % len(waiting)]].status == "validating_files"
        with self.database.write() as session:
            if validating:
                claim = lifecycle.claim_validation(session, owner=owner, lease_seconds=LEASE)
            else:
                claim = lifecycle.claim(session, gpu_class="cpu", owner=owner, lease_seconds=LEASE)
        if claim is None:
            return multiple()
        assert self.seen[claim.job_id].status == ("validating_files" if validating else "queued")
        assert claim.job_id not in self.given or claim.job_id in self.lapsed
        self.given[claim.job_id] = claim
        self.lapsed.discard(claim.job_id)
        return claim

    def heartbeat(self, claim: Claim) -> None:
        with self.database.write() as session:
            alive = lifecycle.heartbeat(session, claim, LEASE)
        assert alive == self.is_holder(claim)
        if alive:
            self.lapsed.discard(claim.job_id)

    @rule(claim=claims, how=st.sampled_from(WRITES))
    def write(self, claim: Claim, how: str) -> None:
        """What a run or its supervisor writes, as it does: inside `fenced`."""
        if how == "heartbeat":
            return self.heartbeat(claim)
        holds, before = self.is_holder(claim), self.everything(claim.job_id)
        try:
            with lifecycle.fenced(self.database, claim) as (session, job):
                assert holds, "a claim that is not the job's came through the fence"
                self.end(session, job, how)
        except LeaseLost:
            assert not holds
        else:
            return
        assert self.everything(claim.job_id) == before, "who was refused wrote something"

    def end(self, session: Session, job: Job, how: str) -> None:
        if how == "event":
            events.append(session, job.id, "Step")
        elif how == "progress":
            job.trained_tokens += 1
        elif how == "finish" and job.status == "validating_files":
            lifecycle.validated(session, job)
        elif how == "finish":
            lifecycle.succeed(session, job, fine_tuned_model="ft:tiny")
        elif how == "fail":
            lifecycle.fail(session, job, code="x", message="x")
        elif how == "release":
            lifecycle.release(session, job)
        else:
            lifecycle.crashed(session, job, reason="x", max_failures=MAX_FAILURES)

    # Time, and who puts things right.

    @rule(
        number=st.integers(0, 5),
        what=st.sampled_from(TIMES),
    )
    def time_passes(self, number: int, what: str) -> None:
        if "lease" in what and self.given:
            job_id = list(self.given)[number % len(self.given)]
            self.set(job_id, lease_expires_at=db_now() - 1)
            self.lapsed.add(job_id)
        if "reconciler" in what:
            with self.database.write() as session:
                count = lifecycle.expire_leases(session, max_failures=MAX_FAILURES)
            assert count == len(self.lapsed)
        if what in ("back-off", "lease and reconciler"):
            with self.database.write() as session:
                session.execute(update(Job).values(next_run_at=0.0))
        if what == "wake-up":
            with self.database.write() as session:
                lifecycle.to_wake(session, older_than=float(number))
                assert lifecycle.to_wake(session, older_than=10.0) == [], "a worker was woken a moment ago"

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
            found = session.scalars(select(Job)).all()
            logs: dict[str, list[str]] = {job.id: [] for job in found}
            for event in session.scalars(select(Event).order_by(Event.seq)):
                logs[event.job_id].append(event.id)
            now = session.scalars(select(db_now())).one()
        assert {job.id for job in found} == set(self.seen)
        for job in found:
            seen = self.seen[job.id]
            self.moved_along_an_edge(job, seen)
            self.is_held_by_one_or_none(job)
            self.is_tried_again_a_few_times(job, seen, now)
            assert logs[job.id][: len(seen.log)] == seen.log, "an event was added before others, or lost"
            self.seen[job.id] = Seen(job.status, job.epoch, job.failures, logs[job.id], self.outcome(job))
            if seen.outcome:
                assert self.outcome(job) == seen.outcome, "what is final has changed"

    def moved_along_an_edge(self, job: Job, seen: Seen) -> None:
        assert job.status == seen.status or job.status in EDGES[seen.status], (seen.status, job.status)
        assert job.epoch >= seen.epoch

    def is_held_by_one_or_none(self, job: Job) -> None:
        assert (job.lease_owner is None) == (job.lease_expires_at is None)
        if job.lease_owner is None:
            assert job.status not in ("running", "pausing")
            self.given.pop(job.id, None)
            self.lapsed.discard(job.id)
        else:
            assert job.status in HELD
            assert self.given[job.id] == Claim(job.id, job.epoch, job.lease_owner)

    def is_tried_again_a_few_times(self, job: Job, seen: Seen, now: float) -> None:
        assert job.failures <= seen.failures + 1
        if job.failures > seen.failures and job.status in ("queued", "validating_files"):
            assert job.failures <= MAX_FAILURES
        assert job.next_run_at <= now + lifecycle.MAX_BACK_OFF
        assert job.dispatched_at <= now

    def outcome(self, job: Job) -> tuple[Any, ...]:
        """() until it is final."""
        if job.status not in FINAL:
            return ()
        assert job.finished_at is not None
        return (job.status, job.epoch, job.error, job.fine_tuned_model, job.trained_tokens)

    # Looking.

    def waiting(self) -> list[str]:
        """The jobs that a worker may be given now, unless they wait for a back-off to pass."""
        return [
            job_id
            for job_id, seen in self.seen.items()
            if seen.status == "queued"
            or (seen.status == "validating_files" and (job_id not in self.given or job_id in self.lapsed))
        ]

    def is_holder(self, claim: Claim) -> bool:
        """By what this test has seen, not by the row."""
        return self.given.get(claim.job_id) == claim

    def row(self, job_id: str) -> Job:
        with self.database.read() as session:
            return session.scalars(select(Job).where(Job.id == job_id)).one()

    def everything(self, job_id: str) -> tuple[Any, ...]:
        job = self.row(job_id)
        columns = {column.key: getattr(job, column.key) for column in Job.__mapper__.column_attrs}
        return columns, self.event_ids(job_id)

    def event_ids(self, job_id: str) -> list[str]:
        with self.database.read() as session:
            return list(session.scalars(select(Event.id).where(Event.job_id == job_id).order_by(Event.seq)))

    def set(self, job_id: str, **columns: Any) -> None:
        with self.database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(**columns))


Jobs.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestTheJobMachine = Jobs.TestCase
