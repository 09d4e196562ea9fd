"""Start vLLM's server for a base model, with a KV cache that fits."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from core.registry import BaseModelEntry, Registry, sampler_of
from core.settings import Settings
from core.units import GIB
from worker.device import select_device
from worker.engine.launch import EngineNotStarted
from worker.engine.options import ADAPTERS_AT_ONCE, EngineConfig
from worker.model import capacity, memory, sizing
from worker.model.engine_sizes import EngineSizes
from worker.model.policy import read_shape, source_of
from worker.model.sizing import Serving, Shape
from worker.serving.adapters import folder_of_adapters
from worker.serving.cache_limits import CacheLimits, CacheSetting
from worker.serving.engines import EngineRefused
from worker.serving.vllm_server import VllmServer

log = logging.getLogger(__name__)

SEQUENCES_BESIDE_JOBS = 16  # of the model's whole context, beside jobs on the same GPU


class VllmBuilder:
    """Implements worker.serving.engines.Builder.

    Args:
        shares_device: jobs start on the same device later, so an automatic cache leaves memory for them.
        setting: the name of that which chooses the KV cache.
        limits: default: those in the data folder.
        server: creates an engine that is not started.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        shares_device: bool,
        setting: CacheSetting = "inference_kv_cache_gib",
        limits: CacheLimits | None = None,
        server: Callable[..., VllmServer] = VllmServer,
    ) -> None:
        self.settings = settings
        self.limits = limits or CacheLimits(settings.data_dir / "serving-memory", setting=setting)
        self._server = server
        self._lowered: dict[str, int] = {}  # bytes of the cache with which a model's next engine starts
        self.shares_device = shares_device
        self._setting = setting
        self.cache: float | Literal["auto"] = getattr(settings, setting)
        self.device = select_device(settings)
        self.gpus = max(1, torch.cuda.device_count())

    def bytes_needed(self, entry: BaseModelEntry) -> int:
        """Of each of its GPUs: the first ones of this process, so that `bytes_free` is of one that all models use."""
        shape, need = self.need(entry)
        return need.without_cache + self.least_cache(shape, need)

    def bytes_free(self) -> int:
        return self._usable(memory.available(self.device))

    def bytes_in_all(self) -> int:
        return self._usable(memory.capacity(self.device))

    def _usable(self, of: int) -> int:
        """The bytes of a device that models may use: as in the plan of a job, a part of a GPU stays free."""
        return of - sizing.spared(self.device, of)

    def least_cache(self, shape: Shape, need: Serving) -> int:
        """Return the minimum KV cache in bytes: the operator's setting, or the minimum of vLLM.

        Raises:
            EngineRefused: what is set does not hold one sequence of the model's context.
        """
        if self.cache == "auto":
            on_cpu = self.device == "cpu"
            return max(need.least_cache, sizing.CPU_CACHE_BYTES) if on_cpu else need.least_cache
        if self.cache * GIB < need.least_cache:
            raise EngineRefused(
                f"A sequence of the model's whole context needs a KV cache of {need.least_cache / GIB:.2f} GiB, and "
                f"REGRAFT_{self._setting.upper()} is {self.cache:g}: the operator must raise or unset it.",
                503,
                code="not_enough_memory",
            )
        return int(self.cache * GIB)

    def cache_bytes(
        self, shape: Shape, need: Serving, context: int, free: int, others: Sequence[BaseModelEntry]
    ) -> int:
        """Return the KV cache in bytes of a model to be loaded, if `free` bytes are left."""
        if self.cache != "auto" or self.device == "cpu":
            return self.least_cache(shape, need)
        known = [(entry, found) for entry in others if (found := capacity.shape_of(entry)) is not None]
        rest = [self._serving(found, entry).least for entry, found in known]
        cache = sizing.serving_cache(shape, need, context=context, free=free, others=rest)
        # Jobs take what they find free when they start.
        most = SEQUENCES_BESIDE_JOBS * shape.cache_bytes(context)
        return min(cache, most) if self.shares_device else cache

    def problems(self, registry: Registry) -> Iterator[str]:
        """Yield a sentence for each model that vLLM serves and that does not fit on the GPU of this machine."""
        if self.device != "cuda":
            return
        total = torch.cuda.mem_get_info()[1]
        usable = self._usable(total)
        for name, entry in registry.models.items():
            if (
                name in self.settings.samplers
                or sampler_of(entry, self.settings.sampler, self.device) != "vllm"
            ):
                continue
            shape = capacity.shape_of(entry)
            if shape is not None and (need := self._serving(shape, entry)).least > usable:
                yield (
                    f"{name} at {entry.context} tokens needs {need}; this GPU has {total / GIB:.1f} GiB, of which "
                    f"{usable / GIB:.1f} are for models."
                )

    def need(self, entry: BaseModelEntry) -> tuple[Shape, Serving]:
        """Return what one of the model's GPUs keeps of a token, and what it needs.

        Raises:
            EngineRefused: the model's engine uses more GPUs than this process has.
        """
        if self._gpus_of(entry) > self.gpus:
            raise EngineRefused(
                f"The model uses {entry.tensor_parallel} GPUs (tensor_parallel), and this server has {self.gpus}: the "
                "operator must give it more GPUs.",
                503,
                code="engine_unavailable",
            )
        shape = read_shape(entry, self.settings.model_cache)
        return shape.divided(self._gpus_of(entry)), self._serving(shape, entry)

    def _gpus_of(self, entry: BaseModelEntry) -> int:
        """Among how many GPUs the engine divides the model. A CPU has it whole: its parts would share one memory."""
        return entry.tensor_parallel if self.device == "cuda" else 1

    def _serving(self, shape: Shape, entry: BaseModelEntry) -> Serving:
        return sizing.serving(
            shape,
            context=entry.context,
            slots=ADAPTERS_AT_ONCE,
            rank=self.settings.inference_max_lora_rank,
            device=self.device,
            tensor_parallel=self._gpus_of(entry),
        )

    async def build(self, name: str, entry: BaseModelEntry, others: Sequence[BaseModelEntry]) -> VllmServer:
        """Build an engine. One that runs out of memory is started again with a smaller cache.

        Raises:
            EngineRefused: it ran out of memory with the smallest one, or the cache does not hold one sequence.
            EngineNotStarted: it failed for another reason.
        """
        _, need = await asyncio.to_thread(self.need, entry)
        config = await asyncio.to_thread(self.config_of, entry, others)
        if (cache := self._lowered.pop(name, None)) is not None:
            config = replace(config, kv_cache_bytes=max(need.least_cache, min(config.kv_cache_bytes, cache)))
        while True:
            lower = partial(self.limits.lower, name, config, least=need.least_cache)
            log.info("%s: a KV cache of %.1f GiB", name, config.kv_cache_bytes / GIB)
            adapters = folder_of_adapters(self.settings)
            server = await asyncio.to_thread(
                self._server, name, config, entry, adapters, on_end=partial(self._lower_next, name, lower)
            )
            try:
                await server.start()
            except EngineNotStarted as cause:
                config = await asyncio.to_thread(self.limits.after, name, config, cause, need.least_cache)
            else:
                return server

    def config_of(self, entry: BaseModelEntry, others: Sequence[BaseModelEntry]) -> EngineConfig:
        shape, need = self.need(entry)
        cache = self.cache_bytes(shape, need, entry.context, self.bytes_free(), others)
        sizes = EngineSizes(entry.context)
        if self.device == "cuda":
            is_automatic = self.cache == "auto"
            cache, sizes = sizing.serving_sizes(shape, need, entry.context, cache, is_automatic=is_automatic)
        config = EngineConfig(
            source=str(source_of(entry, self.settings.model_cache)),
            dtype=entry.dtype,
            device=self.device,
            sizes=sizes,
            rank=self.settings.inference_max_lora_rank,
            kv_cache_bytes=cache,
            threads=self.settings.torch_threads,
            tensor_parallel=self._gpus_of(entry),
        )
        return self.limits.within(config, need.least_cache)

    def _lower_next(
        self, name: str, lower: Callable[[Sequence[str]], EngineConfig | None], errors: Sequence[str]
    ) -> None:
        """Lower the cache of the engine that replaces one that died after its start, if it ran out of memory.

        Also where the limit is not stored because other processes use the device: they may still use it then.
        """
        with suppress(EngineRefused):  # the next engine may meet more free memory
            if (smaller := lower(errors)) is not None:
                self._lowered[name] = smaller.kv_cache_bytes
