"""Serve chat completions of the registry's models and their adapters, in OpenAI's protocol, for the API and judges.

A separate process: `regraft-server up` starts it on the first request, and `regraft-server inference` runs it. The API
resolves a model name to weights (core/chat.py); a judge requests a base model by its own name.
"""

import argparse
import asyncio
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from core import chat_templates
from core.chat import InternalChat, envelope
from core.disconnect import until_gone
from core.registry import Registry
from core.response_format import SchemaTooLarge
from core.settings import Settings
from core.storage.store import blobs_of
from core.telemetry import tracing
from worker import process
from worker.model.reasoning import Reasoning, detect, plan_effort, with_defaults
from worker.refusals import Refusal
from worker.serve import serving_metrics
from worker.serve.adapters import CHAT_TEMPLATE, AdapterFolders
from worker.serve.channels import ReasoningAnswer
from worker.serve.detokenizer import Detokenizer, Piece
from worker.serve.engine import Ask, Engine, Token
from worker.serve.engines import Builder, EngineRefused, Engines
from worker.serve.serving_metrics import Result, Tally

log = logging.getLogger(__name__)

DRAIN_SECONDS = 30
# Limit of answers in flight: 16 times the batch of the transformers engine (64), and 4 times that of vLLM (256).
# One request has up to 128 answers (core/chat.py).
MAX_ANSWERS = 1024
OVERLOADED_RETRY_AFTER = 5  # seconds
ROUTE = "/v1/chat/completions"


class Places:
    """Counts answers in flight: running, queued, or waiting for their model to load."""

    def __init__(self, most: int) -> None:
        self.most, self._taken = most, 0

    @contextmanager
    def take(self, answers: int) -> Iterator[None]:
        """Reserve `count` answers. Raises Refused if the queue is full, to bound the waiting time."""
        if self._taken + answers > self.most:
            raise EngineRefused(
                f"{self._taken} answers are in flight, and this server accepts {self.most} at once; retry later.",
                503,
                code="overloaded",
                retry_after=OVERLOADED_RETRY_AFTER,
            )
        self._taken += answers
        try:
            yield
        finally:
            self._taken -= answers


@dataclass
class ChatInProgress:
    """The answers to one request, on a model that stays loaded until `close`."""

    request: InternalChat
    engine: Engine
    asks: Sequence[Ask]
    answers: Sequence[Detokenizer | ReasoningAnswer]
    tally: Tally
    held_open: AsyncExitStack
    result: Result | None = None  # None: determined by the answers

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the increments of all choices. Closing the iterator aborts them.

        Raises:
            Refused: the engine rejected the request only now.
        """
        arrived: asyncio.Queue[tuple[int, Token | Exception]] = asyncio.Queue()

        async def write(number: int) -> None:
            tokens = self.engine.generate(self.asks[number])
            try:
                async for token in tokens:
                    arrived.put_nowait((number, token))
            except SchemaTooLarge as cause:
                arrived.put_nowait((number, EngineRefused(f"response_format: {cause}")))
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
                self.tally.wrote()
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

    async def close(self) -> None:
        await self.held_open.aclose()
        whole = all(answer.finish_reason for answer in self.answers)
        self.tally.ended(self.result or ("answered" if whole else "left"))

    @property
    def usage(self) -> dict[str, Any]:
        read, written = len(self.asks[0].prompt_ids), sum(answer.tokens for answer in self.answers)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": sum(answer.reasoning_tokens for answer in self.answers),
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


async def begin(request: InternalChat, engines: Engines, places: Places) -> ChatInProgress:
    """Load the model and parse the request. Raises Refused if the request cannot be served."""
    from worker.model.policy import render

    arrived = time.perf_counter()
    async with AsyncExitStack() as stack:
        stack.enter_context(places.take(request.n or 1))
        engine, adapter = await stack.enter_async_context(engines.open(request.served))
        messages = [message.model_dump(exclude={"name", "refusal"}) for message in request.messages]
        template = _template_of(request, adapter)
        try:
            template, reasoning = await asyncio.to_thread(_reasoning, request, engine.tokenizer, template)
            prompt_ids = tuple(await asyncio.to_thread(render, engine.tokenizer, messages, template))
        except Refusal as cause:
            raise EngineRefused(str(cause), code=cause.code) from cause
        except Exception as cause:
            log.exception("the chat template of %s failed", request.served.base_model)
            raise EngineRefused(f"the model's chat template failed: {cause}", 500) from cause
        room = engine.context - len(prompt_ids)
        if room < 1:
            raise EngineRefused(
                f"the messages have {len(prompt_ids)} tokens; {request.model} takes {engine.context}",
                code="context_length_exceeded",
            )
        longest = min(room, request.most_tokens or room)
        budget = _budget(request, reasoning, longest)
        asks = [
            Ask(
                prompt_ids=prompt_ids,
                adapter=adapter,
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                seed=_seed(request.seed, number),
                max_tokens=longest,
                held_to=request.held_to,
                top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                reasoning=reasoning,
                thinking_budget=budget,
            )
            for number in range(request.n or 1)
        ]
        written = engine.tokenizer, engine.stop_ids, request.stops
        answers = [
            Detokenizer(*written) if reasoning is None else ReasoningAnswer(*written, reasoning) for _ in asks
        ]
        tally = Tally(arrived, request.served.base_model, len(prompt_ids), len(asks))
        return ChatInProgress(request, engine, asks, answers, tally, stack.pop_all())


def _template_of(request: InternalChat, adapter: Path | None) -> str | None:
    """Return the template of the adapter's training, or the requested one; None: the base model's."""
    if request.served.chat_template is not None:
        return chat_templates.text_of(request.served.chat_template)
    file = None if adapter is None else adapter / CHAT_TEMPLATE
    return file.read_text() if file is not None and file.exists() else None


def _reasoning(
    request: InternalChat, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> tuple[str | None, Reasoning | None]:
    """Return the template with the request's arguments as its defaults, and how the model reasons with it."""
    arguments = dict(request.served.chat_template_kwargs or {})
    reasoning = detect(tokenizer, template)
    if reasoning is not None:
        # A budget does not depend on the template, so its length does not matter here.
        arguments = {**plan_effort(reasoning, request.reasoning_effort, 0).arguments, **arguments}
    if not arguments or (template is None and tokenizer.chat_template is None):
        return template, reasoning
    template = with_defaults(template or tokenizer.get_chat_template(), arguments)
    return template, detect(tokenizer, template)


def _budget(request: InternalChat, reasoning: Reasoning | None, longest: int) -> int | None:
    """Return the tokens after which a thought is closed; None: unlimited, or no room for an answer after it."""
    if reasoning is None:
        return None
    budget = request.served.thinking_budget
    if budget is None:
        budget = plan_effort(reasoning, request.reasoning_effort, longest).budget
    return budget if budget is not None and budget + len(reasoning.closing_ids) < longest else None


def _seed(asked: int | None, number: int) -> int:
    if asked is None:
        return secrets.randbits(62)
    return int.from_bytes(sha256(f"{asked}/{number}".encode()).digest()[:8], "big") >> 2


async def whole(completion: ChatInProgress, frame: dict[str, Any]) -> dict[str, Any]:
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
            "message": {"role": "assistant", "content": texts[number], "refusal": None, "annotations": []}
            | ({"reasoning_content": thoughts[number]} if thoughts[number] else {}),
            "finish_reason": answer.finish_reason,
            "logprobs": {"content": logprobs[number], "refusal": None}
            if completion.request.logprobs
            else None,
        }
        for number, answer in enumerate(completion.answers)
    ]
    return frame | {"object": "chat.completion", "choices": choices, "usage": completion.usage}


async def streamed(completion: ChatInProgress, frame: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Stream the response as server-sent events."""
    request = completion.request
    wants_usage = bool(request.stream_options and request.stream_options.include_usage)
    frame = frame | {"object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {})

    def event(body: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def chunk(number: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event(frame | {"choices": [choice]})

    try:
        for number in range(len(completion.answers)):
            yield chunk(number, {"role": "assistant", "content": "", "refusal": None})
        async with aclosing(completion.pieces()) as pieces:
            async for number, piece in pieces:
                if piece.reasoning:
                    yield chunk(number, {"reasoning_content": piece.reasoning})
                if piece.text or piece.logprobs:
                    logprobs = {"content": piece.logprobs, "refusal": None} if request.logprobs else None
                    yield chunk(number, {"content": piece.text}, logprobs=logprobs)
                if reason := completion.answers[number].finish_reason:
                    yield chunk(number, {}, reason)
        if wants_usage:
            yield event(frame | {"choices": [], "usage": completion.usage})
        yield b"data: [DONE]\n\n"
    except EngineRefused as cause:
        yield event(envelope(cause.status, str(cause), cause.code))
    except Exception as cause:  # the status has been sent
        log.exception("an answer failed")
        yield event(envelope(500, f"the model failed: {cause}"))


class Stream(StreamingResponse):
    """Server-sent events that stop when the client disconnects, even before the first event."""

    def __init__(self, completion: ChatInProgress, frame: dict[str, Any]) -> None:
        self.completion = completion
        self.events = streamed(completion, frame)
        super().__init__(self.events, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.events.aclose()
            await self.completion.close()
            scope["app"].state.last_use = time.monotonic()


def create_app(engines: Engines, key: str, *, most_answers: int = MAX_ANSWERS) -> FastAPI:
    """Create the app. /healthz is public; all other routes need the key."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engines.close()

    app = FastAPI(title="regraft inference", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.last_use = time.monotonic()
    places = Places(most_answers)

    def checked(request: Request) -> None:
        sent = request.headers.get("authorization", "")
        if not secrets.compare_digest(sent.encode(), f"Bearer {key}".encode()):
            raise HTTPException(401, "Incorrect API key provided.")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"][1:])
        return JSONResponse(envelope(400, f"{where}: {first['msg']}"), 400)

    @app.get("/healthz")
    async def healthy() -> dict[str, str]:
        return {"status": "ok"}

    @app.post(ROUTE, dependencies=[Depends(checked)])
    async def chat(body: InternalChat, request: Request) -> Response:
        with tracing.request("POST", request.headers):
            try:
                answer = await answered(body, request)
            except EngineRefused as error:
                headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
                answer = JSONResponse(envelope(error.status, str(error), error.code), error.status, headers)
            tracing.answered("POST", ROUTE, answer.status_code)
            return answer

    async def answered(body: InternalChat, request: Request) -> Response:
        app.state.last_use = time.monotonic()
        try:
            completion = await until_gone(request.receive, begin(body, engines, places))
        except EngineRefused as cause:
            serving_metrics.refused(cause.status)
            raise
        except Exception as cause:
            log.exception("%s cannot be loaded", body.served.base_model)
            serving_metrics.refused(500)
            raise EngineRefused(f"the model cannot be loaded: {cause}", 500) from cause
        if completion is None:
            serving_metrics.left()
            return Response(status_code=499)
        frame = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": None,
        }
        if body.stream:
            return Stream(completion, frame)
        try:
            answer = await until_gone(request.receive, whole(completion, frame))
        except EngineRefused:
            raise
        except Exception as cause:
            log.exception("an answer failed")
            raise EngineRefused(f"the model failed: {cause}", 500) from cause
        finally:
            await completion.close()
            app.state.last_use = time.monotonic()
        return Response(status_code=499) if answer is None else JSONResponse(answer)

    return app


def open_engines(settings: Settings) -> Engines:
    from worker.rollout.samplers import vllm
    from worker.serve.transformers_engine import TransformersBuilder

    registry, plain = Registry.load(settings.models_file), TransformersBuilder(settings)
    builders: dict[str, Builder] = {"transformers": plain}
    if vllm.installed():
        from worker.serve.vllm_engine import VllmBuilder

        builders["vllm"] = served = VllmBuilder(settings)
        for problem in served.problems(registry):
            log.warning("%s", problem)
    blobs = blobs_of(settings)
    folders = AdapterFolders(blobs, (settings.data_dir / "adapters").resolve())
    return Engines(settings, registry, builders, folders, device=plain.device)


def serve(settings: Settings, listening: socket.socket, *, idle_seconds: float = 0.0) -> None:
    """Serve on this socket until a signal, then complete requests in flight; or until idle for `idle_seconds`."""
    engines = open_engines(settings)
    app = create_app(engines, settings.inference_key)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=DRAIN_SECONDS)
    server = uvicorn.Server(config)

    async def answer() -> None:
        watching = asyncio.create_task(watch()) if idle_seconds else None
        await server.serve(sockets=[listening])
        if watching is not None:
            watching.cancel()

    async def watch() -> None:
        while not server.should_exit:
            await asyncio.sleep(min(1.0, idle_seconds))
            if not engines.busy and time.monotonic() - app.state.last_use > idle_seconds:
                server.should_exit = True

    asyncio.run(answer())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.serve.server")
    parser.add_argument("descriptor", type=int, help="inherited file descriptor of the listening socket")
    parser.add_argument("parent", type=int, help="process id of the server; this process exits with it")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    settings = Settings()
    serve(settings, socket.socket(fileno=args.descriptor), idle_seconds=settings.inference_idle_seconds)


if __name__ == "__main__":
    main()
