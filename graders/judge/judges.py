"""Judge models: the protocol, and its implementation for OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import httpx

from core.outbound.http import trusted_client
from graders.calls import CallRetryPolicy, NoAnswer, RateLimit, ServerAway, post, quoted_reply
from graders.deadline import standing_still
from graders.judge.usage import TokenLedger, token_usage
from graders.template import quoted
from graders.types import ErrorKind, TokenUsage

Message = Mapping[str, Any]
"""A message of the chat completions API."""


@dataclass(frozen=True)
class JudgeReply:
    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    refusal: str | None = None
    finish_reason: str = "stop"

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


REMEMBERED_REPLIES = 4096

_ASKS_AGAIN: ContextVar[bool] = ContextVar("asks_again", default=False)


@contextmanager
def asking_again() -> Iterator[None]:
    """Send requests whose replies are remembered once more: the judge may have changed since."""
    token = _ASKS_AGAIN.set(True)
    try:
        yield
    finally:
        _ASKS_AGAIN.reset(token)


class JudgeFailed(Exception):
    """The judge returned no reply. `kind` is the error of the grade."""

    kind = ErrorKind.model_grader_server_error


class Judge(Protocol):
    """Completes a prompt with JSON of a schema. The keys of `sampling` are those of the chat completions API."""

    async def complete(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> JudgeReply:
        """Return the reply, which may be a refusal or truncated.

        Raises:
            JudgeFailed: there is none.
            ServerAway: the server stayed away for as long as the caller waits.
        """
        ...


class Judges(Judge, Protocol):
    """A Judge that lists its models."""

    @property
    def models(self) -> Collection[str]: ...


@dataclass(frozen=True)
class JudgeModel:
    """A judge model and its server. `served_as` is the model's name on the server, if it differs."""

    base_url: str  # ends with /v1
    api_key: str = field(default="", repr=False)
    served_as: str | None = None
    max_concurrency: int = 8
    requests_per_second: float | None = None
    timeout_s: float = 120.0
    explains: bool = True  # whether it writes "steps" before the "result"
    is_of_registry: bool = False  # on our inference server: it reads neither images nor audio


@dataclass
class _Call:
    """A request in flight, with all who wait for its reply."""

    task: asyncio.Task[JudgeReply]
    began: asyncio.Event  # it has a slot of the model
    waiting: int = 0
    is_paid: bool = False

    async def reply(self) -> JudgeReply:
        """The reply. Its tokens are those of the first who gets it; it costs all others nothing.

        The deadline of a grade runs from the time at which the model takes the request. If no grade waits for it, the
        request is cancelled.
        """
        self.waiting += 1
        try:
            if not self.began.is_set():
                with standing_still():
                    await self._begin()
            reply = await asyncio.shield(self.task)
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.task.cancel()
        if self.is_paid:
            return _for_nothing(reply)
        self.is_paid = True
        return reply

    async def _begin(self) -> None:
        """Wait until the request is sent, or has ended before."""
        began = asyncio.create_task(self.began.wait())
        try:
            await asyncio.wait([began, self.task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            began.cancel()


class HttpJudges:
    """Judge models on OpenAI-compatible servers. Belongs to one event loop; close it, or use `async with`.

    Caches replies by prompt and settings, so that equal answers of a group get equal rewards, even from a judge at
    temperature 1. The tokens actually used are counted in `ledger`.
    """

    def __init__(
        self,
        config: Mapping[str, JudgeModel],
        *,
        patience: CallRetryPolicy | None = None,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: TokenLedger | None = None,
    ) -> None:
        """Open no connections yet, so that reading `models` is cheap. `client`: one that the caller closes."""
        self.config = dict(config)
        self.ledger = TokenLedger() if ledger is None else ledger
        self._patience = patience or CallRetryPolicy()
        self._callers_client = client
        self._opened: httpx.AsyncClient | None = None
        self._slots = {name: asyncio.Semaphore(model.max_concurrency) for name, model in config.items()}
        self._paces = {
            name: RateLimit(model.requests_per_second, self._patience.sleep, clock)
            for name, model in config.items()
        }
        self._replies = OrderedDict[str, JudgeReply]()
        self._asking: dict[str, _Call] = {}

    @property
    def models(self) -> Collection[str]:
        return self.config.keys()

    async def __aenter__(self) -> HttpJudges:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        tasks = [call.task for call in self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._opened is not None:
            await self._opened.aclose()

    @property
    def _client(self) -> httpx.AsyncClient:
        if self._callers_client is not None:
            return self._callers_client
        if self._opened is None:
            # The operator's addresses are trusted. Each model has a concurrency limit, so the pool has none.
            self._opened = trusted_client()
        return self._opened

    async def complete(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> JudgeReply:
        if model not in self.config:
            raise JudgeFailed(f"no judge model {quoted(model)} is configured")
        served = self.config[model]
        if not served.explains:
            schema = _without(schema, "steps")
        body = json.dumps(
            {
                "model": served.served_as or model,
                "messages": list(messages),
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "grade", "strict": True, "schema": schema},
                },
                **sampling,
            }
        ).encode()
        key = hashlib.sha256(model.encode() + b"\0" + body).hexdigest()
        remembered = self._replies.get(key)
        if remembered is not None and not _ASKS_AGAIN.get():
            self._replies.move_to_end(key)
            return _for_nothing(remembered)
        # Equal answers of a group arrive at about the same time, so concurrent duplicates share one request. It is a
        # separate task, so that duplicates get their reply even if the first caller is cancelled.
        call = self._asking.get(key)
        if call is None or call.task.cancelling():
            began = asyncio.Event()
            task = asyncio.create_task(self._ask_within_bounds(model, served, body, began))
            call = self._asking[key] = _Call(task, began)
            task.add_done_callback(lambda done: self._finish_call(key, done))
        return await call.reply()

    async def _ask_within_bounds(
        self, model: str, served: JudgeModel, body: bytes, began: asyncio.Event
    ) -> JudgeReply:
        async with self._slots[model]:
            began.set()
            reply = await self._ask(model, served, body)
        self.ledger.add(model, reply.usage)
        return reply

    def _finish_call(self, key: str, done: asyncio.Task[JudgeReply]) -> None:
        call = self._asking.get(key)
        if call is not None and call.task is done:
            del self._asking[key]
        if done.cancelled() or done.exception() is not None:
            return
        reply = done.result()
        if reply.refusal is None and reply.finish_reason == "stop" and _is_json(reply.text):
            self._keep(key, reply)

    async def _ask(self, model: str, served: JudgeModel, body: bytes) -> JudgeReply:
        headers = {"authorization": f"Bearer {served.api_key}"} if served.api_key else {}
        url = served.base_url.rstrip("/") + "/chat/completions"
        try:
            answer = await post(
                self._client,
                url,
                body,
                headers,
                patience=self._patience,
                pace=self._paces[model],
                timeout_s=served.timeout_s,
                is_ours=served.is_of_registry,
            )
        except NoAnswer as silence:
            raise JudgeFailed(f"{model}: {silence}") from None
        except ServerAway as away:
            raise ServerAway(f"The judge {model} is unavailable: {away}") from None
        if not answer.ok:
            raise JudgeFailed(f"{model}: HTTP {answer.status}: {quoted_reply(answer.text, served.api_key)}")
        try:
            return _reply(json.loads(answer.text), body)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise JudgeFailed(
                f"{model}: not a chat completion: {quoted_reply(answer.text, served.api_key)}"
            ) from None

    def _keep(self, key: str, reply: JudgeReply) -> None:
        self._replies[key] = reply
        while len(self._replies) > REMEMBERED_REPLIES:
            self._replies.popitem(last=False)


def _without(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    properties = {key: value for key, value in schema["properties"].items() if key != name}
    return {
        **schema,
        "properties": properties,
        "required": [key for key in schema["required"] if key != name],
    }


def _for_nothing(reply: JudgeReply) -> JudgeReply:
    return replace(reply, prompt_tokens=0, completion_tokens=0, cached_tokens=0)


def _reply(completion: Mapping[str, Any], body: bytes) -> JudgeReply:
    choice = completion["choices"][0]
    message = choice["message"]
    tokens = token_usage(completion, body)
    return JudgeReply(
        text=str(message.get("content") or ""),
        prompt_tokens=tokens.prompt_tokens,
        completion_tokens=tokens.completion_tokens,
        cached_tokens=tokens.cached_tokens,
        refusal=message.get("refusal"),
        finish_reason=str(choice.get("finish_reason") or "stop"),
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
