"""One member of a rollout fleet: vLLM's own HTTP server for one base model, for many jobs and users at once.

Jobs (worker/sampling/fleet.py) send groups of answers to our own routes, and inference servers
(worker/serving/fleet_model.py) send OpenAI's requests. The name of the model in a request is that of an adapter in the
blob store, which vLLM has this process resolve. The process has no state but caches: clients send the requests of a
lost member to another one.

It is vLLM's own server with our plugin (worker/engine/routes.py).
"""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

from core.connections import connection_options
from core.registry import BaseModelEntry, Device
from core.settings import Settings
from core.storage.store import blobs_of
from core.tool_parsers import tool_parser_of
from core.units import GIB
from worker.device import select_device
from worker.engine.names import NOTHING
from worker.engine.options import EngineConfig, environment, fleet_options
from worker.engine.server import arguments, serve
from worker.model.engine_sizes import BATCHED_TOKENS, SEQUENCES, EngineSizes
from worker.model.policy import read_tokenizer, source_of
from worker.model.sizing import CPU_CACHE_BYTES
from worker.sampling.weights import adapter_named
from worker.serving.adapters import SPARED_SECONDS, AdapterDamaged, AdapterFolders, AdapterGone, DiskBudget
from worker.serving.vllm_server import write_nothing

ADAPTERS_ON_DISK = 32


class StoredAdapters:
    """Implements vLLM's LoRAResolver: an adapter's name has its prefix in the blob store and its manifest's hash."""

    def __init__(self, folders: AdapterFolders, nothing: Path) -> None:
        """`nothing` is a folder with an adapter that adds 0."""
        self.folders, self.nothing = folders, nothing

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """Return vLLM's LoRARequest. None: it is not the name of an adapter, or its files have been deleted."""
        from vllm.lora.request import LoRARequest

        if lora_name == NOTHING:
            return LoRARequest(lora_name, 1, str(self.nothing))
        adapter = adapter_named(lora_name)
        if adapter is None:
            return None
        try:
            folder = await asyncio.to_thread(self.folders.folder, adapter)
        except (AdapterGone, AdapterDamaged):
            return None
        return LoRARequest(lora_name, 1, str(folder))  # vLLM replaces the number


def config_of(entry: BaseModelEntry, settings: Settings) -> EngineConfig:
    source = source_of(entry, settings.model_cache)
    device = select_device(settings)
    cache = settings.kv_cache_gib
    # On a GPU, 0 has vLLM take what it finds free.
    automatic = CPU_CACHE_BYTES if device == "cpu" else 0
    return EngineConfig(
        source=str(source),
        dtype=entry.dtype,
        device=device,
        sizes=_sizes_of(entry.context, device, has_exact_cache=cache != "auto"),
        rank=settings.inference_max_lora_rank,
        kv_cache_bytes=automatic if cache == "auto" else int(cache * GIB),
        threads=settings.torch_threads,
        tensor_parallel=entry.tensor_parallel,
    )


def _sizes_of(context: int, device: Device, *, has_exact_cache: bool) -> EngineSizes:
    """On a GPU vLLM takes what its sizes leave as its cache, unless that is exact."""
    if device == "cpu":
        return EngineSizes(context)
    return EngineSizes(context, SEQUENCES[0] if has_exact_cache else SEQUENCES[-1], BATCHED_TOKENS[-1])


def run(settings: Settings, name: str, entry: BaseModelEntry, listening: socket.socket) -> None:
    """Serve on this socket until SIGTERM or Ctrl-C. Requests in flight are cut: their jobs send them elsewhere."""
    config = config_of(entry, settings)
    os.environ |= environment(config, is_server=True)
    cache = (settings.data_dir / "sampler").resolve()
    folders = AdapterFolders(
        blobs_of(settings),
        cache,
        max_folders=ADAPTERS_ON_DISK,
        spared_seconds=SPARED_SECONDS,
        budget=DiskBudget(settings.adapter_cache_bytes),
    )
    nothing = settings.data_dir.resolve() / "no-adapter"
    write_nothing(config.source, nothing)
    tokenizer = read_tokenizer(entry, source_of(entry, settings.model_cache))
    args = arguments(
        fleet_options(config, tool_parser_of(entry.tool_parser, tokenizer.chat_template)),
        name=name,
        keys=[key for key in (settings.samplers_key, settings.samplers_previous_key) if key],
        adapters=StoredAdapters(folders, nothing),
    )
    serve(listening, args, connection_options(settings))
