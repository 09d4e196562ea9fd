"""Serve with vLLM's own HTTP server and our plugin, in this process; vLLM starts its engine below it."""

import asyncio
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVarTuple

from worker import process
from worker.engine.names import PLUGIN
from worker.engine.routes import RequiresKey

_Args = TypeVarTuple("_Args")


class PluginMissing(Exception):
    """This installation does not tell vLLM of our plugin."""


class AdapterResolver(Protocol):
    """vLLM's LoRAResolver."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """Return vLLM's LoRARequest, or None for an unknown name."""
        ...


def arguments(
    options: Mapping[str, Any], *, name: str, keys: Sequence[str], adapters: AdapterResolver
) -> Namespace:
    """vLLM's command line as it parses it.

    Args:
        options: by their names in Python.
        name: of the model in requests.
        keys: all requests must send one of them as a bearer token, except those to OPEN_PATHS.
        adapters: finds the adapter of any other name.

    Raises:
        PluginMissing: vLLM would serve without our routes.
    """
    if not entry_points(group="vllm.endpoint_plugins", name=PLUGIN):
        raise PluginMissing("vLLM does not find the plugin of regraft-server: install regraft-server again")
    with process.importing():
        from vllm.config import StructuredOutputsConfig
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    vars(args).update(options)
    args.structured_outputs_config = StructuredOutputsConfig(**options["structured_outputs_config"])
    args.served_model_name = [name]
    args.api_key, args.middleware = list(keys), [f"{RequiresKey.__module__}.{RequiresKey.__name__}"]
    args.adapters = adapters  # for our plugin
    args.uvicorn_log_level, args.disable_uvicorn_access_log = "warning", True
    validate_parsed_serve_args(args)
    return args


def serve(listening: socket.socket, args: Namespace, connections: Mapping[str, Any]) -> bool:
    """Serve on this socket until SIGTERM or Ctrl-C, or until the engine dies. Requests in flight are cut.

    Connections are refused until the model is loaded. Returns whether a signal has ended it.

    Args:
        connections: of core.connections.connection_options.
    """
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker

    limits = dict(connections)
    os.environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(limits.pop("timeout_keep_alive"))
    if listening.family != socket.AF_UNIX:
        args.host, args.port = listening.getsockname()[:2]
    return ended_by_signal(run_server_worker("", listening, args, log_config=None, **limits))


def ended_by_signal(serving: Coroutine[Any, Any, object]) -> bool:
    """Run a server, and return whether one of the signals that it handles has ended it.

    vLLM's returns in the same way at a signal and when its engine has died.
    """
    import uvloop

    class Loop(uvloop.Loop):
        signaled = False

        def add_signal_handler(self, sig: int, callback: Callable[[*_Args], object], *args: *_Args) -> None:
            def handle() -> None:
                self.signaled = True
                callback(*args)

            super().add_signal_handler(sig, handle)

    loop = Loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(serving)
    return loop.signaled
