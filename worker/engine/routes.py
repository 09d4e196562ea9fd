"""Our plugin for vLLM's HTTP server, which loads it by an entry point of pyproject.toml: our routes, and the key.

It reads what server.py has put among vLLM's arguments.
"""

import os
import secrets
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from core.special_tokens import Chat, Tools
from worker.engine.names import PLUGIN
from worker.engine.protocol import (
    FACTS,
    HEALTH,
    OTHER_PROTOCOL,
    PROTOCOL,
    PROTOCOL_HEADER,
    SAMPLE,
    FactsQuestion,
    ServerInfo,
)
from worker.engine.sampling import facts_of, sample

OPEN_PATHS = frozenset({HEALTH, "/metrics"})


class RequiresKey:
    """vLLM's middleware that rejects requests without its key or of another protocol, except for OPEN_PATHS.

    vLLM itself checks the key for paths below /v1 and /inference only: `/invocations`, which generates from any adapter
    whose name `/metrics` shows, and `/scale_elastic_ep` would be open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
        elif _has_key(scope):
            theirs = Headers(scope=scope).get(PROTOCOL_HEADER, str(PROTOCOL))
            app = self.app if theirs == str(PROTOCOL) else _other_protocol(theirs)
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)


def _other_protocol(theirs: str) -> ASGIApp:
    error = f"This sampler speaks protocol {PROTOCOL}, and its client {theirs[:20]}."
    return JSONResponse({"error": error}, OTHER_PROTOCOL)


def _has_key(scope: Scope) -> bool:
    sent = Headers(scope=scope).get("authorization", "")
    return any(
        secrets.compare_digest(sent.encode(), f"Bearer {key}".encode())
        for key in scope["app"].state.args.api_key
    )


class RequestsOnDisk(dict[str, Any]):
    """vLLM's adapters by name, without those whose folders have been evicted: vLLM then resolves them again.

    vLLM forgets none, and its engine ends at an adapter that it has to load again from a folder that is gone.
    """

    def __contains__(self, name: object) -> bool:
        """Also marks the folder as recently used, so that it is evicted after others."""
        if not super().__contains__(name):
            return False
        now = time.time_ns()
        try:
            os.utime(Path(self[str(name)].lora_path), ns=(now, now))
        except FileNotFoundError:
            return False
        return True


class Routes:
    """Implements vLLM's EndpointPlugin."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from vllm.lora.resolver import LoRAResolverRegistry

        LoRAResolverRegistry.register_resolver(PLUGIN, app.state.args.adapters)  # of the process
        app.add_api_route(FACTS, self.facts, methods=["POST"])
        app.add_api_route(SAMPLE, sample, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        self._engine, self._args = engine_client, args

        async def find_adapter(name: str) -> Any:
            adapter = await state.openai_serving_models.resolve_lora(name)
            if not isinstance(adapter, ErrorResponse):
                return adapter
            # vLLM says 400 also for an engine that is stopping. The rank and the model were compared before (FACTS), so
            # the adapter is right, and another member can load it.
            return JSONResponse(adapter.model_dump(), 503, {"retry-after": "5"})

        state.find_adapter = find_adapter
        state.openai_serving_models.lora_requests = RequestsOnDisk()
        _tokenize_content_as_text(engine_client.renderer)

    async def facts(self, question: FactsQuestion) -> ServerInfo:
        return await facts_of(self._engine, self._args, question)


def _tokenize_content_as_text(renderer: Any) -> None:
    """Have vLLM's server tokenize chats as jobs do: texts of special tokens in content are text, and ids of calls are
    those that the template accepts.
    """
    from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
    from vllm.utils.async_utils import make_async

    from core.template_messages import with_ids_for
    from worker.model.chat_tokens import content_tokens

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

        conversation = with_ids_for(chat_template or tokenizer.chat_template, conversation)
        as_text = arguments | {"chat_template": chat_template, "tokenize": False}
        ids = content_tokens(tokenizer, chat_template, conversation, tools, render)
        return render(conversation, tools) if ids is None else ids

    renderer._apply_chat_template_async = make_async(apply, executor=renderer._executor)
