"""The inference server's answer to an engine that runs out of memory: a smaller cache, also for the next start."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.registry import BaseModelEntry
from core.settings import Settings
from core.units import GIB
from tests.present import present, untyped
from tests.tiny import make_tiny_model
from worker.engine import errors
from worker.engine.launch import EngineNotStarted
from worker.engine.options import EngineConfig
from worker.model.engine_sizes import BATCHED_TOKENS, SEQUENCES, EngineSizes
from worker.model.memory import DeviceMemory
from worker.serving.cache_limits import CacheLimits, shortage_of
from worker.serving.engines import EngineRefused
from worker.serving.vllm_builder import VllmBuilder
from worker.serving.vllm_server import VllmServer

OUT_OF_MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.50 GiB is free."
)
CONFIG = EngineConfig("folder", "bfloat16", "cuda", EngineSizes(8192), 64, 8 * GIB, 0)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1e9

    def __call__(self) -> float:
        return self.seconds


def device(taken: int = 0) -> DeviceMemory:
    """80 GiB, of which other processes use some."""
    return DeviceMemory(lambda kind: 80 * GIB - taken, lambda kind: 80 * GIB, lambda kind: 0)


@pytest.fixture
def limits(tmp_path: Path) -> Callable[..., CacheLimits]:
    def limits(taken: int = 0, *, name: str = "H100", clock: Callable[[], float] = Clock()) -> CacheLimits:
        return CacheLimits(
            tmp_path / "limits", device=device(taken), device_name=lambda kind: name, clock=clock
        )

    return limits


class FakeServer:
    """An engine that starts if its cache is small enough."""

    def __init__(self, most: int, error: str = OUT_OF_MEMORY) -> None:
        self.most, self.error = most, error
        self.started: list[int] = []  # bytes of the caches
        self.on_end: Callable[[Sequence[str]], None] = lambda errors: None

    def __call__(self, name: str, config: EngineConfig, *rest: Any, on_end: Any) -> "FakeServer":
        self.started.append(config.kv_cache_bytes)
        self.on_end = on_end
        return self

    async def start(self) -> None:
        if self.started[-1] > self.most:
            raise EngineNotStarted("its engine exited with status 1", ["ValueError: before", self.error])


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> BaseModelEntry:
    return BaseModelEntry(path=make_tiny_model(tmp_path_factory.mktemp("tiny")), dtype="float32", context=512)


@pytest.fixture
def builder(tmp_path: Path, limits: Callable[..., CacheLimits]) -> Callable[..., VllmBuilder]:
    """On a CPU, whose cache is 1 GiB, since its device can be computed with here."""

    def builder(server: FakeServer, taken: int = 0) -> VllmBuilder:
        settings = Settings(data_dir=tmp_path, device="cpu")
        made = VllmBuilder(settings, shares_device=False, limits=limits(taken), server=untyped(server))
        return made

    return builder


def build(made: VllmBuilder, entry: BaseModelEntry) -> Any:
    return asyncio.run(made.build("tiny", entry, []))


CPU_ERROR = "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to"


class TestBuilder:
    def test_an_engine_that_runs_out_of_memory_starts_again_with_half_of_its_cache(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        server = FakeServer(GIB // 4, CPU_ERROR)

        assert build(builder(server), entry) is server

        assert server.started == [GIB, GIB // 2, GIB // 4]

    def test_the_next_server_begins_with_the_cache_that_fitted(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        build(builder(FakeServer(GIB // 4, CPU_ERROR)), entry)
        again = FakeServer(GIB, CPU_ERROR)

        build(builder(again), entry)

        assert again.started == [GIB // 4]

    def test_a_cache_that_was_lowered_beside_other_processes_is_not_stored(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        build(builder(FakeServer(GIB // 4, CPU_ERROR), taken=2 * GIB), entry)
        again = FakeServer(GIB, CPU_ERROR)

        build(builder(again), entry)

        assert again.started == [GIB]

    def test_with_the_smallest_cache_it_is_refused_by_name(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        server = FakeServer(0, CPU_ERROR)
        made = builder(server)
        _, need = made.need(entry)

        with pytest.raises(
            EngineRefused, match="The engine of tiny needs more memory than the device has"
        ) as no:
            build(made, entry)

        assert (no.value.code, no.value.retry_after) == ("not_enough_memory", 0)
        assert server.started[-1] == need.least_cache

    def test_beside_other_processes_the_refusal_passes(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        with pytest.raises(EngineRefused, match=r"Other processes use 2\.0 GiB of it; retry later") as no:
            build(builder(FakeServer(0, CPU_ERROR), taken=2 * GIB), entry)

        assert (no.value.code, no.value.retry_after) == ("loading", 10)

    def test_another_error_is_not_answered(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        server = FakeServer(0, "ValueError: unknown architecture")

        with pytest.raises(EngineNotStarted):
            build(builder(server), entry)

        assert len(server.started) == 1

    @pytest.mark.parametrize(
        "error",
        [
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "ValueError: 1.0 GiB KV cache is needed, which is larger than the available KV cache memory (0.5 GiB).",
        ],
    )
    def test_a_cache_that_does_not_hold_one_sequence_is_not_lowered_but_refused_by_name(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry, error: str
    ) -> None:
        server = FakeServer(0, error)

        with pytest.raises(EngineRefused, match="does not hold one sequence of 512 tokens") as no:
            build(builder(server), entry)

        assert (no.value.code, no.value.retry_after) == ("not_enough_memory", 0)
        assert server.started == [GIB]

    def test_an_engine_that_runs_out_of_memory_while_it_answers_is_replaced_by_a_smaller_one(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        server = FakeServer(GIB, CPU_ERROR)
        build(builder(server), entry)

        server.on_end([CPU_ERROR])

        again = FakeServer(GIB, CPU_ERROR)
        build(builder(again), entry)
        assert again.started == [GIB // 2]

    def test_the_next_engine_is_smaller_also_beside_other_processes_whose_limit_is_not_stored(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        server = FakeServer(GIB, CPU_ERROR)
        made = builder(server, taken=2 * GIB)
        build(made, entry)

        server.on_end([CPU_ERROR])

        build(made, entry)
        assert server.started == [GIB, GIB // 2]

    def test_an_engine_that_died_for_another_reason_is_replaced_by_an_equal_one(
        self, builder: Callable[..., VllmBuilder], entry: BaseModelEntry
    ) -> None:
        server = FakeServer(GIB, CPU_ERROR)
        made = builder(server)
        build(made, entry)

        server.on_end(["RuntimeError: the bus has failed"])

        build(made, entry)
        assert server.started == [GIB, GIB]


class FakeEngine:
    """An engine that has run out of memory and died, and whose memory is free when it is closed."""

    has_exited = True

    def __init__(self, folder: Path, memory: list[int]) -> None:
        self.folder, self._memory = folder, memory
        self.client, self.socket = httpx.AsyncClient(), folder / "engine"
        memory[0] += 40 * GIB

    @property
    def errors(self) -> Sequence[str]:
        return list(errors.read(self.folder))

    async def close(self) -> None:
        self._memory[0] -= 40 * GIB


def test_the_memory_of_an_engine_that_died_is_not_counted_as_that_of_other_processes(
    limits: Callable[..., CacheLimits], entry: BaseModelEntry, tmp_path: Path
) -> None:
    used = [0]
    config = replace(CONFIG, source=str(entry.path))
    memory = DeviceMemory(lambda kind: 80 * GIB - used[0], lambda kind: 80 * GIB, lambda kind: 0)
    lowering = CacheLimits(tmp_path / "limits", device=memory, device_name=lambda kind: "H100", clock=Clock())

    async def start(folder: Path, *rest: Any, **named: Any) -> FakeEngine:
        errors.file_in(folder).write_text(json.dumps(OUT_OF_MEMORY) + "\n")
        return FakeEngine(folder, used)

    async def start_and_close() -> None:
        server = VllmServer(
            *("m", config, entry, tmp_path),
            on_end=lambda texts: lowering.lower("m", config, texts, GIB),
            start_engine=untyped(start),
        )
        await server.start()
        await server.close()

    asyncio.run(start_and_close())

    assert limits().within(config, GIB).kv_cache_bytes == 4 * GIB


class TestLimits:
    def test_are_of_a_model_on_a_device_with_the_same_sizes(self, limits: Callable[..., CacheLimits]) -> None:
        limits().lower("m", CONFIG, [OUT_OF_MEMORY], GIB)

        assert limits().within(CONFIG, GIB).kv_cache_bytes == 4 * GIB
        assert limits(name="L40S").within(CONFIG, GIB) == CONFIG
        for other in (
            replace(CONFIG, rank=8),
            replace(CONFIG, source="b"),
            replace(CONFIG, tensor_parallel=2),
            replace(CONFIG, sizes=EngineSizes(4096)),
        ):
            assert limits().within(other, GIB) == other

    def test_are_first_of_the_buffers_and_then_of_the_cache(self, limits: Callable[..., CacheLimits]) -> None:
        """Eight GiB of cache that are not the reason would be halved in vain."""
        large = replace(CONFIG, sizes=EngineSizes(8192, 1024, 8192))
        small = replace(CONFIG, sizes=EngineSizes(8192, 256, 2048))

        first = present(limits().lower("m", large, [OUT_OF_MEMORY], GIB))
        assert (first, limits().within(large, GIB)) == (small, small)
        second = present(limits().lower("m", first, [OUT_OF_MEMORY], GIB))
        assert second == limits().within(large, GIB) == replace(small, kv_cache_bytes=4 * GIB)

    def test_of_a_model_with_recurrent_states_leave_it_as_many_sequences_as_blocks(
        self, limits: Callable[..., CacheLimits]
    ) -> None:
        hybrid = replace(CONFIG, sizes=EngineSizes(8192, state_block_bytes=GIB // 32))

        lower = present(limits().lower("m", hybrid, [OUT_OF_MEMORY], GIB))

        assert (lower.kv_cache_bytes, lower.sizes.sequences) == (4 * GIB, 128)
        assert limits().within(hybrid, GIB) == lower

    def test_hold_for_engines_with_other_numbers_of_sequences_and_tokens(
        self, limits: Callable[..., CacheLimits]
    ) -> None:
        """They follow from the free memory, which differs between two starts."""
        limits().lower("m", CONFIG, [OUT_OF_MEMORY], GIB)

        larger = replace(CONFIG, sizes=EngineSizes(8192, SEQUENCES[-1], BATCHED_TOKENS[-1]))
        assert limits().within(larger, GIB).kv_cache_bytes == 4 * GIB

    def test_hold_for_a_week(self, limits: Callable[..., CacheLimits]) -> None:
        clock = Clock()
        limits(clock=clock).lower("m", CONFIG, [OUT_OF_MEMORY], GIB)

        clock.seconds += 7 * 24 * 3600 + 1

        assert limits(clock=clock).within(CONFIG, GIB) == CONFIG

    def test_leave_room_for_one_sequence(self, limits: Callable[..., CacheLimits]) -> None:
        limits().lower("m", CONFIG, [OUT_OF_MEMORY], GIB)

        assert limits().within(CONFIG, 5 * GIB).kv_cache_bytes == 5 * GIB

    def test_are_logged_with_the_numbers_of_the_error(
        self, limits: Callable[..., CacheLimits], caplog: pytest.LogCaptureFixture
    ) -> None:
        limits().lower("m", CONFIG, [OUT_OF_MEMORY], GIB)

        assert (
            "the engine of m ran out of memory (2.00 GiB wanted, 1.50 GiB free): "
            "its KV cache has 4.00 GiB now, not 8.00" in caplog.text
        )

    def test_are_of_the_device_and_not_of_main_memory(self) -> None:
        assert shortage_of(["MemoryError: "], "cuda") is None
        assert shortage_of(["RuntimeError: CUDA error: out of memory"], "cuda") is not None


class TestErrors:
    def test_of_an_engines_process_are_read_by_its_parent(self, tmp_path: Path) -> None:
        code = """
import logging
from worker.engine import errors
errors.write_errors_of(logging.getLogger("vllm"))
log = logging.getLogger("vllm.v1.engine.core")
log.error("without an exception")
try:
    raise RuntimeError("CUDA out of memory.\\nTried to allocate 2.00 GiB")
except RuntimeError:
    log.exception("EngineCore failed to start.")
"""
        environment = {errors.FILE: str(errors.file_in(tmp_path))}
        subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, cwd=Path(__file__).parents[2]
        )

        assert list(errors.read(tmp_path)) == [
            "RuntimeError: CUDA out of memory.\nTried to allocate 2.00 GiB"
        ]

    def test_of_a_process_that_was_killed_while_it_wrote_are_left_out(self, tmp_path: Path) -> None:
        errors.file_in(tmp_path).write_text(json.dumps("ValueError: a") + '\n"OutOf')

        assert list(errors.read(tmp_path)) == ["ValueError: a"]

    def test_that_an_engine_survives_are_not_written(self, tmp_path: Path) -> None:
        handler = errors.ErrorFile(errors.file_in(tmp_path))
        logger = logging.Logger("vllm")
        logger.addHandler(handler)
        survived = ("Invocation of %s method failed", "WorkerProc hit an exception.")
        for message in (*survived, "EngineCore encountered a fatal error."):
            try:
                raise ValueError(message)
            except ValueError:
                logger.exception(message)

        assert list(errors.read(tmp_path)) == ["ValueError: EngineCore encountered a fatal error."]

    def test_without_a_file_nothing_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(errors.FILE, raising=False)
        logger = logging.Logger("vllm")

        errors.write_errors_of(logger)

        assert not logger.handlers and list(errors.read(tmp_path)) == []
