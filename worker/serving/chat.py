"""Chat completions of the engines that are ours, token by token. vLLM has its own server (vllm_server.py)."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from core.asgi import END_OF_EVENTS, UNBUFFERED, json_event, until_gone
from core.chat import InternalChat, envelope, token_usage
from core.response_format import SchemaTooLarge
from worker.model.reasoning import Reasoning
from worker.refusals import Refusal
from worker.serving.channels import ReasoningAnswer
from worker.serving.detokenizer import Detokenizer, Piece
from worker.serving.engine import Engine, GenerationRequest, Token
from worker.serving.engines import EngineRefused
from worker.serving.prompting import (
    budget_of,
    messages_of,
    reasoning_of,
    refuse_unenforceable,
    template_of,
)
from worker.serving.serving_metrics import Result, Tally
from worker.serving.tool_calls import AnswerCalls, calls_of, deltas_of, message_of, tools_of
from worker.types import ParsedAnswer

log = logging.getLogger(__name__)

# What requests may have that only vLLM does, with the values that ask for nothing.
ONLY_VLLM = ("frequency_penalty", "presence_penalty", "logit_bias")

MODEL_FAILED = "The model failed. The log of the inference server says why."


@dataclass
class ChatInProgress:
    """The answers to one request, on a model that stays loaded until `close`."""

    request: InternalChat
    engine: Engine
    asks: Sequence[GenerationRequest]
    answers: Sequence[Detokenizer | ReasoningAnswer]
    tally: Tally
    open_resources: AsyncExitStack
    calls: AnswerCalls | None = None  # None: answers have no calls
    result: Result | None = None  # None: determined by the answers
    written: int = 0  # tokens

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the increments of all choices. Closing the iterator aborts them.

        Raises:
            EngineRefused: the engine rejected the request only now.
        """
        arrived: asyncio.Queue[tuple[int, Token | Exception]] = asyncio.Queue()

        async def write(number: int) -> None:
            tokens = self.engine.generate(self.asks[number])
            try:
                async for token in tokens:
                    arrived.put_nowait((number, token))
            except SchemaTooLarge as cause:
                forced = self.calls is not None and self.calls.schema
                param = "tools" if forced else "response_format"
                arrived.put_nowait((number, EngineRefused(f"{param}: {cause}", param=param)))
            except Exception as cause:
                arrived.put_nowait((number, cause))
            finally:
                await tokens.aclose()

        writing = [asyncio.create_task(write(number)) for number in range(len(self.asks))]
        try:
            unfinished = len(self.asks)
            while unfinished:
                number, token = await arrived.get()
                if isinstance(token, Exception):
                    raise token
                self.written += 1
                self.tally.counted(len(self.asks[0].prompt_ids), self.written)
                self.tally.first_token_after(None)
                answer = self.answers[number]
                if answer.finish_reason:
                    continue  # ended by a stop string; its task is about to stop
                yield number, answer.add(token)
                if answer.finish_reason:
                    unfinished -= 1
                    writing[number].cancel()
        except Exception as cause:
            self.result = "refused" if isinstance(cause, EngineRefused) else "failed"
            raise
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)

    def parsed(self, number: int, text: str) -> ParsedAnswer:
        """The content and the calls of a whole answer."""
        if self.calls is None:
            return ParsedAnswer(text)
        answer = self.answers[number]
        return self.calls.read(text, answer.ids, is_cut=answer.finish_reason == "length")

    def finish_reason(self, number: int, parsed: ParsedAnswer) -> str | None:
        reason = self.answers[number].finish_reason
        return self.calls.finish_reason if reason == "stop" and parsed.calls and self.calls else reason

    async def close(self) -> None:
        await self.open_resources.aclose()
        whole = all(answer.finish_reason for answer in self.answers)
        self.tally.ended(self.result or ("answered" if whole else "left"))

    @property
    def usage(self) -> dict[str, Any]:
        read, written = len(self.asks[0].prompt_ids), sum(answer.tokens for answer in self.answers)
        return token_usage(read, written, reasoning=sum(answer.reasoning_tokens for answer in self.answers))


@dataclass(frozen=True)
class RenderedChat:
    """The prompt of a request, and what depends on its chat template."""

    prompt_ids: tuple[int, ...]
    stop_ids: frozenset[int]
    reasoning: Reasoning | None
    calls: AnswerCalls | None  # None: answers have no calls


def _rendered(request: InternalChat, engine: Engine, template: str | None) -> RenderedChat:
    """Render the messages and tools of a request. Blocks. Raises EngineRefused: the chat template cannot do it."""
    from worker.model.policy import render

    try:
        calls = calls_of(request, engine.tokenizer, engine.tool_parser, template)
        template, reasoning = reasoning_of(request, engine.tokenizer, template)
        prompt_ids = render(engine.tokenizer, messages_of(request), template, tools=tools_of(request))
        return RenderedChat(tuple(prompt_ids), engine.stop_ids(template), reasoning, calls)
    except EngineRefused:
        raise
    except Refusal as cause:
        raise EngineRefused(str(cause), code=cause.code) from cause
    except Exception as cause:
        log.exception("the chat template of %s failed", request.served.base_model)
        raise EngineRefused(
            "The model's chat template failed. The log of the inference server says why.", 500
        ) from cause


async def begin(
    request: InternalChat,
    engine: Engine,
    adapter: Path | None,
    arrived: float,
    open_resources: AsyncExitStack,
) -> ChatInProgress:
    """Render the prompt, and take over `open_resources`. Raises EngineRefused if the request cannot be served."""
    refuse_unsupported(request)
    rendered = await asyncio.to_thread(_rendered, request, engine, template_of(request, adapter))
    prompt_ids, stop_ids, reasoning = rendered.prompt_ids, rendered.stop_ids, rendered.reasoning
    room = engine.context - len(prompt_ids)
    if room < 1:
        raise EngineRefused(
            f"the messages have {len(prompt_ids)} tokens; {request.model} takes {engine.context}",
            code="context_length_exceeded",
        )
    longest = min(room, request.most_tokens or room)
    budget = budget_of(request, reasoning, longest)
    forced = "" if rendered.calls is None else rendered.calls.schema
    refuse = partial(refuse_unenforceable, request, engine.tokenizer, budget, forces_calls=bool(forced))
    await asyncio.to_thread(refuse)
    asks = [
        GenerationRequest(
            prompt_ids=prompt_ids,
            adapter=adapter,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=_seed(request.seed, number),
            max_tokens=longest,
            response_schema=forced or request.response_schema,
            stop_ids=stop_ids,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            reasoning=reasoning,
            thinking_budget=budget,
        )
        for number in range(request.n or 1)
    ]
    written = engine.tokenizer, stop_ids, request.stops
    answers = [
        Detokenizer(*written) if reasoning is None else ReasoningAnswer(*written, reasoning) for _ in asks
    ]
    tally = Tally(arrived, request.served.base_model, len(asks))
    tally.counted(len(prompt_ids), 0)
    return ChatInProgress(request, engine, asks, answers, tally, open_resources.pop_all(), rendered.calls)


def refuse_unsupported(request: InternalChat) -> None:
    """Raise EngineRefused for what only vLLM's server does."""
    for name in ONLY_VLLM:
        if getattr(request, name) not in (None, [], {}, 0, "none", "auto"):
            raise only_vllm(name, request.served.base_model)


def only_vllm(name: str, model: str, what: str = "") -> EngineRefused:
    """The error for a parameter that only vLLM's server has."""
    return EngineRefused(
        f"{what or repr(name)} is only supported where vLLM serves the model; here transformers serves {model}.",
        code="unsupported_parameter",
        param=name,
    )


def _seed(requested: int | None, number: int) -> int:
    if requested is None:
        return secrets.randbits(62)
    return int.from_bytes(sha256(f"{requested}/{number}".encode()).digest()[:8], "big") >> 2


async def full_response(completion: ChatInProgress, frame: dict[str, Any]) -> dict[str, Any]:
    """Build the response without streaming."""
    texts = ["" for _ in completion.answers]
    thoughts = ["" for _ in completion.answers]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in completion.answers]
    async with aclosing(completion.pieces()) as pieces:
        async for number, piece in pieces:
            texts[number] += piece.text
            thoughts[number] += piece.reasoning
            logprobs[number] += piece.logprobs
    choices: list[dict[str, Any]] = [
        {
            "index": number,
            "message": {"role": "assistant", "content": "", "refusal": None, "annotations": []}
            | message_of(parsed)
            | ({"reasoning_content": thoughts[number]} if thoughts[number] else {}),
            "finish_reason": completion.finish_reason(number, parsed),
            "logprobs": {"content": logprobs[number], "refusal": None}
            if completion.request.logprobs
            else None,
        }
        for number, parsed in enumerate(map(completion.parsed, range(len(texts)), texts))
    ]
    return frame | {"object": "chat.completion", "choices": choices, "usage": completion.usage}


async def streamed(completion: ChatInProgress, frame: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Stream the response as server-sent events. The text of an answer that may have calls comes when it is whole."""
    request = completion.request
    wants_usage = bool(request.stream_options and request.stream_options.include_usage)
    frame = frame | {"object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {})

    def chunk(number: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return json_event(frame | {"choices": [choice]})

    try:
        for number in range(len(completion.answers)):
            yield chunk(number, {"role": "assistant", "content": "", "refusal": None})
        held: list[list[Piece]] = [[] for _ in completion.answers]
        async with aclosing(completion.pieces()) as pieces:
            async for number, piece in pieces:
                if piece.reasoning:
                    yield chunk(number, {"reasoning_content": piece.reasoning})
                reason: str | None = completion.answers[number].finish_reason
                parsed = ParsedAnswer(piece.text)
                if completion.calls is not None:
                    held[number].append(piece)
                    if not reason:
                        continue
                    parsed = completion.parsed(number, "".join(one.text for one in held[number]))
                    piece = Piece(parsed.content, [one for part in held[number] for one in part.logprobs])
                if piece.text or piece.logprobs:
                    logprobs = {"content": piece.logprobs, "refusal": None} if request.logprobs else None
                    yield chunk(number, {"content": piece.text}, logprobs=logprobs)
                if parsed.calls:
                    yield chunk(number, {"tool_calls": deltas_of(parsed)})
                if reason:
                    yield chunk(number, {}, completion.finish_reason(number, parsed))
        if wants_usage:
            yield json_event(frame | {"choices": [], "usage": completion.usage})
        yield END_OF_EVENTS
    except EngineRefused as cause:
        yield json_event(envelope(cause.status, str(cause), cause.code))
    except Exception:  # the status has been sent
        log.exception("an answer failed")
        yield json_event(envelope(500, MODEL_FAILED))


class Stream(StreamingResponse):
    """Server-sent events that stop when the client disconnects, even before the first event."""

    def __init__(self, completion: ChatInProgress, frame: dict[str, Any]) -> None:
        self.completion = completion
        self.events = streamed(completion, frame)
        super().__init__(self.events, media_type="text/event-stream", headers=UNBUFFERED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.events.aclose()
            await self.completion.close()
            scope["app"].state.last_use = time.monotonic()


async def response_of(completion: ChatInProgress, request: Request) -> Response:
    """The response, whole or as events. Raises EngineRefused if the model fails."""
    body = completion.request
    frame = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": None,
    }
    if body.stream:
        return Stream(completion, frame)
    try:
        answer = await until_gone(request.receive, full_response(completion, frame))
    except EngineRefused:
        raise
    except Exception as cause:
        log.exception("an answer failed")
        raise EngineRefused(MODEL_FAILED, 500) from cause
    finally:
        await completion.close()
    return Response(status_code=499) if answer is None else JSONResponse(answer)
