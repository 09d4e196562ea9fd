"""Grade samples with bounded concurrency and a deadline for each; failures become grades with an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from graders.calls import ServerAway
from graders.deadline import within
from graders.types import ErrorKind, Grade, Grader, Item, Sample


async def grade_all(
    grader: Grader,
    pairs: Sequence[tuple[Sample, Item]],
    *,
    concurrency: int = 64,
    timeout_s: float = 120.0,
    graded: Callable[[], None] = lambda: None,
) -> list[Grade]:
    """Return one grade per pair, in order, with at most `concurrency` in flight. Calls `graded` after each.

    A grader that raises or times out yields a Grade without a score; only ServerAway, and cancellation of the caller,
    stop the run.
    The deadline can interrupt a grader only at an await: a CPU-bound grader blocks the loop, so run untrusted code in
    a separate process.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    grades: dict[int, Grade] = {}
    todo = iter(enumerate(pairs))

    async def work() -> None:
        for index, (sample, item) in todo:
            grades[index] = await grade_within(timeout_s, grader, sample, item)
            graded()

    # A few workers share one iterator instead of one task per pair, because most graders never await.
    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(pairs))):
                workers.create_task(work())
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [grades[index] for index in range(len(pairs))]


async def grade_within(timeout_s: float, grader: Grader, sample: Sample, item: Item) -> Grade:
    """Grade one sample with a deadline. A timeout becomes a Grade with an error.

    The wait for a judge model, a core or a rate limit that other grades have their turn at does not count.
    """
    try:
        async with within(timeout_s):
            return await grade_one(grader, sample, item)
    except TimeoutError:  # from the deadline: grade_one raises no other
        reason = f"{grader.name}: no grade within {timeout_s:g} s"
        return Grade(None, reason, ErrorKind.other_error, seconds=timeout_s)


async def grade_one(grader: Grader, sample: Sample, item: Item) -> Grade:
    """Grade one sample and measure the time. An exception of the grader becomes a Grade with the reason.

    Raises:
        ServerAway: a server is unavailable that the caller has told the grader to wait for. No sample is at fault.
    """
    started = time.perf_counter()
    try:
        grade = await grader.grade(sample, item)
        return replace(grade, seconds=time.perf_counter() - started)
    except asyncio.CancelledError:
        if _being_cancelled():
            raise
        # The cancelled task is not this one but one that the grader awaited, so it must not end the worker.
        return _failed(grader, "it was cancelled from within", started)
    except ServerAway:
        raise
    except Exception as cause:
        return _failed(grader, repr(cause), started)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(grader: Grader, why: str, started: float) -> Grade:
    seconds = time.perf_counter() - started
    return Grade(None, f"{grader.name}: {why}", ErrorKind.other_error, seconds=seconds)
