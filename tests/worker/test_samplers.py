"""The bridge between a sampler's thread and the event loop."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.present import untyped
from worker.rollout.samplers import Answer, from_thread
from worker.types import Rollout


def answer(n: int) -> Answer:
    return Answer(0, n, Rollout((n,), (0.0,), "", "stop"))


def test_answers_arrive_in_order_and_are_made_in_another_thread() -> None:
    threads = set()

    def answers() -> Iterator[Answer]:
        for n in range(3):
            threads.add(threading.get_ident())
            yield answer(n)

    async def collect() -> list[Any]:
        return [one.member async for one in from_thread(answers())]

    assert asyncio.run(collect()) == [0, 1, 2]
    assert threading.get_ident() not in threads


def test_what_the_thread_raises_is_raised_at_the_reader() -> None:
    def answers() -> Iterator[Answer]:
        yield answer(0)
        raise MemoryError("no room for the cache")

    async def collect() -> None:
        async for _ in from_thread(answers()):
            pass

    with pytest.raises(MemoryError, match="no room"):
        asyncio.run(collect())


def test_a_reader_that_leaves_early_stops_the_thread() -> None:
    made = []

    def answers() -> Iterator[Answer]:
        for n in range(1_000_000):
            made.append(n)
            yield answer(n)

    async def first_only() -> int | None:
        stream = from_thread(answers())
        async for one in stream:
            await untyped(stream).aclose()
            return one.member
        return None

    assert asyncio.run(first_only()) == 0
    assert len(made) < 1_000_000
