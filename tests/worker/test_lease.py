"""Validation keeps its job for as long as it gets somewhere, and stops when the job is not its any more."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy.exc import OperationalError

from core.claims import LeaseLost
from core.database.engine import WakeMessage, Work
from core.database.tables import File, Job
from core.jobs import lifecycle
from core.settings import Settings
from graders.types import Grade, Item, Sample
from tests.present import present, untyped
from tests.worker.conftest import GRADER, Bench
from worker.lease import LeaseKeeper
from worker.supervisor.validation import validate_next

ROW = {"messages": [{"role": "user", "content": "say red"}], "answer": "red"}
HELD_OUT = {"messages": [{"role": "user", "content": "say it in red"}], "answer": "red"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def expires_at(bench: Bench) -> float:
    return present(bench.job().lease_expires_at)


def let_expire(bench: Bench) -> float:
    """Have the lease end a minute ago."""
    with bench.database.write() as session:
        assert lifecycle.heartbeat(session, bench.claim, -60.0)
    return expires_at(bench)


def cancel(bench: Bench) -> None:
    with bench.database.write() as session:
        lifecycle.cancel(Work(session), session.get_one(Job, bench.job().seq))


class TestKeeper:
    def test_it_renews_while_there_is_progress(self, bench: Bench) -> None:
        clock = Clock()
        keeper = LeaseKeeper(bench.database, bench.claim, 60, stall_seconds=100, clock=clock)
        for _ in range(20):  # 13 s a row, far beyond a lease in all
            clock.now += 13
            keeper.progressed()
            before = let_expire(bench)
            keeper.renew()
            assert expires_at(bench) > before + 100

    def test_work_that_stalls_is_not_renewed(self, bench: Bench) -> None:
        clock = Clock()
        keeper = LeaseKeeper(bench.database, bench.claim, 60, stall_seconds=100, clock=clock)
        clock.now = 101
        before = let_expire(bench)

        keeper.renew()
        assert expires_at(bench) == before

        keeper.moved()
        keeper.renew()
        assert expires_at(bench) > before

    def test_a_lost_lease_stops_the_work_and_says_so_once(self, bench: Bench) -> None:
        stopped = []
        keeper = LeaseKeeper(bench.database, bench.claim, 60)
        keeper.when_lost(lambda: stopped.append(True))
        cancel(bench)

        keeper.progressed()  # it has not heard yet
        keeper.renew()

        assert stopped == [True]
        with pytest.raises(LeaseLost):
            keeper.progressed()

    def test_a_database_that_is_away_is_asked_again(self, bench: Bench) -> None:
        class Away:
            def write(self) -> NoReturn:
                raise OperationalError("select 1", {}, Exception("gone"))

        keeper = LeaseKeeper(untyped(Away()), bench.claim, 60)
        keeper.renew()
        keeper.database = bench.database
        before = let_expire(bench)
        keeper.renew()

        keeper.progressed()
        assert expires_at(bench) > before

    def test_its_thread_ends_with_it(self, bench: Bench) -> None:
        before = set(threading.enumerate())

        with LeaseKeeper(bench.database, bench.claim, 3600):
            [thread] = set(threading.enumerate()) - before

        assert not thread.is_alive()


class With:
    """Backends that have one grader for everything."""

    def __init__(self, grader: Any) -> None:
        self.grader = grader

    def check(self, spec: Any) -> None:
        pass

    @asynccontextmanager
    async def open(self, spec: Any, *, owner: str = "", ledger: Any = None) -> AsyncIterator[Any]:
        yield self.grader


@pytest.fixture
def validate(bench: Bench, tmp_path: Path) -> Callable[..., list[WakeMessage] | None]:
    """Validate the bench's job with this grader, under a lease that is renewed all the time."""

    def run(grader: Any) -> list[WakeMessage] | None:
        with bench.database.write() as session:
            for name, row in (("file-a", ROW), ("file-b", HELD_OUT)):
                info = bench.blobs.put_bytes(f"files/{name}", json.dumps(row).encode())
                about = {"filename": "a", "purpose": "fine-tune", "bytes": info.size, "sha256": info.sha256}
                session.add(File(id=name, project_id=bench.project.id, blob_key=info.key, **about))
            job = session.get_one(Job, bench.job().seq)
            job.status, job.lease_expires_at = "validating_files", None
            job.body = {**job.body, "grader": GRADER}
        settings = Settings(data_dir=tmp_path, lease_seconds=0.04)
        return validate_next(settings, bench.database, bench.blobs, untyped(With(grader)), "tester")

    return run


class Slow:
    """Takes longer for a grade than the lease lasts: until it has been renewed twice."""

    name, type = "slow", "string_check"

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    async def grade(self, sample: Sample, item: Item) -> Grade:
        for _ in range(2):
            before = expires_at(self.bench)
            while expires_at(self.bench) == before:
                await asyncio.sleep(0)
        return Grade(float(sample.output_text == "red"))


def test_a_slow_grader_does_not_cost_the_validation_its_job(
    bench: Bench, validate: Callable[..., list[WakeMessage] | None]
) -> None:
    assert validate(Slow(bench)) == [("regraft.run_next", "gpu.cpu", bench.claim.job_id)]

    assert bench.job().status == "queued"
    assert bench.events("warn") == []


class Hangs:
    """Hangs, and meanwhile the job is cancelled."""

    name, type = "hangs", "string_check"

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.stopped = False

    async def grade(self, sample: Sample, item: Item) -> None:
        cancel(self.bench)
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped = True


def test_a_lost_lease_stops_a_grader_that_hangs(
    bench: Bench, validate: Callable[..., list[WakeMessage] | None]
) -> None:
    grader = Hangs(bench)

    assert validate(grader) == []

    assert grader.stopped
    assert bench.job().status == "cancelled"
