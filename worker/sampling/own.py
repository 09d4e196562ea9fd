"""A job's own engines: child processes, each on its own GPUs.

A crash or a hang in one must not take the run along, so that each is a process with a handle to kill it by.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten

from worker.engine import launch
from worker.engine.client import EngineClient, EngineGone, EngineLost, EngineSilent, EngineUnusable
from worker.engine.launch import LOADING_SECONDS, ChildEngine
from worker.engine.options import EngineConfig
from worker.engine.protocol import SLEEP, WAKE
from worker.model.engine_sizes import EngineShare
from worker.out_of_memory import Shortage, lacking
from worker.packages import vllm_version
from worker.refusals import SamplerUnusable, first_error
from worker.sampling.pool import EngineSource, OnReady

# Takes an out-of-memory error of an engine, and returns the memory of the next one. May raise.
LowerEngine = Callable[[Shortage], EngineShare]
StartEngine = Callable[[Path, EngineConfig], Awaitable[ChildEngine]]
EXIT_SECONDS = 10.0  # until the kernel has removed a process whose connections are closed


@dataclass(eq=False)
class OwnEngine(EngineClient):
    """A child and the client for it."""

    child: ChildEngine = field(kw_only=True)
    number: int = field(kw_only=True)
    folder: ExitStack = field(kw_only=True)
    replaces: bool = field(kw_only=True)  # another one was lost in its place
    share: EngineShare = field(kw_only=True)
    has_started: bool = False
    is_asleep: bool = False

    @property
    def seconds(self) -> float:
        """How long it may take to answer."""
        return self.silence if self.has_started else LOADING_SECONDS

    async def reason(self, cause: EngineLost) -> str:
        """The reason for which it was lost."""
        if isinstance(cause, EngineSilent):
            return f"the vLLM engine {str(cause).removeprefix('it ')}"
        if not isinstance(cause, EngineGone):
            # vLLM lists all architectures that it knows.
            return f"the vLLM engine failed: {shorten(str(cause), 400, placeholder=' ...')}"
        status = await self.child.exit_status(EXIT_SECONDS)
        if status is None:
            return f"the vLLM engine closed a connection: {cause}"
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"the vLLM engine's process exited: {how}"

    async def end(self) -> None:
        await self.child.kill()
        await self.client.aclose()
        self.folder.close()


class OwnEngines(EngineSource):
    """Each lost engine is restarted, at most `max_restarts` times in one `watch`."""

    def __init__(
        self,
        config: EngineConfig,
        gpus_E: Sequence[tuple[str, ...]],
        *,
        patience: float,
        max_restarts: int,
        on_restart: Callable[[str], None],
        lower: LowerEngine | None = None,
        start_engine: StartEngine = launch.start_of_job,
    ) -> None:
        """An engine that sends nothing for `patience` seconds has hung. `on_restart` receives the reason.

        `lower` returns the memory of an engine that replaces one which ran out of it. None: it is that of before.
        `start_engine` starts one, in a private folder, without waiting until it answers.
        """
        self.config, self.gpus_E = config, gpus_E
        self.patience, self.max_restarts, self.on_restart = patience, max_restarts, on_restart
        self.lower, self._start_engine = lower, start_engine
        self.by_number: dict[int, OwnEngine] = {}  # a lost one is missing
        self.has_answered = False
        self._losses: Counter[int] = Counter()
        self._have_run: set[int] = set()
        self._one_lowers = asyncio.Lock()

    @property
    def ready(self) -> Sequence[OwnEngine]:
        return [engine for engine in self.by_number.values() if engine.lost is not None]

    @property
    def starting(self) -> int:
        return sum(
            engine.lost is None and (engine.has_started or not engine.replaces)
            for engine in self.by_number.values()
        )

    async def start(self) -> None:
        for number in range(len(self.gpus_E)):
            if number not in self.by_number:
                await self._start(number)

    async def watch(self, tensors: Sequence[str], on_ready: OnReady) -> None:
        self._losses.clear()
        try:
            await self.start()
            for engine in self.by_number.values():
                engine.lost = None  # until it has answered
            async with asyncio.TaskGroup() as watching:
                for number in range(len(self.gpus_E)):
                    watching.create_task(self._keep(number, tensors, on_ready))
        except BaseExceptionGroup as several:
            raise first_error(several) from None

    async def lose(self, engine: EngineClient, cause: EngineLost) -> None:
        assert isinstance(engine, OwnEngine)
        if self.by_number.get(engine.number) is not engine:
            return
        del self.by_number[engine.number]
        lost, engine.lost = engine.lost, None
        try:
            await self._replace(engine, cause)
        finally:
            if lost is not None:
                lost.set()  # not before: another one needs its memory

    async def _replace(self, engine: OwnEngine, cause: EngineLost) -> None:
        try:
            reason = await engine.reason(cause)
        finally:
            await engine.end()  # also when this is cancelled: `close` does not know of it any more
        device = self.config.device
        if self.lower is not None and lacking(str(cause), device) == device:
            shortage = Shortage.of(str(cause), "sampler")
            async with self._one_lowers:
                # Engines that run out of the same memory lower it once.
                if engine.share == self._share:
                    share = await asyncio.to_thread(self.lower, shortage)  # writes to the database
                    self._use(share)
            return
        if isinstance(cause, EngineUnusable) and not self.has_answered:
            raise SamplerUnusable(
                f"vLLM {vllm_version()} does not compute this model on this worker: {reason}. "
                '`sampler = "transformers"` in the model\'s entry samples it instead.'
            ) from cause
        if self._losses[engine.number] == self.max_restarts:
            raise EngineLost(reason) from cause
        self._losses[engine.number] += 1
        self.on_restart(reason)

    async def sleep(self) -> None:
        """Also one that has not started yet: an engine that loads its weights later would take memory."""
        self._losses.clear()
        await asyncio.gather(*map(self._sleep, [*self.by_number.values()]))

    async def resize(self, share: EngineShare, sleeps: bool) -> None:
        """End all. Those that `watch` starts have this memory."""
        self._use(share)
        self.config = replace(self.config, sleeps=sleeps)
        await self.close()

    @property
    def _share(self) -> EngineShare:
        return EngineShare(self.config.kv_cache_bytes, self.config.sizes)

    def _use(self, share: EngineShare) -> None:
        self.config = replace(self.config, kv_cache_bytes=share.cache_bytes, sizes=share.sizes)

    async def close(self) -> None:
        while self.by_number:
            await self.by_number.popitem()[1].end()

    async def _sleep(self, engine: OwnEngine) -> None:
        if engine.is_asleep:
            return
        try:
            await engine.request("POST", SLEEP, seconds=engine.seconds)
        except EngineLost as cause:
            await self.lose(engine, cause)
        engine.has_started = engine.is_asleep = True

    async def _start(self, number: int) -> OwnEngine:
        folder = ExitStack()
        path = folder.enter_context(launch.private_folder())
        config = replace(self.config, gpus=self.gpus_E[number])
        child = await self._start_engine(path, config)
        engine = self.by_number[number] = OwnEngine(
            "the vLLM engine",
            child.client,
            silence=self.patience,
            child=child,
            number=number,
            folder=folder,
            replaces=number in self._have_run,
            share=self._share,
        )
        self._have_run.add(number)
        return engine

    async def _keep(self, number: int, tensors: Sequence[str], on_ready: OnReady) -> None:
        while True:
            engine = self.by_number.get(number) or await self._start(number)
            try:
                if engine.is_asleep:
                    # It gets the adapter or the weights anew, whatever vLLM keeps of them.
                    engine.is_asleep, engine.version = False, 0
                    await engine.request("POST", WAKE, seconds=engine.seconds)
                facts = await engine.facts(tensors, engine.seconds)
            except EngineLost as cause:
                await self.lose(engine, cause)
                continue
            engine.has_started, engine.lost = True, asyncio.Event()
            on_ready(facts)
            await engine.lost.wait()
