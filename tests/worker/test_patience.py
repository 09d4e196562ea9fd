"""Outages of the database and the blob store, as a run lives through them."""

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from core.claims import LeaseLost
from core.database.engine import Database
from core.outages import Resource
from core.retry import RetryPolicy
from core.storage import disk
from core.storage.store import BlobNotFound, FailedCleanups
from tests.fakes import Skill
from tests.watched_blobs import WatchedBlobs
from tests.worker.conftest import Bench
from worker.progress import Progress

REFUSED = OperationalError("select 1", {}, Exception("connection refused"))
BUSY = ClientError({"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "PutObject")
DENIED = ClientError(
    {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "PutObject"
)
EXPIRED = ClientError(
    {"Error": {"Code": "ExpiredToken"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "PutObject"
)
FULL = OSError(errno.ENOSPC, "No space left on device")


class Time:
    """A clock that moves only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Fails:
    """Raises what it is given, one after the other, and then succeeds."""

    def __init__(self, *causes: Exception) -> None:
        self.causes = list(causes)

    def __call__(self) -> str:
        if self.causes:
            raise self.causes.pop(0)
        return "done"


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def patience(time: Time, told: list[Any]) -> RetryPolicy:
    return RetryPolicy(600.0, told.append, clock=lambda: time.now, wait=time.wait)


@pytest.mark.parametrize(
    "cause",
    [
        REFUSED,
        BUSY,
        FULL,
        DENIED,
        EXPIRED,
        EndpointConnectionError(endpoint_url="s3"),
        ConnectionResetError("cut"),
        OSError(errno.EMFILE, "Too many open files"),
    ],
    ids=[
        "database",
        "busy store",
        "full disk",
        "denied",
        "expired",
        "no store",
        "cut connection",
        "descriptors",
    ],
)
def test_what_is_away_is_waited_for_and_told_of(
    patience: RetryPolicy, told: list[Any], time: Time, cause: Any
) -> None:
    assert patience(Fails(*[cause] * 8)) == "done"

    assert len(told) == 1
    assert f"waited {time.now:.0f} s" in told[0]
    assert str(cause).splitlines()[0] in told[0]


@pytest.mark.parametrize(
    "cause",
    [
        LeaseLost("another's"),
        BlobNotFound("a"),
        FileNotFoundError("a"),
        IntegrityError("i", {}, Exception()),
    ],
    ids=["lost lease", "no blob", "no file", "conflict"],
)
def test_what_waiting_cannot_help_is_raised_at_once(patience: RetryPolicy, time: Time, cause: Any) -> None:
    with pytest.raises(type(cause)):
        patience(Fails(cause))

    assert time.now == 0.0


def test_while_it_is_away_the_progress_says_so(time: Time) -> None:
    progress = Progress()
    seen = []
    fails = Fails(BUSY, BUSY)

    def fail() -> str:
        seen.append(progress.now()["phase"])
        return fails()

    done = RetryPolicy(600.0, print, clock=lambda: time.now, wait=time.wait, during=progress.waiting)(fail)

    assert done == "done"
    assert seen == ["loading", *["waiting for the blob store"] * 2]
    assert progress.now()["phase"] == "loading"


@pytest.mark.parametrize(("cause", "refusals"), [(FULL, 1), (REFUSED, 0)], ids=["full disk", "database"])
def test_a_wait_for_a_full_disk_is_a_refusal_of_storage(
    patience: RetryPolicy, cause: Exception, refusals: int
) -> None:
    before = disk.Refusals.count

    patience(Fails(*[cause] * 8))

    assert disk.Refusals.count - before == refusals


def test_the_result_outlasts_a_report_that_fails(time: Time) -> None:
    """Reports are events of the job: the database that they are written to may be unavailable again."""

    def report(text: str) -> NoReturn:
        raise REFUSED

    @contextmanager
    def during(resource: Resource) -> Iterator[None]:
        report(f"waits for the {resource}")
        yield

    policy = RetryPolicy(600.0, report, clock=lambda: time.now, wait=time.wait, during=during)

    assert policy(Fails(BUSY, BUSY)) == "done"


def test_a_process_that_stops_does_not_wait(told: list[Any]) -> None:
    stopping = threading.Event()
    stopping.set()
    fails = Fails(REFUSED, REFUSED)

    with pytest.raises(OperationalError):
        RetryPolicy(600.0, told.append, wait=stopping.wait)(fails)

    assert (fails.causes, told) == ([REFUSED], [])


@pytest.mark.parametrize("failures", [8, 1000])
def test_in_an_event_loop_the_same_errors_are_waited_for_as_long(
    time: Time, told: list[Any], failures: int
) -> None:
    async def sleep(seconds: float) -> None:
        time.wait(seconds)

    fails = Fails(*[REFUSED] * failures)

    async def do() -> str:
        return fails()

    async def call() -> str | None:
        policy = RetryPolicy(600.0, told.append, clock=lambda: time.now, sleep=sleep)
        try:
            return await policy.call_async(do)
        except OperationalError:
            return None

    done = asyncio.run(call())

    if failures == 8:
        assert (done, [f"waited {time.now:.0f} s" in text for text in told]) == ("done", [True])
    else:
        assert (done, told) == (None, [])
        assert 600 <= time.now < 610


def test_patience_ends(patience: RetryPolicy, time: Time) -> None:
    with pytest.raises(OperationalError):
        patience(Fails(*[REFUSED] * 1000))

    assert 600 <= time.now < 610


class Flaky:
    """A database, or a store, of which every other use fails: before it did anything, or after it did all of it."""

    def __init__(self, real: Database, *, lost_answers: bool) -> None:
        self.real = real
        self.lost_answers = lost_answers
        self.uses = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def write(self) -> "FlakyTransaction":
        return FlakyTransaction(self)


class FlakyTransaction:
    def __init__(self, flaky: Flaky) -> None:
        self.flaky = flaky
        self.inner = flaky.real.write()

    def __enter__(self) -> Session:
        self.flaky.uses += 1
        self.fails = self.flaky.uses % 2 == 1
        if self.fails and not self.flaky.lost_answers:
            raise REFUSED
        return self.inner.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        suppressed = self.inner.__exit__(*raised)
        if self.fails and raised[0] is None:
            raise REFUSED  # it was committed, and the answer was lost
        return suppressed


@pytest.mark.parametrize("lost_answers", [False, True], ids=["refused", "answer lost"])
def test_a_run_whose_every_other_transaction_fails_ends_like_any_other(
    bench: Bench, patience: RetryPolicy, told: list[Any], lost_answers: bool
) -> None:
    flaky = Flaky(bench.database, lost_answers=lost_answers)
    run = bench.run(skill=Skill(0.3), attempt=bench.attempt(database=flaky, retry=patience))

    if (
        lost_answers
    ):  # the last one was committed, so the job is no longer this run's: that is how it finds out
        with pytest.raises(LeaseLost):
            asyncio.run(run.train())
    else:
        asyncio.run(run.train())

    assert flaky.uses > 8
    assert bench.job().status == "succeeded"
    assert [step["step"] for step in bench.steps()] == [0, 1, 2, 3, 4]
    told_of = [e for e in bench.events() if e.startswith("Step ")]
    assert len(told_of) == len(set(told_of)) == 5
    assert [one.step for one in bench.checkpoints()] == [2, 4]


def test_a_run_that_may_delete_nothing_ends_like_any_other(bench: Bench, patience: RetryPolicy) -> None:
    blobs = WatchedBlobs(bench.tmp_path / "blobs")
    blobs.reachable = False  # for deletions
    counted = FailedCleanups.count
    run = bench.run(attempt=bench.attempt(blobs=blobs, retry=patience), eval_interval=1, n_epochs=2)

    asyncio.run(run.train())

    assert bench.job().status == "succeeded"
    assert FailedCleanups.count > counted


class FullDisk:
    """A trainer that finds no space for its checkpoint the first time."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.tries = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def save(self, folder: Path) -> None:
        self.tries += 1
        (folder / "skill.json").write_text("half of it")
        if self.tries == 1:
            raise FULL
        self.real.save(folder)


def test_a_full_disk_is_waited_for_and_leaves_no_half_checkpoint(
    bench: Bench, patience: RetryPolicy, told: list[Any]
) -> None:
    run = bench.run(attempt=bench.attempt(retry=patience))
    run.experience.trainer = run.experience.collector.trainer = FullDisk(run.experience.trainer)

    asyncio.run(run.train())

    assert "No space left on device" in told[0]
    assert bench.job().status == "succeeded"
    again = bench.run()
    for checkpoint in bench.checkpoints():
        again.checkpoints.download(checkpoint.blob_prefix, bench.tmp_path)  # verifies every hash
