"""An engine that the main thread steps, as the routes of its process use it; and these routes."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.present import untyped
from worker.engine.child import application
from worker.engine.protocol import FACTS, SLEEP, WAKE
from worker.engine.stepped import EngineFailed, SteppedEngine

OPTIONS = {"model": "tiny", "dtype": "float32", "max_model_len": 64, "logprobs_mode": "processed_logprobs"}
KEY = {"authorization": "Bearer key"}


class Counting:
    """A SamplingEngine whose answers end after as many steps as their prompts say."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.is_awake, self.steps = True, 0
        self.added, self.fails = threading.Event(), threading.Event()
        self.vllm = self

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def add(self, id: str, prompt: Any, params: Any) -> None:
        if prompt == 0:
            raise ValueError("the prompt is empty")
        self.left[id] = prompt
        self.added.set()

    def step(self) -> Iterator[Any]:
        assert self.is_awake
        self.steps += 1
        if self.fails.is_set():
            raise RuntimeError("a kernel has crashed")
        for id in [*self.left]:
            self.left[id] -= 1
            if not self.left[id]:
                del self.left[id]
                yield SimpleNamespace(request_id=id)

    def abort(self, id: str) -> None:
        self.left.pop(id, None)

    def sleep(self) -> None:
        self.left.clear()
        self.is_awake = False

    def wake_up(self) -> None:
        self.is_awake = True

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [method]


@pytest.fixture
def counting() -> Counting:
    return Counting()


def running(start: Callable[[], Any]) -> SteppedEngine:
    """As the main thread of an engine's process runs it; the thread ends with the tests."""
    engine = SteppedEngine(start)
    threading.Thread(target=engine.run, daemon=True).start()
    return engine


@pytest.fixture
def engine(counting: Counting) -> SteppedEngine:
    return running(lambda: counting)


async def ids(engine: SteppedEngine, *requests: tuple[str, int]) -> list[str]:
    async def one(id: str, steps: int) -> str:
        [output] = [output async for output in engine.generate(steps, None, id)]
        return str(output.request_id)

    return await asyncio.gather(*(one(*request) for request in requests))


def test_answers_come_from_one_engine_in_any_order_and_a_late_one_joins(engine: SteppedEngine) -> None:
    assert asyncio.run(ids(engine, ("a", 400), ("b", 2), ("c", 1))) == ["a", "b", "c"]


def test_a_request_that_the_engine_refuses_ends_alone(engine: SteppedEngine) -> None:
    async def both() -> str:
        with pytest.raises(ValueError, match="empty"):
            await ids(engine, ("a", 0))
        return (await ids(engine, ("b", 2)))[0]

    assert asyncio.run(both()) == "b"


def test_an_answer_that_is_not_read_to_its_end_is_aborted(engine: SteppedEngine, counting: Counting) -> None:
    async def leave() -> bool:
        reading = asyncio.create_task(ids(engine, ("a", 1_000_000_000)))
        await asyncio.to_thread(counting.added.wait)
        reading.cancel()
        await asyncio.wait([reading])
        return await engine.call(lambda one: one.busy)

    assert asyncio.run(leave()) is False


def test_an_engine_that_sleeps_computes_nothing_until_it_is_awake_again(
    engine: SteppedEngine, counting: Counting
) -> None:
    app = application(engine, OPTIONS, "key")

    async def sleep_and_wake() -> list[str]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=KEY) as client:
            reading = asyncio.create_task(ids(engine, ("a", 1_000_000_000)))
            await asyncio.to_thread(counting.added.wait)
            assert (await client.post(SLEEP)).status_code == 200
            steps = counting.steps
            reading.cancel()
            await asyncio.wait([reading])
            assert (await client.post(WAKE)).status_code == 200
            assert counting.steps == steps
        return await ids(engine, ("b", 1))

    assert asyncio.run(sleep_and_wake()) == ["b"]


@pytest.mark.parametrize(
    ("cause", "lasting"),
    [(ValueError("unknown architecture"), True), (ValueError("Free memory on device is less"), False)],
)
def test_an_engine_that_does_not_start_says_why_to_whoever_asks_for_its_facts(
    cause: Exception, lasting: bool
) -> None:
    def start() -> Any:
        raise cause

    app = application(running(start), OPTIONS, "key")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=KEY) as client:
            return await client.post(FACTS, json={"tensors": []})

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert answer.json() == {"error": f"ValueError: {cause}", "lasting": lasting}


def test_an_engine_that_fails_in_a_step_fails_its_answers_and_all_later_calls(
    engine: SteppedEngine, counting: Counting
) -> None:
    async def fail() -> None:
        reading = asyncio.create_task(ids(engine, ("a", 1_000_000_000)))
        await asyncio.to_thread(counting.added.wait)
        counting.fails.set()
        with pytest.raises(EngineFailed, match="RuntimeError: a kernel has crashed"):
            await reading
        with pytest.raises(EngineFailed, match="crashed"):
            await engine.call(untyped(Counting.sleep))

    asyncio.run(fail())
