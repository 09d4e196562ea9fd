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
from pathlib import Path
from typing import Any, Protocol

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
from worker.process import KILLED_SECONDS
from worker.sampling.weights import adapter_named
from worker.serving.adapters import SPARED_SECONDS, AdapterDamaged, AdapterFolders, AdapterGone, DiskBudget
from worker.serving.cache_limits import CacheLimits
from worker.serving.engines import EngineRefused
from worker.serving.vllm_builder import VllmBuilder
from worker.serving.vllm_server import write_nothing

log = logging.getLogger(__name__)

ADAPTERS_ON_DISK = 32


class EngineDied(Exception):
    """An engine that has served has ended without a signal."""


class Child(Protocol):
    """A process of the engine, such as a `multiprocessing.Process`."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...
    def kill(self) -> None: ...


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
    serve: Callable[..., bool] = serve,
) -> None:
    """Serve on this socket until SIGTERM or Ctrl-C. Requests in flight are cut: their jobs send them elsewhere.

    An engine that runs out of memory ends this process, and the next one begins with smaller sizes.

    Args:
        builder: plans the memory. Default: that of the settings.
        serve: as worker.engine.server.serve.

    Raises:
        EngineRefused: the model needs more memory than the device has.
        EngineNotStarted: the engine failed for another reason, or ran out of memory and has smaller sizes next time.
        EngineDied: it served, and has ended without a signal.
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

    def serve_with(config: EngineConfig) -> bool:
        os.environ |= environment(config, is_server=True)
        args = arguments(
            fleet_options(config, tool_parser),
            name=name,
            keys=[key for key in (settings.samplers_key, settings.samplers_previous_key) if key],
            adapters=StoredAdapters(folders, nothing),
        )
        return serve(listening, args, connection_options(settings))

    _serve_within(builder.limits, name, config, need.least_cache, serve_with)


def _serve_within(
    limits: CacheLimits, name: str, config: EngineConfig, least: int, serve: Callable[[EngineConfig], bool]
) -> None:
    """Serve until a signal, and lower the limits of an engine that ran out of memory. Raises as `run`.

    It is not started again here: what the failed one has left in this process, such as its signal handlers and the
    registrations of its plugins, is not made for a second one.

    Args:
        least: bytes of the cache of one sequence.
        serve: returns whether a signal has ended it.
    """
    log.info("%s: a KV cache of %.1f GiB", name, config.kv_cache_bytes / GIB)
    with launch.private_folder() as folder:
        os.environ[errors.FILE] = str(errors.file_in(folder))
        try:
            if serve(config):
                return
        except Exception as cause:  # vLLM's says only that it failed
            end_children(multiprocessing.active_children())
            failed = EngineNotStarted(f"its engine failed: {cause!r}", list(errors.read(folder)))
            limits.after(name, config, failed, least)
            raise failed from cause
        end_children(multiprocessing.active_children())
        later = list(errors.read(folder))
    with suppress(EngineRefused):  # the next process may meet more free memory
        limits.lower(name, config, later, least)
    raise EngineDied(f"its engine has died: {later[0] if later else 'the log says why'}")


def end_children(children: Sequence[Child], exit: Callable[[int], object] = os._exit) -> None:
    """Wait until the processes of an engine that failed have ended, and their memory is free. Kill those that remain.

    If one ends at no signal, as inside a hung driver, this process exits with 1: Python's own exit would wait for it.
    """
    for child in children:
        child.join(EXIT_SECONDS)
    remaining = [child for child in children if child.is_alive()]
    for child in remaining:
        child.kill()
    for child in remaining:
        child.join(KILLED_SECONDS)
    if any(child.is_alive() for child in remaining):
        log.error("a process of the engine does not end after SIGKILL, as in a driver that hangs")
        logging.shutdown()
        exit(1)
