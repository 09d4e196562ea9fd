"""One member of a rollout fleet: vLLM's own HTTP server for one base model, for many jobs and users at once.

Jobs (fleet.py) send tokens and vLLM's sampling parameters to its route `/inference/v1/generate`, and inference servers
(worker/serve/fleet_model.py) send OpenAI's requests. The name of the model in a request is that of an adapter in the
blob store, which vLLM has this process resolve. The process has no state but caches: clients send the requests of a
lost member to another one.

The calls into what vLLM does not promise to keep are in engine.py, extension.py, `serve` and worker/serve/vllm_app.py;
tests/worker/vllm_contract.py names those of the first two, and tests/worker/test_fleet.py runs the others.
"""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from core.connections import connection_options
from core.registry import BaseModelEntry
from core.settings import Settings
from core.storage.store import blobs_of
from worker.model.policy import read_tokenizer, source_of
from worker.model.sizing import CPU_CACHE_BYTES, GIB
from worker.rollout.samplers import engine, extension
from worker.rollout.samplers.fleet import NOTHING, adapter_named
from worker.rollout.samplers.fleet_members import FACTS, Facts
from worker.rollout.samplers.wire import EngineConfig
from worker.serve.adapters import AdapterDamaged, AdapterFolders, AdapterGone
from worker.serve.vllm_app import ENVIRONMENT, vllm_app
from worker.serve.vllm_server import server_options, tool_parser_of, write_nothing

ADAPTERS_AT_ONCE = 8  # in one batch, each in a slot of the device's memory
ADAPTERS_IN_MEMORY = 16  # of the machine
ADAPTERS_ON_DISK = 32
GPU_MEMORY_UTILIZATION = 0.9


class Question(BaseModel):
    """The question of a job before it samples at a member."""

    tensors: list[str]  # of its adapter, by PEFT's names


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


class RequestsOnDisk(dict[str, Any]):
    """vLLM's adapters by name, without those whose folders have been evicted: vLLM then resolves them again.

    vLLM forgets none, and its engine ends at an adapter that it has to load again from a folder that is gone.
    """

    def __init__(self, folders: AdapterFolders) -> None:
        super().__init__()
        self.folders = folders

    def __contains__(self, name: object) -> bool:
        """Also marks the folder as recently used."""
        if not super().__contains__(name):
            return False
        adapter = adapter_named(str(name))
        return adapter is None or self.folders.found(adapter) is not None


def config_of(entry: BaseModelEntry, settings: Settings) -> EngineConfig:
    source = source_of(entry, settings.model_cache)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = settings.kv_cache_gib
    # On a GPU, 0 has vLLM take what it finds free.
    automatic = CPU_CACHE_BYTES if device == "cpu" else 0
    return EngineConfig(
        source=str(source),
        dtype=entry.dtype,
        device=device,
        context=entry.context,
        rank=settings.inference_max_lora_rank,
        kv_cache_bytes=automatic if cache == "auto" else int(cache * GIB),
        threads=settings.torch_threads,
        tensor_parallel=entry.tensor_parallel,
    )


def options(config: EngineConfig, tool_parser: str | None) -> dict[str, Any]:
    """vLLM's options: a job's own engine's, with the adapters of many jobs, on GPUs that no trainer uses."""
    return {
        **engine.engine_options(config),
        **engine.worker_options(config),
        **server_options(tool_parser),
        "enable_scale_out": True,  # the routes for tokens
        "max_loras": ADAPTERS_AT_ONCE,
        "max_cpu_loras": ADAPTERS_IN_MEMORY,
        "kv_cache_memory_bytes": config.kv_cache_bytes or None,
        "gpu_memory_utilization": 0.01 if config.kv_cache_bytes else GPU_MEMORY_UTILIZATION,
    }


def run(settings: Settings, name: str, entry: BaseModelEntry, listening: socket.socket) -> None:
    """Serve on this socket until SIGTERM or Ctrl-C. Requests in flight are cut: their jobs send them elsewhere."""
    config = config_of(entry, settings)
    os.environ |= engine.environment(config) | {
        extension.SAMPLER: str(os.getpid()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        **ENVIRONMENT,
    }
    folders = AdapterFolders(
        blobs_of(settings), (settings.data_dir / "sampler").resolve(), kept=ADAPTERS_ON_DISK
    )
    facts = Facts(
        model=name,
        dtype=config.dtype,
        context=config.context,
        max_lora_rank=config.rank,
        left_out=[],
    )
    nothing = settings.data_dir.resolve() / "no-adapter"
    write_nothing(config.source, nothing)
    adapters = StoredAdapters(folders, nothing)
    tokenizer = read_tokenizer(entry, source_of(entry, settings.model_cache))
    chosen = options(config, tool_parser_of(entry, tokenizer))
    asyncio.run(serve(chosen, facts, adapters, settings, listening))


async def serve(
    options: dict[str, Any],
    facts: Facts,
    adapters: StoredAdapters,
    settings: Settings,
    listening: socket.socket,
) -> None:
    from vllm.entrypoints.launchers.launcher import serve_http

    opening = vllm_app(options, name=facts.model, key=settings.samplers_key, adapters=adapters)
    async with opening as (app, client):

        async def answer(question: Question) -> Facts:
            names, *_ = await client.collective_rpc(
                "policy_tensors_without_layer", args=(tuple(question.tensors),)
            )
            return facts.model_copy(update={"left_out": names})

        app.state.openai_serving_models.lora_requests = RequestsOnDisk(adapters.folders)
        app.add_api_route(FACTS, answer, methods=["POST"])
        host, port = listening.getsockname()[:2]
        ended = await serve_http(
            app,
            sock=listening,
            host=host,
            port=port,
            log_config=None,
            log_level="warning",
            access_log=False,
            **connection_options(settings),
        )
    await ended
