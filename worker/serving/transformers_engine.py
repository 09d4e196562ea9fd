"""Engines over transformers, for machines without vLLM: loading and memory estimates."""

import asyncio
from collections.abc import Sequence

import torch

from core.registry import BaseModelEntry
from core.settings import Settings
from worker.device import select_device
from worker.model import memory, sizing
from worker.model.policy import load_base, read_shape
from worker.serving.continuous import ContinuousEngine
from worker.serving.engine import Engine

# What no formula has: the cache of the answers in flight, buffers, fragments.
MARGIN_BYTES = 512 * 2**20


class TransformersBuilder:
    """Implements worker.serving.engines.Builder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = select_device(settings)
        if settings.torch_threads:
            torch.set_num_threads(settings.torch_threads)

    def bytes_needed(self, entry: BaseModelEntry) -> int:
        shape = read_shape(entry, self.settings.model_cache)
        # Then worker/model/lora.py keeps a second copy.
        reordered = self.device == "cpu" and entry.dtype == "float32"
        copies = shape.plain_linear_bytes if reordered else 0
        return shape.weight_bytes + copies + sizing.decoded_bytes(shape, reordered=reordered) + MARGIN_BYTES

    def bytes_free(self) -> int:
        return memory.available(self.device)

    def bytes_in_all(self) -> int:
        return memory.capacity(self.device)

    async def build(self, name: str, entry: BaseModelEntry, others: Sequence[BaseModelEntry]) -> Engine:
        return await asyncio.to_thread(self._build, name, entry)

    def _build(self, name: str, entry: BaseModelEntry) -> Engine:
        return ContinuousEngine(
            load_base(name, entry, self.settings.model_cache, self.device), tool_parser=entry.tool_parser
        )
