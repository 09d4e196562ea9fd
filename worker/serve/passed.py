"""A request passed on to vLLM's HTTP application in this process, and its response in the shape of our API."""

import json
import logging
import time
from collections.abc import Iterator, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.chat import InternalChat, InternalCompletion, envelope
from core.event_stream import UNBUFFERED
from worker.serve.serving_metrics import Result, Tally

log = logging.getLogger(__name__)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
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


class Passed(Response):
    """Whole or as events, read as fast as the client reads them. A client that leaves aborts the request."""

    def __init__(
        self, app: ASGIApp, path: str, body: dict[str, Any], request: InternalChat | InternalCompletion
    ) -> None:
        super().__init__()
        self.app, self.path, self.request = app, path, request
        self.sent = json.dumps(body, ensure_ascii=False).encode()
        options = request.stream_options
        self.wants_usage = bool(options and options.include_usage)
        self.held_open = AsyncExitStack()
        self.tally: Tally | None = None
        self.result: Result = "left"

    def hold(self, held_open: AsyncExitStack, tally: Tally) -> "Passed":
        """Close these with the response."""
        self.held_open, self.tally = held_open, tally
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._pass_on(scope, receive, send)
        finally:
            await self.held_open.aclose()
            if self.tally is not None:
                self.tally.ended(self.result)
            scope["app"].state.last_use = time.monotonic()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        unsent = [self.sent]

        async def received() -> Message:
            if unsent:
                return {"type": "http.request", "body": unsent.pop(), "more_body": False}
            return await receive()

        writer = _Writer(self, scope, receive, send)
        inner = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self.sent)).encode()),
            ],
            "client": scope.get("client"),
            "server": scope.get("server"),
        }
        try:
            await self.app(inner, received, writer)
        except Exception as cause:
            log.exception("vLLM's server failed")
            await writer.failed(f"the model failed: {cause}")

    def count(self, usage: MutableMapping[str, Any] | None) -> None:
        """Take over the token counts so far."""
        if usage is not None and self.tally is not None:
            self.tally.counted(usage["prompt_tokens"], usage.get("completion_tokens") or 0)

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
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
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage.get("completion_tokens") or 0,
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": read.get("cached_tokens") or 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": written.get("reasoning_tokens") or 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


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


class _Writer:
    """Receives vLLM's response as an ASGI application sends it."""

    def __init__(self, passed: Passed, scope: Scope, receive: Receive, send: Send) -> None:
        self.passed, self.scope, self.receive, self.send = passed, scope, receive, send
        self.status = 0
        self.is_stream = self.is_over = False
        self.unread = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.is_stream = self.status == 200 and kind.startswith(b"text/event-stream")
            if self.is_stream:
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    *((name.encode(), value.encode()) for name, value in UNBUFFERED.items()),
                ]
                await self.send({"type": "http.response.start", "status": 200, "headers": headers})
            return
        self.unread += message.get("body", b"")
        more = bool(message.get("more_body"))
        if self.is_stream:
            *events, self.unread = self.unread.split(b"\n\n")
            body = b"".join(self._converted(events))
            if body or not more:
                await self.send({"type": "http.response.body", "body": body, "more_body": more})
            self.is_over = not more
        elif not more:
            await self._answer_whole()

    async def failed(self, why: str) -> None:
        """The application raised."""
        if self.is_over:
            return
        self.passed.result = "failed"
        error = envelope(500, why)
        if self.is_stream:
            body = b"data: " + json.dumps(error).encode() + b"\n\n"
            await self.send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            await JSONResponse(error, 500)(self.scope, self.receive, self.send)

    async def _answer_whole(self) -> None:
        self.is_over = True
        if self.status == 200:
            content = self.passed.whole(json.loads(self.unread))
            self.passed.result = "answered"
        else:
            content = error_of(self.status, self.unread)
            self.passed.result = "failed" if self.status >= 500 else "refused"
        await JSONResponse(content, self.status)(self.scope, self.receive, self.send)

    def _converted(self, events: list[bytes]) -> Iterator[bytes]:
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                if self.passed.result == "left":
                    self.passed.result = "answered"
                yield event + b"\n\n"
                continue
            if not event.startswith(b"data: "):
                continue
            part = json.loads(data)
            changed: dict[str, Any] | None
            if "error" in part:
                self.passed.result = "failed"
                status = part["error"].get("code")
                changed = error_of(status if isinstance(status, int) else 500, data)
            else:
                changed = self.passed.chunk(part)
            if changed is not None:
                yield (
                    b"data: "
                    + json.dumps(changed, ensure_ascii=False, separators=(",", ":")).encode()
                    + b"\n\n"
                )
