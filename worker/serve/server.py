"""Serve chat completions of the registry's models and their adapters, in OpenAI's protocol, for the API and judges.

A separate process: `regraft-server up` starts it on the first request, and `regraft-server inference` runs it. The API
resolves a model name to weights (core/chat.py); a judge requests a base model by its own name.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import cast

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from core.chat import InternalChat, InternalCompletion, envelope
from core.connections import connection_options
from core.disconnect import until_gone
from core.registry import Registry
from core.settings import Settings
from core.storage.store import blobs_of
from core.telemetry import tracing
from worker.serve import chat as own
from worker.serve import serving_metrics
from worker.serve.adapters import MODELS_KEPT, AdapterFolders
from worker.serve.engine import Engine
from worker.serve.engines import Builder, EngineRefused, Engines
from worker.serve.fleet_model import FleetBuilder
from worker.serve.passed import CHAT, COMPLETIONS, Passed
from worker.serve.serving_metrics import Tally
from worker.serve.vllm_server import VllmModel

log = logging.getLogger(__name__)

DRAIN_SECONDS = 30
# Limit of answers in flight: 16 times the batch of the transformers engine (64), and 4 times that of vLLM (256).
# One request has up to 128 answers (core/chat.py).
MAX_ANSWERS = 1024
OVERLOADED_RETRY_AFTER = 5  # seconds


class Places:
    """Counts answers in flight: running, queued, or waiting for their model to load."""

    def __init__(self, most: int) -> None:
        self.most, self._taken = most, 0

    @contextmanager
    def take(self, answers: int) -> Iterator[None]:
        """Reserve places for `answers` answers. Raises EngineRefused if too few are free, to bound the waiting time."""
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

    @app.post(CHAT, dependencies=[Depends(checked)])
    async def chat(body: InternalChat, request: Request) -> Response:
        return await traced(CHAT, body, request)

    @app.post(COMPLETIONS, dependencies=[Depends(checked)])
    async def complete(body: InternalCompletion, request: Request) -> Response:
        return await traced(COMPLETIONS, body, request)

    async def traced(route: str, body: InternalChat | InternalCompletion, request: Request) -> Response:
        with tracing.request("POST", request.headers):
            try:
                answer = await answered(body, request)
            except EngineRefused as error:
                headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
                refusal = envelope(error.status, str(error), error.code, error.param)
                answer = JSONResponse(refusal, error.status, headers)
            tracing.answered("POST", route, answer.status_code)
            return answer

    async def answered(body: InternalChat | InternalCompletion, request: Request) -> Response:
        app.state.last_use = time.monotonic()
        try:
            begun = await until_gone(request.receive, begin(body, engines, places))
        except EngineRefused as cause:
            serving_metrics.refused(cause.status)
            raise
        except Exception as cause:
            log.exception("%s cannot be loaded", body.served.base_model)
            serving_metrics.refused(500)
            raise EngineRefused(f"the model cannot be loaded: {cause}", 500) from cause
        if begun is None:
            serving_metrics.left()
            return Response(status_code=499)
        if isinstance(begun, Passed):
            return begun
        try:
            return await own.response_of(begun, request)
        finally:
            app.state.last_use = time.monotonic()

    return app


async def begin(
    body: InternalChat | InternalCompletion, engines: Engines, places: Places
) -> Passed | own.ChatInProgress:
    """Load the model and parse the request. Raises EngineRefused if the request cannot be served."""
    arrived = time.perf_counter()
    async with AsyncExitStack() as stack:
        stack.enter_context(places.take(body.answers))
        model, adapter = await stack.enter_async_context(engines.open(body.served))
        if isinstance(model, VllmModel):
            passed = await asyncio.to_thread(model.prepare, body, adapter)
            return passed.hold(stack.pop_all(), Tally(arrived, body.served.base_model, body.answers))
        if isinstance(body, InternalCompletion):
            raise own.only_vllm("prompt", body.served.base_model, COMPLETIONS)
        return await own.begin(body, cast(Engine, model), adapter, arrived, stack)


def open_engines(settings: Settings) -> Engines:
    from worker.rollout.samplers import vllm
    from worker.serve.transformers_engine import TransformersBuilder

    registry, plain = Registry.load(settings.models_file), TransformersBuilder(settings)
    builders: dict[str, Builder] = {"transformers": plain, "fleet": FleetBuilder(settings)}
    if vllm.installed():
        from worker.serve.vllm_builder import VllmBuilder

        builders["vllm"] = served = VllmBuilder(settings)
        for problem in served.problems(registry):
            log.warning("%s", problem)
    blobs = blobs_of(settings)
    folders = AdapterFolders(blobs, (settings.data_dir / "adapters").resolve())
    wholes = AdapterFolders(blobs, (settings.data_dir / "tuned-models").resolve(), kept=MODELS_KEPT)
    return Engines(settings, registry, builders, folders, wholes, device=plain.device)


def serve(settings: Settings, listening: socket.socket, *, idle_seconds: float = 0.0) -> None:
    """Serve on this socket until a signal, then complete requests in flight; or until idle for `idle_seconds`."""
    engines = open_engines(settings)
    app = create_app(engines, settings.inference_key)
    config = uvicorn.Config(
        app,
        log_config=None,  # which would set levels for the whole process while others start
        log_level="warning",
        timeout_graceful_shutdown=DRAIN_SECONDS,
        **connection_options(settings),
    )
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
