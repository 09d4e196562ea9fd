"""Engines over transformers, for machines without vLLM: how they are loaded, and what they take of memory."""

import asyncio

import torch

from core.registry import BaseModelEntry
from core.settings import Settings
from worker import memory
from worker.continuous import ContinuousEngine
from worker.engine import Engine
from worker.policy import DTYPES, load_base, source_of

# What no formula has: the cache of the answers in flight, buffers, fragments.
MARGIN_BYTES = 512 * 2**20


class TransformersBuilder:
    """Implements worker.engines.Builder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if settings.torch_threads:
            torch.set_num_threads(settings.torch_threads)

    def bytes_needed(self, entry: BaseModelEntry) -> int:
        from transformers import AutoConfig

        source = source_of(entry, self.settings.model_cache)
        shape = memory.shape_of(AutoConfig.from_pretrained(source), DTYPES[entry.dtype])
        packed = self.device == "cpu" and entry.dtype == "float32"  # a second copy, see worker/lora.py
        copies = shape.parameters + (shape.linear_parameters if packed else 0)
        return copies * shape.bytes_each + MARGIN_BYTES

    def bytes_free(self) -> int:
        return memory.available(self.device)

    async def build(self, name: str, entry: BaseModelEntry) -> Engine:
        return await asyncio.to_thread(self._build, name, entry)

    def _build(self, name: str, entry: BaseModelEntry) -> Engine:
        return ContinuousEngine(load_base(name, entry, self.settings.model_cache, self.device))
