"""vLLM's own HTTP application over one engine: of the inference server (vllm_server.py), and of a rollout fleet.

These calls are into what vLLM does not promise to keep; tests/worker/test_vllm_server.py and test_fleet.py run them.
"""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI


@asynccontextmanager
async def vllm_app(
    options: Mapping[str, Any], *, name: str, key: str | None, adapters: Any
) -> AsyncIterator[tuple[FastAPI, Any]]:
    """Yield the application and vLLM's engine client, which stops when the context ends.

    Args:
        options: Command-line options of vLLM, by their names in Python.
        name: The model's name in requests.
        key: What requests must send as a bearer token; None: nothing.
        adapters: A LoRAResolver, which finds the adapter of any other name.
    """
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.lora.resolver import LoRAResolverRegistry
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for option, value in options.items():
        setattr(args, option, value)
    args.structured_outputs_config = StructuredOutputsConfig(**args.structured_outputs_config)
    args.served_model_name, args.api_key = [name], [key] if key else None
    validate_parsed_serve_args(args)
    LoRAResolverRegistry.register_resolver("regraft", adapters)
    # In a thread: it blocks for as long as vLLM takes to start, and other models answer meanwhile.
    client = await asyncio.to_thread(
        AsyncLLM.from_engine_args,
        AsyncEngineArgs.from_cli_args(args),
        usage_context=UsageContext.OPENAI_API_SERVER,
    )
    try:
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        yield app, client
    finally:
        # vLLM's processes exit slowly and have no state to save, so they are killed after a short timeout.
        await asyncio.to_thread(client.shutdown, timeout=2.0)
