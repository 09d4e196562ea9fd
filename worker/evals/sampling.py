"""Samples for eval runs, from OpenAI-compatible servers: our inference server, or the operator's models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from core.chat import as_chat_tool
from core.errors import ServiceError
from core.inference import UnknownToInference, says_later
from core.masking import hide_in_error
from core.outages import Resource, TemporarilyUnavailable
from core.outbound.http import trusted_client
from core.response_format import ResponseFormat
from graders.calls import (
    MAX_ANSWER,
    AnswerTooLong,
    CallRetryPolicy,
    NoAnswer,
    RateLimit,
    Reply,
    post,
    quoted_reply,
    unknown_model,
)
from graders.judge.judges import JudgeModel
from graders.judge.usage import token_usage
from graders.prompts import Message
from worker.refusals import not_known_yet

# Of a request that fails: about a minute in all.
RETRIES = 7
# Our own server answers 503 with Retry-After: 5 while it loads a model, which may take minutes.
RETRIES_WHILE_LOADING = 30
MAX_COMPLETION = 64 << 20  # of a batch, with up to 128 choices and their log-probabilities


class ServerUnavailable(TemporarilyUnavailable):
    """The inference server of this installation does not answer."""

    resource = Resource.INFERENCE


class GraderUnavailable(TemporarilyUnavailable):
    """The server of a judge or an endpoint does not answer."""

    resource = Resource.GRADER


@dataclass(frozen=True)
class ItemAnswer:
    """The answer of a model, or the reason why there is none."""

    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str = "stop"
    reasoning: str = ""  # what a reasoning model wrote before the text
    usage: Mapping[str, int] = field(default_factory=dict)
    error: Mapping[str, str] | None = None


class RefusedByServer(ServiceError):
    """The server's own error for a request, in OpenAI's shape."""

    def __init__(self, status: int, message: str, type: str, param: str | None, code: str | None) -> None:
        super().__init__(message, param=param)
        self.status_code, self.type, self.code = status, type, code


class ItemSampler(Protocol):
    """Answers prompts. Safe to call concurrently."""

    async def sample(self, messages: Sequence[Message]) -> ItemAnswer:
        """Return the answer. An error of the request is an Answer with an error.

        Raises:
            ServerUnavailable, NotKnownYet: no request can be answered now.
        """
        ...

    async def complete(self, chat: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, int]]:
        """Return the whole chat completion of one request, with its usage.

        Raises:
            ServiceError: the server's error for this request.
            ServerUnavailable, NotKnownYet: no request can be answered now.
        """
        ...

    async def close(self) -> None: ...


class ChatSampler:
    """Samples from one model of a server, with its limits. Belongs to one event loop.

    Args:
        fields: The fields of every request besides the messages.
        ours: Whether this is the installation's own server, for whose return the run waits.
    """

    def __init__(
        self,
        model: JudgeModel,
        fields: Mapping[str, Any],
        *,
        ours: bool,
        patience: CallRetryPolicy | None = None,
    ) -> None:
        self.model, self.fields, self.ours = model, fields, ours
        self._patience = patience or CallRetryPolicy(
            retries=RETRIES, retries_while_loading=RETRIES_WHILE_LOADING if ours else None
        )
        self._client = trusted_client()
        self._slots = asyncio.Semaphore(model.max_concurrency)
        self._pace = RateLimit(model.requests_per_second, self._patience.sleep, time.monotonic)

    async def sample(self, messages: Sequence[Message]) -> ItemAnswer:
        body = json.dumps({**self.fields, "messages": list(messages)}).encode()
        try:
            answer = await self._answered(body)
        except NoAnswer as silence:
            return ItemAnswer(error={"code": "server_error", "message": str(silence)})
        if not answer.ok:
            return ItemAnswer(error=_error(answer.status, answer.text))
        try:
            return _answer(json.loads(answer.text), body)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            text = f"not a chat completion: {quoted_reply(answer.text)}"
            return ItemAnswer(error={"code": "server_error", "message": text})

    async def complete(self, chat: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, int]]:
        body = json.dumps({**chat, **self.fields}).encode()
        try:
            answer = await self._answered(body, MAX_COMPLETION)
        except NoAnswer as silence:
            raise ServiceError(f"The model gave no answer: {silence}.") from silence
        try:
            completion = json.loads(answer.text)
            if answer.ok:
                return completion, asdict(token_usage(completion, body))
            error = completion["error"]
            raise RefusedByServer(
                answer.status, error["message"], error["type"], error["param"], error["code"]
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as cause:
            raise ServiceError(
                f"The inference server answered with status {answer.status} and not in OpenAI's format."
            ) from cause

    async def _answered(self, body: bytes, max_bytes: int = MAX_ANSWER) -> Reply:
        """The response of the server.

        Raises:
            ServerUnavailable: this is the installation's own server, and it does not answer now.
            NotKnownYet: this is the installation's own server, and it does not know the model.
            NoAnswer: another server does not answer, or the answer exceeds `max_bytes`.
        """
        headers = {"authorization": f"Bearer {self.model.api_key}"} if self.model.api_key else {}
        url = self.model.base_url.rstrip("/") + "/chat/completions"
        async with self._slots:
            try:
                answer = await post(
                    self._client,
                    url,
                    body,
                    headers,
                    patience=self._patience,
                    pace=self._pace,
                    timeout_s=self.model.timeout_s,
                    max_bytes=max_bytes,
                )
            except AnswerTooLong:
                raise
            except NoAnswer as silence:
                if self.ours:
                    raise ServerUnavailable(str(silence)) from silence
                raise
        if self.ours and answer.status == 401:  # an operator can repair this, as by the end of a rotation
            raise ServerUnavailable("it does not accept the key in REGRAFT_INFERENCE_KEY")
        if self.ours and says_later(answer.status, answer.retry_after, answer.text):
            raise ServerUnavailable(f"HTTP {answer.status}: {quoted_reply(answer.text)}")
        if self.ours and (unknown := unknown_model(answer.status, answer.text)) is not None:
            raise not_known_yet(UnknownToInference(unknown))
        return answer

    async def close(self) -> None:
        await self._client.aclose()


def chat_fields(data_source: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion for the sampling parameters of a stored data source."""
    params = dict(data_source.get("sampling_params") or {})
    text = params.pop("text", None) or {}
    if (form := text.get("format")) is not None:
        schema = form["type"] == "json_schema"
        params["response_format"] = ResponseFormat.model_validate(form).to_row() if schema else form
    if tools := params.pop("tools", None):
        params["tools"] = list(map(as_chat_tool, tools))
    return {name: value for name, value in params.items() if value is not None}


def _answer(completion: Mapping[str, Any], body: bytes) -> ItemAnswer:
    choice = completion["choices"][0]
    message = choice["message"]
    return ItemAnswer(
        text=str(message.get("content") or message.get("refusal") or ""),
        tool_calls=list(message.get("tool_calls") or ()),
        finish_reason=str(choice.get("finish_reason") or "stop"),
        reasoning=str(message.get("reasoning_content") or message.get("reasoning") or ""),
        usage=asdict(token_usage(completion, body)),
    )


def _error(status: int, text: str) -> dict[str, str]:
    try:
        error = json.loads(text)["error"]
        return {
            "code": str(error.get("code") or f"http_{status}"),
            "message": hide_in_error(str(error["message"])[:1000]),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"code": f"http_{status}", "message": f"HTTP {status}: {quoted_reply(text)}"}
