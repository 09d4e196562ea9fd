"""A member of a rollout fleet plans its memory as an inference server does, and answers its shortage the same way."""

import asyncio
import json
import os
import signal
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from core.registry import BaseModelEntry
from core.settings import Settings
from core.units import GIB
from tests.tiny import make_tiny_model
from worker.engine import errors
from worker.engine.launch import EngineNotStarted
from worker.engine.server import ended_by_signal
from worker.model.memory import DeviceMemory
from worker.serving import fleet_server
from worker.serving.cache_limits import CacheLimits
from worker.serving.engines import EngineRefused
from worker.serving.vllm_builder import VllmBuilder

CPU_ERROR = "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> BaseModelEntry:
    return BaseModelEntry(path=make_tiny_model(tmp_path_factory.mktemp("tiny")), dtype="float32", context=512)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A member sets variables of its engine."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class FakeVllm:
    """vLLM's server, whose engine starts if its cache is small enough, and which a signal ends at once."""

    def __init__(self, most: int, error: str | None = CPU_ERROR, *, dies: bool = False) -> None:
        """`error`: with which it ends. None: it is killed."""
        self.most, self.error, self.dies = most, error, dies
        self.started: list[int] = []  # bytes of the caches

    def __call__(self, listening: socket.socket, args: Namespace, connections: Mapping[str, Any]) -> bool:
        self.started.append(args.kv_cache_memory_bytes)
        is_too_large = self.started[-1] > self.most
        if self.error is not None and (is_too_large or self.dies):
            with Path(os.environ[errors.FILE]).open("a") as file:  # as our plugin for vLLM does
                file.write(json.dumps(self.error) + "\n")
        if is_too_large:
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        return not self.dies


@pytest.fixture
def run(entry: BaseModelEntry, tmp_path: Path) -> Callable[..., None]:
    def run(vllm: FakeVllm, **changes: Any) -> None:
        settings = Settings(data_dir=tmp_path, device="cpu", samplers_key="a key", **changes)
        device = DeviceMemory(lambda kind: 80 * GIB, lambda kind: 80 * GIB, lambda kind: 0)
        limits = CacheLimits(
            tmp_path / "limits", setting="kv_cache_gib", device=device, device_name=lambda kind: "H100"
        )
        builder = VllmBuilder(settings, shares_device=False, setting="kv_cache_gib", limits=limits)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            fleet_server.run(settings, "tiny", entry, listening, builder=builder, serve=vllm)

    return run


def test_a_member_that_runs_out_of_memory_ends_and_the_next_one_begins_with_half_of_its_cache(
    run: Callable[..., None],
) -> None:
    vllm = FakeVllm(GIB // 4)

    for _ in range(2):
        with pytest.raises(EngineNotStarted):
            run(vllm)
    run(vllm)

    assert vllm.started == [GIB, GIB // 2, GIB // 4]


def test_the_member_that_replaces_one_that_ran_out_of_memory_later_is_smaller(
    run: Callable[..., None],
) -> None:
    first, second = FakeVllm(GIB, dies=True), FakeVllm(GIB)

    with pytest.raises(fleet_server.EngineDied, match="can't allocate memory"):
        run(first)
    run(second)

    assert (first.started, second.started) == ([GIB], [GIB // 2])


def test_a_member_whose_engine_is_killed_ends_with_an_error_and_keeps_its_cache(
    run: Callable[..., None],
) -> None:
    vllm = FakeVllm(GIB, error=None, dies=True)

    for _ in range(2):
        with pytest.raises(fleet_server.EngineDied):
            run(vllm)

    assert vllm.started == [GIB, GIB]


class FakeChild:
    """A process of an engine that ends by itself (0), when it is killed (1), or never (2)."""

    def __init__(self, needs: int) -> None:
        self.needs, self.has = needs, 0

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None, "it may never end"

    def is_alive(self) -> bool:
        return self.has < self.needs

    def kill(self) -> None:
        self.has = 1


@pytest.mark.parametrize(("needs", "exits"), [(0, []), (1, []), (2, [1])])
def test_a_process_of_the_engine_that_remains_is_killed_and_one_that_cannot_be_killed_ends_the_member(
    needs: int, exits: list[int]
) -> None:
    ours, exited = FakeChild(needs), list[int]()

    fleet_server.end_children([FakeChild(0), ours], exited.append)

    assert exited == exits
    assert ours.has == min(needs, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
def test_a_server_tells_a_signal_from_the_death_of_its_engine(number: int | None) -> None:
    async def serving() -> None:
        """As vLLM's server, whose engine is dead without a signal."""
        stopping = asyncio.Event()
        for one in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(one, stopping.set)
        if number is not None:
            signal.raise_signal(number)
            await stopping.wait()

    assert ended_by_signal(serving()) is (number is not None)


def test_a_member_that_fails_for_another_reason_is_not_started_again(run: Callable[..., None]) -> None:
    vllm = FakeVllm(0, "ValueError: unknown architecture")

    with pytest.raises(EngineNotStarted) as failed:
        run(vllm)

    assert (len(vllm.started), failed.value.errors) == (1, ["ValueError: unknown architecture"])


def test_a_cache_that_does_not_hold_one_sequence_names_the_setting_of_members(
    run: Callable[..., None],
) -> None:
    error = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    with pytest.raises(EngineRefused, match=r"raise REGRAFT_KV_CACHE_GIB\.$"):
        run(FakeVllm(0, error))
    with pytest.raises(EngineRefused, match=r"REGRAFT_KV_CACHE_GIB is 1e-06"):
        run(FakeVllm(GIB), kv_cache_gib=0.000001)


def test_the_operator_chooses_the_cache_of_members(run: Callable[..., None]) -> None:
    vllm = FakeVllm(8 * GIB)

    run(vllm, kv_cache_gib=2.0, inference_kv_cache_gib=3.0)

    assert vllm.started == [2 * GIB]
