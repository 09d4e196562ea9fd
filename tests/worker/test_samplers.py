"""The bridge between a sampler's thread and the event loop."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.present import untyped
from worker.model.policy import Route
from worker.out_of_memory import OutOfDeviceMemory
from worker.sampling import Answer, Sampling, from_thread
from worker.sampling.transformers import TransformersSampler, TransformersTurns
from worker.types import Prompt, Rollout


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


class NoRoom(TransformersSampler):
    """Fails where a wave begins, which is in none of its steps."""

    def __init__(self) -> None:
        super().__init__(untyped(SimpleNamespace(device=torch.device("cpu"), route=Route())))

    def steps(self, *arguments: Any) -> Any:
        raise MemoryError("no room for the cache")


class NoRoomForATurn(NoRoom):
    """Fails in the first step of a wave."""

    def steps(self, *arguments: Any) -> Any:
        yield from super().steps()


def test_an_error_of_the_thread_that_samples_turns_is_raised_at_each_turn_also_at_later_ones() -> None:
    async def ask() -> list[BaseException | Rollout]:
        sampling = Sampling(group_size=2, temperature=1.0, max_completion_tokens=4, job_seed=1, step=0)
        prompt = Prompt(1, (1, 2), {})
        async with asyncio.timeout(60), NoRoom().turns(sampling) as turns:
            together = [turns.next(prompt, member) for member in range(2)]
            found = await asyncio.gather(*together, return_exceptions=True)
            return [*found, *await asyncio.gather(turns.next(prompt, 2), return_exceptions=True)]

    assert [str(cause) for cause in asyncio.run(ask())] == ["no room for the cache"] * 3


@pytest.mark.parametrize("kind", [NoRoom, NoRoomForATurn])
def test_a_turn_that_runs_out_of_memory_says_that_the_sampler_did(kind: type[NoRoom]) -> None:
    async def ask() -> None:
        sampling = Sampling(group_size=1, temperature=1.0, max_completion_tokens=4, job_seed=1, step=0)
        async with asyncio.timeout(60), kind().turns(sampling) as turns:
            await turns.next(Prompt(1, (1, 2), {}), 0)

    with pytest.raises(OutOfDeviceMemory) as raised:
        asyncio.run(ask())

    assert raised.value.shortage.place == "sampler"


class Waves(TransformersSampler):
    """Writes down the prompts of each wave, whose answers end at once."""

    def __init__(self, route: Route) -> None:
        policy = untyped(SimpleNamespace(device=torch.device("cpu"), route=route))
        super().__init__(policy, max_tokens_in_flight=30)
        self.waves: list[list[int]] = []

    def steps(self, prompts_P: Any, *arguments: Any) -> Any:
        self.waves.append([prompt.line for prompt in prompts_P])
        yield [(row, answer(0).rollout) for row in range(len(prompts_P))]


@pytest.mark.parametrize(
    ("route", "waves"), [(Route(), [[0, 1], [2]]), (Route(decode="alone"), [[0], [1], [2]])]
)
def test_a_wave_of_turns_fits_with_all_rows_as_long_as_its_longest(
    route: Route, waves: list[list[int]]
) -> None:
    sampler = Waves(route)
    sampling = Sampling(group_size=1, temperature=1.0, max_completion_tokens=4, job_seed=1, step=0)
    turns = TransformersTurns(sampler, sampling)

    async def work() -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.to_thread(turns.work))

    async def sample() -> None:
        prompts = [Prompt(line, (1,) * length, {}) for line, length in enumerate((10, 2, 2))]
        async with asyncio.timeout(60):
            wanted = asyncio.gather(*(turns.next(prompt, 0) for prompt in prompts))
            _, working = await asyncio.gather(wanted, work())
            turns.close()
            await working

    asyncio.run(sample())

    assert sampler.waves == waves
