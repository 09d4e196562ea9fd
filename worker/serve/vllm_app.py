"""vLLM's own HTTP application over one engine: of the inference server (vllm_server.py), and of a rollout fleet.

These calls are into what vLLM does not promise to keep; tests/worker/test_vllm_server.py and test_fleet.py run them.
"""

import asyncio
import secrets
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from core.special_tokens import Chat, Tools
from worker.model.chat_tokens import content_tokens

# Of a process whose vLLM answers the requests of vllm_server.py; before vLLM is imported.
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # or vLLM resolves no adapter
    # A required call is held to the schema of its arguments by llguidance, which has checked the schema. vLLM's
    # structural tags need xgrammar, which the API does not check schemas with.
    "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
}
OPEN_PATHS = frozenset({"/health", "/metrics"})


class RequiresKey:
    """vLLM's middleware that rejects requests without its key, except for OPEN_PATHS.

    vLLM itself checks the key for paths below /v1 and /inference only: `/invocations`, which generates from any adapter
    whose name `/metrics` shows, and `/scale_elastic_ep` would be open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or _has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)


def _has_key(scope: Scope) -> bool:
    sent = Headers(scope=scope).get("authorization", "")
    return any(
        secrets.compare_digest(sent.encode(), f"Bearer {key}".encode())
        for key in scope["app"].state.args.api_key
    )


@asynccontextmanager
async def vllm_app(
    options: Mapping[str, Any], *, name: str, key: str | None, adapters: Any
) -> AsyncIterator[tuple[FastAPI, Any]]:
    """Yield the application and vLLM's engine client, which stops when the context ends.

    Args:
        options: Command-line options of vLLM, by their names in Python.
        name: The model's name in requests.
        key: What all requests must send as a bearer token, except those to OPEN_PATHS; None: nothing.
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

    import_module("worker.serve.thoughts")  # registers itself with vLLM in this process too
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for option, value in options.items():
        setattr(args, option, value)
    args.structured_outputs_config = StructuredOutputsConfig(**args.structured_outputs_config)
    args.served_model_name = [name]
    if key:
        args.api_key, args.middleware = [key], [f"{RequiresKey.__module__}.{RequiresKey.__name__}"]
    validate_parsed_serve_args(args)
    LoRAResolverRegistry.register_resolver("regraft", adapters)
    # In a thread: it blocks for as long as vLLM takes to start, and other models answer meanwhile.
    client = await asyncio.to_thread(
        AsyncLLM.from_engine_args,
        AsyncEngineArgs.from_cli_args(args),
        usage_context=UsageContext.OPENAI_API_SERVER,
    )
    try:
        _tokenize_content_as_text(client.renderer)
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        yield app, client
    finally:
        # vLLM's processes exit slowly and have no state to save, so they are killed after a short timeout.
        await asyncio.to_thread(client.shutdown, timeout=2.0)


def _tokenize_content_as_text(renderer: Any) -> None:
    """Have vLLM's server tokenize chats as jobs do: texts of special tokens in content are text."""
    from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
    from vllm.utils.async_utils import make_async

    if not isinstance(renderer, HfRenderer):
        return  # vLLM's renderers of other kinds encode content apart from control tokens

    def apply(
        model_config: Any,
        tokenizer: Any,
        conversation: Chat,
        *,
        tools: Tools = None,
        chat_template: str | None = None,
        **arguments: Any,
    ) -> Any:
        def render(chat: Chat, tools: Tools) -> str:
            return str(safe_apply_chat_template(model_config, tokenizer, chat, tools=tools, **as_text))

        as_text = arguments | {"chat_template": chat_template, "tokenize": False}
        ids = content_tokens(tokenizer, chat_template, conversation, tools, render)
        return render(conversation, tools) if ids is None else ids

    renderer._apply_chat_template_async = make_async(apply, executor=renderer._executor)
