"""One member of a rollout fleet: vLLM's own HTTP server for one base model, for many jobs and users at once.

Jobs (worker/sampling/fleet.py) send groups of answers to our own routes, and inference servers
(worker/serving/fleet_model.py) send OpenAI's requests. The name of the model in a request is that of an adapter in the
blob store, which vLLM has this process resolve. The process has no state but caches: clients send the requests of a
lost member to another one.

It is vLLM's own server with our plugin (worker/engine/routes.py).
"""

import asyncio
import logging
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from core.connections import connection_options
from core.registry import BaseModelEntry
from core.settings import Settings
from core.storage.store import blobs_of
from core.tool_parsers import tool_parser_of
from core.units import GIB
from worker.engine import errors, launch
from worker.engine.launch import EXIT_SECONDS, EngineNotStarted
from worker.engine.names import NOTHING
from worker.engine.options import EngineConfig, environment, fleet_options
from worker.engine.server import arguments, serve
from worker.model.policy import read_tokenizer, source_of
from worker.sampling.weights import adapter_named
from worker.serving.adapters import SPARED_SECONDS, AdapterDamaged, AdapterFolders, AdapterGone, DiskBudget
from worker.serving.cache_limits import CacheLimits
from worker.serving.engines import EngineRefused
from worker.serving.vllm_builder import VllmBuilder
from worker.serving.vllm_server import write_nothing

log = logging.getLogger(__name__)

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


def run(
    settings: Settings,
    name: str,
    entry: BaseModelEntry,
    listening: socket.socket,
    *,
    builder: VllmBuilder | None = None,
    serve: Callable[..., None] = serve,
) -> None:
    """Serve on this socket until SIGTERM or Ctrl-C. Requests in flight are cut: their jobs send them elsewhere.

    An engine that runs out of memory when it starts is started again with smaller sizes, as in an inference server. One
    that does so later ends this process, and the next one begins with them.

    Args:
        builder: plans the memory. Default: that of the settings.
        serve: as worker.engine.server.serve.

    Raises:
        EngineRefused: the model needs more memory than the device has.
        EngineNotStarted: the engine failed for another reason.
    """
    if builder is None:
        builder = VllmBuilder(settings, shares_device=False, setting="kv_cache_gib")
    _, need = builder.need(entry)
    config = builder.config_of(entry, [])
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
    tool_parser = tool_parser_of(entry.tool_parser, tokenizer.chat_template)

    def serve_with(config: EngineConfig) -> None:
        os.environ |= environment(config, is_server=True)
        args = arguments(
            fleet_options(config, tool_parser),
            name=name,
            keys=[key for key in (settings.samplers_key, settings.samplers_previous_key) if key],
            adapters=StoredAdapters(folders, nothing),
        )
        serve(listening, args, connection_options(settings))

    _serve_within(builder.limits, name, config, need.least_cache, serve_with)


def _serve_within(
    limits: CacheLimits, name: str, config: EngineConfig, least: int, serve: Callable[[EngineConfig], None]
) -> None:
    """Serve until a signal. Raises as `run`.

    Args:
        least: bytes of the cache of one sequence.
    """
    with launch.private_folder() as folder:
        while True:
            log.info("%s: a KV cache of %.1f GiB", name, config.kv_cache_bytes / GIB)
            try:
                later = _errors_while(partial(serve, config), folder)
            except EngineNotStarted as cause:
                config = limits.after(name, config, cause, least)
            else:
                with suppress(EngineRefused):  # the next process may meet more free memory
                    limits.lower(name, config, later, least)
                return


def _errors_while(serving: Callable[[], None], folder: Path) -> Sequence[str]:
    """The errors of an engine that has started and then died, oldest first, once its processes have ended.

    Raises:
        EngineNotStarted: it failed before it served, with its errors.
    """
    errors.file_in(folder).unlink(missing_ok=True)
    os.environ[errors.FILE] = str(errors.file_in(folder))
    try:
        serving()
    except Exception as cause:  # vLLM's says only that it failed
        _wait_for_children()
        raise EngineNotStarted(f"its engine failed: {cause!r}", list(errors.read(folder))) from cause
    _wait_for_children()
    return list(errors.read(folder))


def _wait_for_children() -> None:
    """Until the processes of an engine that failed have ended, and their memory is free."""
    for child in multiprocessing.active_children():
        child.join(EXIT_SECONDS)
