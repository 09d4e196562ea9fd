"""The KV caches of served models that out-of-memory errors lowered, with which their next engines start.

As for jobs (worker/recording/plan_record.py), for a week, and only what was lowered while no other process used the
device. Inference servers and members of rollout fleets have no database, so each has a file in its data folder.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from core.jobs.memory_limits import VALID_SECONDS
from core.json_files import JsonFiles
from core.units import GIB
from worker.engine.launch import EngineNotStarted
from worker.engine.options import EngineConfig
from worker.model import memory
from worker.model.lowering import numbers, smaller_cache
from worker.model.memory import UNEXPLAINED_BYTES, DeviceMemory
from worker.out_of_memory import Shortage, lacking
from worker.serving.engines import EngineRefused

log = logging.getLogger(__name__)

# The setting of an inference server, and of a member of a rollout fleet.
CacheSetting = Literal["inference_kv_cache_gib", "kv_cache_gib"]
RETRY_AFTER = 10
# vLLM's messages for a cache that it was given, whatever memory is free.
_TOO_SMALL = re.compile("No available memory for the cache blocks|larger than the available KV cache memory")


class CacheLimit(BaseModel):
    """The largest KV cache, in bytes, of each process of an engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache_bytes: int
    has_smallest_sizes: bool  # beside its cache (EngineSizes.smallest)
    lowered_at: float  # seconds since the epoch


class CacheLimits:
    """Those of one server."""

    def __init__(
        self,
        folder: Path,
        *,
        setting: CacheSetting = "inference_kv_cache_gib",
        device: DeviceMemory = DeviceMemory(),
        device_name: Callable[[str], str] = memory.device_name,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder` need not exist. `setting`: with which the operator chooses the cache."""
        self._files = JsonFiles(folder, CacheLimit)
        self._setting = setting
        self._device, self._device_name, self._clock = device, device_name, clock

    def within(self, config: EngineConfig, least: int) -> EngineConfig:
        """The configuration with no larger cache than its limit, but one of `least` bytes."""
        found = self._files.read(*self._key(config))
        if found is None or found.lowered_at < self._clock() - VALID_SECONDS:
            return config
        cache = max(least, min(config.kv_cache_bytes, found.cache_bytes))
        sizes = config.sizes.smallest if found.has_smallest_sizes else config.sizes
        return replace(config, kv_cache_bytes=cache, sizes=sizes.within(cache))

    def after(self, name: str, config: EngineConfig, failed: EngineNotStarted, least: int) -> EngineConfig:
        """The configuration for another start of an engine that ran out of memory. Arguments as in `lower`.

        Raises:
            EngineRefused: it ran out of memory with the smallest cache, or the cache does not hold one sequence.
            EngineNotStarted: it failed for another reason.
        """
        if (refusal := self._too_small(name, config, failed.errors)) is not None:
            raise refusal from failed
        smaller = self.lower(name, config, failed.errors, least)
        if smaller is None:
            raise failed
        return smaller

    def lower(
        self, name: str, config: EngineConfig, errors: Iterable[str], least: int
    ) -> EngineConfig | None:
        """The configuration for another start of an engine that ran out of memory. None: it did not.

        Args:
            name: of the model.
            errors: of the engine, which has ended.
            least: bytes of the cache of one sequence.

        Raises:
            EngineRefused: the cache is the smallest one.
        """
        shortage = shortage_of(errors, config.device)
        if shortage is None:
            return None
        others = self._device.used_by_others(config.device)
        are_others = others > UNEXPLAINED_BYTES
        smaller = _smaller(config, least)
        if smaller is None:
            raise _nothing_left(name, config, shortage, others if are_others else 0)
        log.warning(
            "the engine of %s ran out of memory%s: its KV cache has %.2f GiB now, not %.2f, "
            "and it decodes at most %d sequences side by side, not %d%s",
            name,
            numbers(shortage),
            smaller.kv_cache_bytes / GIB,
            config.kv_cache_bytes / GIB,
            smaller.sizes.sequences,
            config.sizes.sequences,
            f"; other processes use {others / GIB:.1f} GiB of the device" if are_others else "",
        )
        if not are_others:
            limit = CacheLimit(
                cache_bytes=smaller.kv_cache_bytes,
                has_smallest_sizes=smaller.sizes == smaller.sizes.smallest,
                lowered_at=self._clock(),
            )
            self._files.write(limit, *self._key(config))
        return smaller

    def _too_small(self, name: str, config: EngineConfig, errors: Iterable[str]) -> EngineRefused | None:
        """The refusal of an engine whose KV cache does not hold one sequence. None: its errors are others."""
        if not any(_TOO_SMALL.search(text) for text in errors):
            return None
        return EngineRefused(
            f"The KV cache of {name} ({config.kv_cache_bytes / GIB:.2f} GiB) does not hold one sequence of "
            f"{config.sizes.context} tokens. The operator must lower the model's context or raise "
            f"REGRAFT_{self._setting.upper()}.",
            503,
            code="not_enough_memory",
        )

    def _key(self, config: EngineConfig) -> tuple[str, str, str]:
        # Without the numbers of sequences and tokens: they follow from the memory that was free at a start.
        context = config.sizes.context
        sizes = f"{config.dtype}, rank {config.rank}, context {context}, x {config.tensor_parallel}"
        return config.source, self._device_name(config.device), sizes


def _smaller(config: EngineConfig, least: int) -> EngineConfig | None:
    """The configuration with less memory: first its buffers, which may be larger than a whole cache."""
    if config.sizes != config.sizes.smallest:
        return replace(config, sizes=config.sizes.smallest)
    cache = smaller_cache(config.kv_cache_bytes, least)
    return None if cache is None else replace(config, kv_cache_bytes=cache, sizes=config.sizes.within(cache))


def shortage_of(errors: Iterable[str], device: str) -> Shortage | None:
    """The first out-of-memory error of this device."""
    return next((Shortage.of(text, "sampler") for text in errors if lacking(text, device) == device), None)


def _nothing_left(name: str, config: EngineConfig, shortage: Shortage, others: int) -> EngineRefused:
    message = (
        f"The engine of {name} needs more memory than the device has{numbers(shortage)}, even with the smallest KV "
        f"cache ({config.kv_cache_bytes / GIB:.2f} GiB)."
    )
    if others:
        message += f" Other processes use {others / GIB:.1f} GiB of it; retry later."
        return EngineRefused(message, 503, code="loading", retry_after=RETRY_AFTER)
    message += (
        " The operator must lower the model's context, REGRAFT_INFERENCE_MAX_LORA_RANK, or use more memory or GPUs "
        "(tensor_parallel)."
    )
    return EngineRefused(message, 503, code="not_enough_memory")
