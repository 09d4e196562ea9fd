"""Which engine samples which group. A group goes to one engine as a whole, which computes its prompt once.

The groups of a lost engine go to the others. Seeds belong to answers, so neither changes an answer.

Every answer is a separate request with its own seed. (vLLM's n=G makes the same requests, but seeds them seed+index,
so a single answer of a group could not be requested again.) The prompt's keys and values are shared through vLLM's
prefix cache either way.
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from worker.engine.client import EngineBusy, EngineClient, EngineLost
from worker.engine.protocol import AnswerFrame, AnswerRequest, GroupRequest, ServerInfo
from worker.model.engine_sizes import SEQUENCES
from worker.sampling.weight_sync import WEIGHT_SYNC
from worker.sampling.weights import Weights

# Of an engine, which decodes at most half as many side by side and so always has the next ones.
MAX_ANSWERS_AT_ONCE = 2 * SEQUENCES[-1]
Put = Callable[[AnswerFrame], None]
OnReady = Callable[[ServerInfo], None]
Waiting = dict[str, AnswerRequest]  # answers of a group that are not finished, by id


class EngineSource(Protocol):
    """The engines of a pool, and what becomes of them: a job's own (own.py) or those of a fleet (fleet.py)."""

    has_answered: bool  # so that it is known that they compute the model

    def answered(self, engine: EngineClient) -> None:
        """The engine has sampled an answer."""
        self.has_answered = True
        engine.has_answered()

    @property
    @abstractmethod
    def ready(self) -> Sequence[EngineClient]:
        """Those that take requests."""

    @property
    @abstractmethod
    def starting(self) -> int:
        """How many are expected to be ready soon."""

    async def start(self) -> None:
        """Start those that are missing, without waiting for them."""
        return

    @abstractmethod
    async def watch(self, tensors: Sequence[str], on_ready: OnReady) -> None:
        """Have engines ready, until cancelled. `on_ready` is called when there is another one.

        Args:
            tensors: names of the adapter's, of which engines say whether they apply them.

        Raises:
            EngineLost, NoMember: there are none, and waiting is in vain.
            SamplerUnusable: they do not do what the job needs.
        """

    @abstractmethod
    async def lose(self, engine: EngineClient, cause: EngineLost) -> None:
        """The engine has failed. Raises what `watch` raises."""

    async def sleep(self) -> None:
        """Have all engines release their GPUs' memory. Raises what `watch` raises."""
        raise AssertionError("only a job's own engines sleep")

    async def close(self) -> None:
        """End those that this process has started."""
        return


@dataclass(eq=False)
class EnginePlaces:
    """The places for answers at one engine."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ANSWERS_AT_ONCE))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one group takes places at a time
    delivery: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnginePool:
    """Deals groups to engines while `watch` runs. In one event loop."""

    def __init__(self, engines: EngineSource, weights: Weights) -> None:
        self.engines, self.weights = engines, weights
        self.left_out: Sequence[str] = ()  # adapter tensors that the engines ignore; they are the same in all
        self._waiting = 0  # tokens of groups without an engine
        self._changed = asyncio.Event()
        self._some_ready = asyncio.Event()
        self._places: dict[EngineClient, EnginePlaces] = {}

    async def watch(self, tensors: Sequence[str]) -> None:
        """As `EngineSource.watch` does."""
        await self.engines.watch(tensors, self._on_ready)

    async def some_ready(self) -> None:
        """Wait for the first engine."""
        await self._some_ready.wait()

    async def sample(self, group: GroupRequest, put: Put) -> None:
        """Sample the group, and what an engine that is lost leaves unfinished at another one."""
        waiting = {answer.id: answer for answer in group.answers}
        while waiting:
            engine = await self._choose(left_of(group, waiting).tokens)
            lost = engine.lost
            engine.unfinished |= waiting
            try:
                await self._sample_at(engine, group, waiting, put)
            except EngineLost as cause:
                is_put_off = isinstance(cause, EngineBusy) and engine.put_off(cause, time.monotonic())
                # If it answers again, its loss was counted before.
                if engine.lost is lost and not is_put_off:
                    await self.engines.lose(engine, cause)
            finally:
                engine.load -= left_of(group, waiting).tokens
                for id in waiting:
                    del engine.unfinished[id]
                self._notify()

    async def deliver(self, engine: EngineClient) -> str:
        """Have the engine sample from the published weights. Returns their name in requests."""
        async with self._places_at(engine).delivery:
            name = await self.weights.deliver(engine)
        WEIGHT_SYNC.end()
        return name

    def _on_ready(self, facts: ServerInfo) -> None:
        self.left_out = facts.left_out
        self._some_ready.set()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _choose(self, tokens: int) -> EngineClient:
        self._waiting += tokens
        try:
            while True:
                now = time.monotonic()
                ready = [engine for engine in self.engines.ready if engine.free_at <= now]
                chosen = choose(
                    [engine.load for engine in ready], self._waiting, len(ready) + self.engines.starting
                )
                if chosen is not None:
                    ready[chosen].load += tokens
                    return ready[chosen]
                busy = [engine.free_at - now for engine in self.engines.ready if engine.free_at > now]
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(busy, default=None))
        finally:
            self._waiting -= tokens

    async def _sample_at(self, engine: EngineClient, group: GroupRequest, waiting: Waiting, put: Put) -> None:
        """Have the engine sample the waiting answers, and take those that it finishes out."""
        lost = engine.lost
        if lost is None:
            raise EngineLost("it was lost")
        sampling = asyncio.create_task(self._read(engine, group, waiting, put))
        losing = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait([sampling, losing], return_when=asyncio.FIRST_COMPLETED)
            if not sampling.done():
                raise EngineLost("it was lost")
            sampling.result()
        finally:
            losing.cancel()
            sampling.cancel()
            await asyncio.wait([sampling])

    async def _read(self, engine: EngineClient, group: GroupRequest, waiting: Waiting, put: Put) -> None:
        places = self._places_at(engine)
        taken, count = 0, min(len(waiting), MAX_ANSWERS_AT_ONCE)
        try:
            async with places.lock:
                while taken < count:
                    await places.free.acquire()
                    taken += 1
            name = await self.deliver(engine)
            answers = engine.sample(replace(left_of(group, waiting), adapter=name))
            async with aclosing(answers):
                async for answer in answers:
                    if answer.finish not in ("stop", "length"):
                        raise EngineLost(f"it ended an answer with {answer.finish}")
                    put(answer)
                    self.engines.answered(engine)
                    del engine.unfinished[answer.id]
                    engine.load -= waiting.pop(answer.id).max_tokens
                    if taken:
                        taken -= 1
                        places.free.release()
        finally:
            for _ in range(taken):
                places.free.release()

    def _places_at(self, engine: EngineClient) -> EnginePlaces:
        return self._places.setdefault(engine, EnginePlaces())


def left_of(group: GroupRequest, waiting: Waiting) -> GroupRequest:
    """The part of the group that has not been sampled yet."""
    return replace(group, answers=tuple(waiting.values()))


def choose(load_E: Sequence[int], waiting: int, engines: int) -> int | None:
    """Choose an engine for a group: the least loaded. None: the group waits.

    Args:
        load_E: tokens that the engines that take groups now may still have to compute.
        waiting: tokens of all groups that have no engine, with this one.
        engines: how many will take groups, with those that are still starting: a group waits for one of them if all
            others have their share.
    """
    least = min(range(len(load_E)), key=load_E.__getitem__, default=None)
    share = (waiting + sum(load_E)) / max(1, engines)
    return None if least is None or load_E[least] >= share else least
