"""Samples in, grades out: bounded concurrency, a deadline for each, and failures that stay data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from graders.types import ErrorKind, Grade, Grader, Item, Sample


async def grade_all(
    grader: Grader,
    pairs: Sequence[tuple[Sample, Item]],
    *,
    concurrency: int = 64,
    timeout_s: float = 120.0,
) -> list[Grade]:
    """One grade per pair, in the order of the pairs, at most `concurrency` under way at once.

    A grader that raises or runs out of time yields a Grade without a score; only cancelling the caller stops
    the run. The deadline can interrupt a grader only where it awaits: one that computes without a pause holds
    everything up, so code that is not ours belongs in a process of its own.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    grades: dict[int, Grade] = {}
    todo = iter(enumerate(pairs))

    async def work() -> None:
        for index, (sample, item) in todo:
            grades[index] = await grade_within(timeout_s, grader, sample, item)

    # A few workers sharing one iterator, not one task per pair: most graders finish without ever waiting.
    async with asyncio.TaskGroup() as workers:
        for _ in range(min(concurrency, len(pairs))):
            workers.create_task(work())
    return [grades[index] for index in range(len(pairs))]


async def grade_within(timeout_s: float, grader: Grader, sample: Sample, item: Item) -> Grade:
    """Like grade_one, with a deadline that also becomes a Grade."""
    try:
        async with asyncio.timeout(timeout_s):
            return await grade_one(grader, sample, item)
    except TimeoutError:  # the deadline's own: grade_one lets no other out
        reason = f"{grader.name}: no grade within {timeout_s:g} s"
        return Grade(None, reason, ErrorKind.other_error, seconds=timeout_s)


async def grade_one(grader: Grader, sample: Sample, item: Item) -> Grade:
    """Ask once and note the time taken. Whatever the grader raises becomes a Grade that says so."""
    started = time.perf_counter()
    try:
        grade = await grader.grade(sample, item)
        return replace(grade, seconds=time.perf_counter() - started)
    except asyncio.CancelledError:
        if _being_cancelled():
            raise
        # Nobody cancelled us: something the grader awaited was. Left alone it would end a worker in silence.
        return _failed(grader, "it was cancelled from within", started)
    except Exception as cause:
        return _failed(grader, repr(cause), started)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(grader: Grader, why: str, started: float) -> Grade:
    seconds = time.perf_counter() - started
    return Grade(None, f"{grader.name}: {why}", ErrorKind.other_error, seconds=seconds)
