import asyncio
import doctest
import math
from collections.abc import Callable
from typing import Any

import pytest

import graders
from graders.builtin.multi import Multi
from graders.builtin.python import PythonGrader
from graders.calls import RateLimit
from graders.formula import Formula
from graders.run import grade_all, grade_within
from graders.sandbox.pool import GradeOutcome, PoolCall
from graders.types import ErrorKind, Grade, Item, Sample
from tests.graders.test_judge import Jumping, jumping
from tests.present import untyped


class Calls:
    """A grader made of an async function of the sample's text."""

    name, type = "calls", "string_check"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def grade(self, sample: Sample, item: Item) -> Any:
        return await self.function(sample.output_text)


def pairs(*texts: str) -> list[tuple[Sample, dict[str, Any]]]:
    return [(Sample(text), {}) for text in texts]


def run(function: Callable[..., Any], *texts: str, **limits: Any) -> list[Grade]:
    return asyncio.run(grade_all(Calls(function), pairs(*texts), **limits))


async def number(text: str) -> Grade:
    return Grade(float(text))


async def forever(text: str) -> Grade:
    await asyncio.Event().wait()
    raise AssertionError


def test_grades_come_back_in_the_order_of_the_samples() -> None:
    """The first to start is made the last to finish."""
    others_done = asyncio.Event()

    async def first_waits(text: str) -> Grade:
        if text == "0":
            await others_done.wait()
        elif text == "4":
            others_done.set()
        return Grade(float(text))

    grades = run(first_waits, "0", "1", "2", "3", "4", concurrency=2)

    assert [grade.score for grade in grades] == [0, 1, 2, 3, 4]


def test_no_samples_give_no_grades() -> None:
    assert run(number) == []


def test_a_grader_that_raises_leaves_only_its_own_sample_ungraded() -> None:
    good, bad = run(number, "1", "one")

    assert good.score == 1.0
    assert (bad.score, bad.error) == (None, ErrorKind.other_error)
    assert "calls: ValueError(" in bad.reason


def test_a_score_that_is_not_finite_is_reported_and_does_not_spread() -> None:
    async def nan(text: str) -> Grade:
        return Grade(math.nan)

    assert "must be finite" in run(nan, "")[0].reason


def test_a_score_too_large_to_be_summed_and_squared_is_reported() -> None:
    async def huge(text: str) -> Grade:
        return Grade(float(text))

    assert run(huge, "-1e15")[0].score == -1e15
    assert "at most 1e+15" in run(huge, "1e16")[0].reason


def test_an_answer_that_is_no_grade_leaves_the_sample_ungraded() -> None:
    async def nothing(text: str) -> None:
        return None

    assert run(nothing, "")[0].error is ErrorKind.other_error


def test_a_grader_that_takes_too_long_leaves_its_sample_ungraded() -> None:
    async def slow_on_request(text: str) -> Grade:
        return await (forever(text) if text == "slow" else number(text))

    slow, quick = run(slow_on_request, "slow", "1", timeout_s=0.01)

    assert (slow.score, slow.error) == (None, ErrorKind.other_error)
    assert slow.reason == "calls: no grade within 0.01 s"
    assert quick.score == 1.0


def test_the_deadline_reaches_into_a_multi() -> None:
    multi = Multi("both", {"a": Calls(forever), "b": Calls(forever)}, Formula.parse("a + b", ["a", "b"]))
    [grade] = asyncio.run(grade_all(multi, pairs(""), timeout_s=0.01))

    assert grade.reason == "both: no grade within 0.01 s"


class Queue:
    """A pool whose cores are taken, and then free for a call that takes long."""

    def __init__(self) -> None:
        self.call: PoolCall[GradeOutcome] = PoolCall("", None, "", untyped(None))

    def submit(self, *parts: Any) -> PoolCall[GradeOutcome]:
        return self.call


def test_the_wait_for_a_core_of_the_sandbox_does_not_count_and_the_grade_itself_does() -> None:
    queues = [Queue(), Queue(), Queue()]

    async def grades(loop: Jumping) -> list[Grade]:
        coming = [
            asyncio.create_task(grade_all(PythonGrader("py", "", untyped(queue)), [(Sample("a"), {})]))
            for queue in queues
        ]
        await loop.jump(1000.0)
        for queue in queues[:2]:
            queue.call.began.set_result(None)
        queues[0].call.set_result(GradeOutcome("ok", score=1.0))
        await loop.jump(1000.0)
        queues[2].call.cancel()
        return [(await one)[0] for one in coming]

    graded, late, canceled = jumping(grades)

    assert graded.score == 1.0
    assert (late.score, late.reason) == (None, "py: no grade within 120 s")
    assert queues[1].call.cancelled()
    assert (canceled.score, canceled.reason) == (None, "py: it was cancelled from within")


def test_the_wait_for_a_rate_limit_does_not_count() -> None:
    async def turns(loop: Jumping) -> Grade:
        pace = RateLimit(0.001, clock=loop.time)

        async def in_turn(text: str) -> Grade:
            await pace.turn()
            return Grade(1.0)

        await pace.turn()
        coming = asyncio.create_task(grade_within(60.0, Calls(in_turn), Sample(""), {}))
        await loop.jump(1000.0)
        return await coming

    assert jumping(turns).score == 1.0


def test_a_timeout_of_the_graders_own_is_not_taken_for_ours() -> None:
    async def impatient(text: str) -> Grade:
        raise TimeoutError("upstream")

    assert run(impatient, "")[0].reason == "calls: TimeoutError('upstream')"


def test_a_grader_cancelled_from_within_loses_its_sample_and_no_other() -> None:
    async def cancelled(text: str) -> Grade:
        if text == "bad":
            raise asyncio.CancelledError
        return await number(text)

    grades = run(cancelled, "1", "bad", "3", concurrency=1)

    assert [grade.score for grade in grades] == [1.0, None, 3.0]
    assert "cancelled from within" in grades[1].reason


def test_cancelling_the_run_stops_it_and_every_grader_in_it() -> None:
    stopped = []

    async def noted(text: str) -> Grade:
        try:
            return await forever(text)
        finally:
            stopped.append(text)

    async def cancel_once_started() -> None:
        run = asyncio.create_task(grade_all(Calls(noted), pairs("a", "b")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        run.cancel()
        await run

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel_once_started())
    assert sorted(stopped) == ["a", "b"]


def test_no_more_graders_run_at_once_than_allowed() -> None:
    running, most = 0, 0

    async def counted(text: str) -> Grade:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Grade(1.0)

    run(counted, *"abcdefgh", concurrency=3)

    assert most == 3


def test_a_run_without_any_concurrency_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run(number, "1", concurrency=0)


def test_each_grade_says_how_long_it_took() -> None:
    async def yields(text: str) -> Grade:
        await asyncio.sleep(0)
        return Grade(1.0, seconds=-1.0)

    assert run(yields, "")[0].seconds > 0


def test_the_example_in_the_package_docstring_works() -> None:
    assert doctest.testmod(graders).failed == 0
    assert doctest.testmod(graders).attempted > 0
