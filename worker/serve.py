"""Chat completions of the registry's base models, for machines without vLLM: one model at a time, requests in batches.

A process of its own, started by `regraft-server up` when the operator's graders ask a model of the registry. It
speaks the part of OpenAI's protocol that judges need; what it does not know is refused.
"""

import argparse
import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from core.registry import Registry
from core.response_format import ResponseFormat, held_to
from core.settings import Settings
from worker import process
from worker.samplers import Answer, Sampling
from worker.types import Prompt, Rollout

log = logging.getLogger(__name__)

MAX_COMPLETION_TOKENS = 1024  # unless the request says otherwise


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class PlainText(Strict):
    type: Literal["text"]


class ChatRequest(Strict):
    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Literal[1] | None = None
    seed: int | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: Annotated[ResponseFormat | PlainText, Field(discriminator="type")] | None = None


class Refused(Exception):
    """The request cannot be answered; the message says why, `status` how HTTP does."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Model(Protocol):
    """A loaded model."""

    context: int  # tokens of prompt and answer together

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def answers(self, prompts: Sequence[Prompt], sampling: Sampling) -> Sequence[Answer]: ...


@dataclass(frozen=True)
class Seeded(Sampling):
    """Each prompt, by its number, with the seed of its request: what else is in the batch changes nothing."""

    seeds: tuple[int, ...] = ()

    def seed(self, prompt: Prompt, member: int) -> int:
        return self.seeds[prompt.line]


@dataclass
class Waiting:
    model: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    reply: asyncio.Future[Rollout] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Answers whatever waits, all that can go together at once. Loads a model when it is first asked for."""

    def __init__(self, load: Callable[[str], Model], *, most: int = 64) -> None:
        self._load = load
        self._most = most
        self._name = ""
        self._model: Model | None = None
        self._lock = asyncio.Lock()  # one batch at a time; the model is used by nobody else
        self._waiting: list[Waiting] = []
        self._news = asyncio.Event()

    async def complete(self, request: ChatRequest) -> tuple[int, Rollout]:
        """The prompt's tokens and the answer. Raise Refused if there can be none."""
        async with self._lock:
            model = await asyncio.to_thread(self._loaded, request.model)
            prompt_ids = tuple(model.render([message.model_dump() for message in request.messages]))
        room = model.context - len(prompt_ids)
        if room < 1:
            raise Refused(
                f"the messages have {len(prompt_ids)} tokens; {request.model} takes {model.context}"
            )
        limit = min(room, request.max_completion_tokens or MAX_COMPLETION_TOKENS)
        sampling = Sampling(
            group_size=1,
            temperature=request.temperature,
            max_completion_tokens=limit,
            job_seed=0,
            step=0,
            held_to=_held_to(request),
        )
        seed = secrets.randbits(62) if request.seed is None else request.seed & (2**62 - 1)
        waiting = Waiting(request.model, prompt_ids, sampling, seed)
        self._waiting.append(waiting)
        self._news.set()
        return len(prompt_ids), await waiting.reply

    async def serve(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            async with self._lock:
                batch = self._next_batch()
                if not batch:
                    continue
                try:
                    rollouts = await asyncio.to_thread(self._answer, batch)
                except Exception as cause:
                    log.exception("a batch of %d failed", len(batch))
                    for waiting in batch:
                        if not waiting.reply.done():
                            waiting.reply.set_exception(Refused(f"the model failed: {cause}", 500))
                    continue
            for waiting, rollout in zip(batch, rollouts, strict=True):
                if not waiting.reply.done():  # its client may have gone
                    waiting.reply.set_result(rollout)

    def _next_batch(self) -> list[Waiting]:
        self._waiting = [one for one in self._waiting if not one.reply.done()]
        if not self._waiting:
            self._news.clear()
            return []
        first = self._waiting[0]
        batch = [one for one in self._waiting if (one.model, one.sampling) == (first.model, first.sampling)]
        batch = batch[: self._most]
        self._waiting = [one for one in self._waiting if one not in batch]
        return batch

    def _answer(self, batch: Sequence[Waiting]) -> list[Rollout]:
        model = self._loaded(batch[0].model)
        prompts = [Prompt(number, one.prompt_ids, {}) for number, one in enumerate(batch)]
        shared = batch[0].sampling
        seeded = Seeded(**vars(shared), seeds=tuple(one.seed for one in batch))
        rollouts = {answer.prompt: answer.rollout for answer in model.answers(prompts, seeded)}
        return [rollouts[number] for number in range(len(batch))]

    def _loaded(self, name: str) -> Model:
        if self._model is None or name != self._name:
            self._model = None  # before the next one takes its room
            self._model, self._name = self._load(name), name
        return self._model


def _held_to(request: ChatRequest) -> str:
    wanted = request.response_format
    return held_to(wanted.json_schema.schema_) if isinstance(wanted, ResponseFormat) else ""


def create_app(load: Callable[[str], Model], key: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.batcher = Batcher(load)
        serving = asyncio.create_task(app.state.batcher.serve())
        yield
        serving.cancel()

    app = FastAPI(title="regraft inference", lifespan=lifespan, docs_url=None, redoc_url=None)

    def checked(request: Request) -> None:
        sent = request.headers.get("authorization", "")
        if not secrets.compare_digest(sent.encode(), f"Bearer {key}".encode()):
            raise HTTPException(401, "Incorrect API key provided.")

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return _error(error.status, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return _error(400, f"{'.'.join(str(step) for step in first['loc'][1:])}: {first['msg']}")

    @app.post("/v1/chat/completions", dependencies=[Depends(checked)])
    async def chat(body: ChatRequest) -> dict[str, Any]:
        prompt_tokens, rollout = await app.state.batcher.complete(body)
        completion_tokens = len(rollout.output_ids_T)
        message = {"role": "assistant", "content": rollout.text, "refusal": None}
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "choices": [
                {"index": 0, "message": message, "finish_reason": rollout.finish_reason, "logprobs": None}
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    return app


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=status)


class TransformersModel:
    """Implements Model with the sampler that training uses. Its adapter is new, and so changes nothing."""

    def __init__(self, name: str, settings: Settings) -> None:
        import torch

        from worker.policy import Policy, load_base
        from worker.samplers.transformers import TransformersSampler

        registry = Registry.load(settings.models_file)
        if name not in registry.models:
            raise Refused(f"The model '{name}' does not exist.", 404)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        base = load_base(name, registry.get(name), settings.model_cache, device)
        self.context = base.context
        self.policy = Policy(base, rank=1, alpha=1, seed=0)
        self.sampler = TransformersSampler(self.policy)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.policy.render(messages)

    def answers(self, prompts: Sequence[Prompt], sampling: Sampling) -> Sequence[Answer]:
        return list(self.sampler.answers(prompts, sampling))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.serve")
    parser.add_argument("port", type=int)
    parser.add_argument("parent", type=int, help="process id of the server: this process dies with it")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    settings = Settings()
    app = create_app(lambda name: TransformersModel(name, settings), settings.inference_key)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
