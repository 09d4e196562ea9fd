"""A request that vLLM's HTTP server answers, in another process, and its response in the shape of our API."""

import json
import logging
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

import httpx
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from core.asgi import END_OF_EVENTS, UNBUFFERED, json_event, received_data, until_gone
from core.chat import InternalChat, InternalCompletion, envelope, token_usage
from worker.serving.serving_metrics import Result, Tally

log = logging.getLogger(__name__)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RETRY_AFTER_SECONDS = 5
# vLLM's own fields beside those of OpenAI's API.
_OF_BODY = (
    "prompt_logprobs",
    "prompt_token_ids",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
)
_OF_CHOICE = ("stop_reason", "token_ids", "routed_experts", "prompt_token_ids", "prompt_logprobs")
# How vLLM names what is too long.
_LENGTH_PARAMS = ("input_tokens", "input_text")
_SAID = ("text", "content", "reasoning_content", "tool_calls")


class UpstreamFailed(Exception):
    """No server has begun to answer. The message is for the client."""


class VllmUpstream(Protocol):
    """Servers of one model, any of which may answer."""

    def open(self, path: str, body: bytes) -> AbstractAsyncContextManager[httpx.Response]:
        """Post a body of JSON. The context has the response: of events the head, and else all of it.

        Raises:
            UpstreamFailed: none has answered.
        """
        ...


def is_stream(response: httpx.Response) -> bool:
    return str(response.headers.get("content-type", "")).startswith("text/event-stream")


class Proxied(Response):
    """Whole or as events, read as fast as the client reads them. A client that leaves aborts the request."""

    def __init__(
        self,
        upstream: VllmUpstream,
        path: str,
        body: dict[str, Any],
        request: InternalChat | InternalCompletion,
    ) -> None:
        super().__init__()
        self.upstream, self.path, self.request = upstream, path, request
        self.sent = json.dumps(body, ensure_ascii=False).encode()
        options = request.stream_options
        self.wants_usage = bool(options and options.include_usage)
        self.open_resources = AsyncExitStack()
        self.tally: Tally | None = None
        self.result: Result = "left"

    def hold(self, open_resources: AsyncExitStack, tally: Tally) -> "Proxied":
        """Close these with the response."""
        self.open_resources, self.tally = open_resources, tally
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._answer(scope, receive, send))
        finally:
            await self.open_resources.aclose()
            if self.tally is not None:
                self.tally.ended(self.result)
            scope["app"].state.last_use = time.monotonic()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self.upstream.open(self.path, self.sent) as response:
                if response.status_code == 200 and is_stream(response):
                    events = StreamingResponse(
                        self._events(response), media_type="text/event-stream", headers=UNBUFFERED
                    )
                    await events.stream_response(send)
                else:
                    await JSONResponse(self._content(response), response.status_code)(scope, receive, send)
        except UpstreamFailed as cause:
            self.result = "failed"
            headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
            await JSONResponse(envelope(503, str(cause)), 503, headers)(scope, receive, send)

    def _content(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code == 200:
            self.result = "answered"
            return self.full_response(response.json())
        self.result = "failed" if response.status_code >= 500 else "refused"
        return error_of(response.status_code, response.content)

    async def _events(self, response: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for events in received_data(response.aiter_raw()):
                if body := b"".join(map(self._converted, events)):
                    yield body
        except httpx.TransportError as cause:
            log.warning("an answer of %s was cut: %r", self.request.served.base_model, cause)
            self.result = "failed"
            yield json_event(envelope(500, "the model failed before the end of its answer"))

    def _converted(self, data: bytes) -> bytes:
        """The event with this data in our shape; b"": none for the client."""
        if data == b"[DONE]":
            if self.result == "left":
                self.result = "answered"
            return END_OF_EVENTS
        part = json.loads(data)
        if "error" in part:
            self.result = "failed"
            status = part["error"].get("code")
            return json_event(error_of(status if isinstance(status, int) else 500, data))
        changed = self.chunk(part)
        return b"" if changed is None else json_event(changed)

    def count(self, usage: MutableMapping[str, Any] | None) -> None:
        """Take over the token counts so far."""
        if usage is not None and self.tally is not None:
            self.tally.counted(usage["prompt_tokens"], usage.get("completion_tokens") or 0)

    def full_response(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A whole answer of vLLM's in our shape."""
        timing = answer.get("metrics") or {}
        if self.tally is not None and (first := timing.get("time_to_first_token_ms")) is not None:
            self.tally.first_token_after(first / 1000)
        self.count(answer["usage"])
        answer["usage"] = usage_of(answer["usage"])
        for choice in answer["choices"]:
            if (message := choice.get("message")) is not None:
                choice["message"] = message_of(message)
        return self._without_vllms(answer)

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """A part of a stream in our shape; None: the client did not ask for it."""
        usage = chunk.pop("usage", None)
        self.count(usage)
        if not chunk["choices"]:
            return {**self._without_vllms(chunk), "usage": usage_of(usage)} if self.wants_usage else None
        for choice in chunk["choices"]:
            if (delta := choice.get("delta")) is not None:
                choice["delta"] = delta_of(delta)
            said = choice.get("delta") or choice
            if self.tally is not None and any(said.get(name) for name in _SAID):
                self.tally.first_token_after(None)
        return self._without_vllms(chunk) | ({"usage": None} if self.wants_usage else {})

    def _without_vllms(self, body: dict[str, Any]) -> dict[str, Any]:
        for choice in body["choices"]:
            if isinstance(choice.get("stop_reason"), int) and (choice.get("logprobs") or {}).get("content"):
                choice["logprobs"][
                    "content"
                ].pop()  # of the token that ended the answer, which is not in its text
            for name in _OF_CHOICE:
                choice.pop(name, None)
        kept = {name: value for name, value in body.items() if name not in _OF_BODY}
        return kept | {"model": self.request.model}


def message_of(message: dict[str, Any]) -> dict[str, Any]:
    """vLLM's message with our name for the thought, and the fields that OpenAI's messages always have."""
    content, calls, thought = message.get("content"), message.get("tool_calls"), message.get("reasoning")
    return {
        "role": "assistant",
        "content": (content or None) if calls else (content or ""),
        "refusal": None,
        "annotations": [],
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thought} if thought else {}),
    }


def delta_of(delta: dict[str, Any]) -> dict[str, Any]:
    """As `message_of`, for a part of a stream."""
    thought = delta.pop("reasoning", None)
    if not delta.get("tool_calls"):
        delta.pop("tool_calls", None)
    if "content" in delta and delta["content"] is None and (thought or delta.get("tool_calls")):
        del delta["content"]
    return delta | ({"reasoning_content": thought} if thought else {})


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """vLLM's token counts with the details that OpenAI's always have."""
    read, written = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return token_usage(
        usage["prompt_tokens"],
        usage.get("completion_tokens") or 0,
        cached=read.get("cached_tokens") or 0,
        reasoning=written.get("reasoning_tokens") or 0,
    )


def error_of(status: int, content: bytes) -> dict[str, Any]:
    """An error of vLLM's in our shape."""
    try:
        error = json.loads(content)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, TypeError, LookupError):
        message, param = f"the model failed with status {status}", None
    if param in _LENGTH_PARAMS:
        return envelope(status, message, "context_length_exceeded")
    if status < 500 and (param in InternalChat.model_fields or param in InternalCompletion.model_fields):
        return envelope(status, message, "invalid_value", param)
    return envelope(status, message)
