"""A job's own vLLM engines, as tests start and reach them."""

import asyncio
import signal
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from worker import forking
from worker.engine import launch
from worker.engine.protocol import ServerInfo
from worker.model.policy import Policy
from worker.sampling.own import OwnEngine, OwnEngines
from worker.sampling.vllm import VllmSampler, with_own_engines

POLL_SECONDS = 0.05
SERVER = forking.ForkServer("tests.preloaded_engine")  # starts with the first engine, and lasts


class ForkedEngine:
    """The process of an engine. Implements worker.engine.launch.Process."""

    def __init__(self, child: forking.Started, pid: int) -> None:
        self._child, self.pid = child, pid

    @property
    def returncode(self) -> int | None:
        return self._child.poll()

    async def wait(self) -> int:
        while (status := self.returncode) is None:
            await asyncio.sleep(POLL_SECONDS)
        return status

    def kill(self) -> None:
        self._child.kill()

    def terminate(self) -> None:
        self._child.send_signal(signal.SIGTERM)


async def forked(*command: str, env: Mapping[str, str], pass_fds: Collection[int]) -> ForkedEngine:
    """Fork the process from one that has imported vLLM, which takes most of an engine's start: 7 seconds of a core."""
    child = forking.start(command, env, pass_fds=pass_fds, server=SERVER)
    while (pid := child.pid) is None:
        assert child.poll() is None, "the process has not begun"
        await asyncio.sleep(POLL_SECONDS)
    return ForkedEngine(child, pid)


def with_forked_engines(policy: Policy, **arguments: Any) -> VllmSampler:
    """As `with_own_engines`, in less time."""
    start_engine = partial(launch.start_of_job, start_process=forked)
    return with_own_engines(policy, start_engine=start_engine, **arguments)


def engines_of(sampler: VllmSampler) -> dict[int, OwnEngine]:
    """By number."""
    assert isinstance(sampler.engines, OwnEngines)
    return sampler.engines.by_number


def facts_of(sampler: VllmSampler, tensors: Sequence[str]) -> ServerInfo:
    """What the first engine says of itself and of these tensors of an adapter."""
    engine = engines_of(sampler)[0]
    return sampler._thread.run(engine.facts(tensors, engine.seconds))
