"""Serve chat completions of the registry's models and their adapters, in OpenAI's protocol, for the API and judges.

A separate process: `regraft-server up` starts it on the first request, and `regraft-server inference` runs it. The API
resolves a model name to weights (core/chat.py); a judge requests a base model by its own name.
"""

import asyncio
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import cast

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as HTTPError

from core.asgi import BodyLimit, CutRequests, until_gone
from core.chat import InternalChat, InternalCompletion, envelope
from core.connections import connection_options
from core.outages import outage
from core.registry import Registry
from core.settings import Settings
from core.storage.store import blobs_of
from core.telemetry import tracing
from worker.serving import chat as own
from worker.serving import serving_metrics
from worker.serving.adapters import (
    MODELS_KEPT,
    SPARED_SECONDS,
    AdapterFolders,
    DiskBudget,
    folder_of_adapters,
)
from worker.serving.engine import Engine
from worker.serving.engines import Builder, EngineRefused, Engines
from worker.serving.fleet_model import FleetBuilder
from worker.serving.handshake import Handshake
from worker.serving.kept_model import KeptModel, ModelChoice
from worker.serving.prompting import refuse_experts
from worker.serving.proxy import CHAT, COMPLETIONS, Proxied
from worker.serving.serving_metrics import Tally
from worker.serving.vllm_server import VllmModel
from worker.sharing.memory_request import MemoryRequest, MemoryRequests

log = logging.getLogger(__name__)

# Limit of answers in flight: 16 times the batch of the transformers engine (64), and as many as vLLM has at most.
# One request has up to 128 answers (core/chat.py).
MAX_ANSWERS = 1024
OVERLOADED_RETRY_AFTER = 5  # seconds
OUTAGE_RETRY_AFTER = 10
MAX_BODY_BYTES = 16 << 20  # the API accepts 2 MiB; a judge's prompt may have a long answer in it


class Places:
    """Counts answers in flight: running, queued, or waiting for their model to load."""

    def __init__(self, most: int) -> None:
        self.most, self._in_flight = most, 0

    @contextmanager
    def take(self, answers: int) -> Iterator[None]:
        """Reserve places for `answers` answers. Raises EngineRefused if too few are free, to bound the waiting time."""
        if self._in_flight + answers > self.most:
            raise EngineRefused(
                f"{self._in_flight} answers are in flight, and this server accepts {self.most} at once; retry later.",
                503,
                code="overloaded",
                retry_after=OVERLOADED_RETRY_AFTER,
            )
        self._in_flight += answers
        try:
            yield
        finally:
            self._in_flight -= answers


def create_app(
    engines: Engines,
    key: str,
    *,
    previous_key: str = "",
    most_answers: int = MAX_ANSWERS,
    body_window_s: float = 30.0,
    is_ready: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """Create the app. /healthz and /readyz are public; all other routes need the key, or the previous one if any.

    `is_ready`: whether the server should get requests. It answers others, too, as well as it can.
    """
    accepted = [f"Bearer {known}".encode() for known in (key, previous_key) if known]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engines.close()

    app = FastAPI(
        title="regraft inference",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        exception_handlers={RequestValidationError: _invalid, HTTPError: _refused},
    )
    app.add_middleware(CutRequests)
    app.state.last_use = time.monotonic()
    places = Places(most_answers)
    app.add_middleware(
        BodyLimit,
        most_bytes=MAX_BODY_BYTES,
        streamed=re.compile("(?!)"),  # no path
        most_drained=MAX_BODY_BYTES,
        least_rate=engines.settings.min_upload_bytes_per_second,
        window_s=body_window_s,
    )

    def checked(request: Request) -> None:
        sent = request.headers.get("authorization", "").encode()
        if not any(secrets.compare_digest(sent, known) for known in accepted):
            raise HTTPException(401, "Incorrect API key provided.")

    @app.get("/healthz")
    async def healthy() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def ready() -> Response:
        return JSONResponse({"status": "ok"}) if is_ready() else JSONResponse({"status": "loading"}, 503)

    @app.post(CHAT, dependencies=[Depends(checked)])
    async def chat(body: InternalChat, request: Request) -> Response:
        return await traced(CHAT, body, request, engines, places)

    @app.post(COMPLETIONS, dependencies=[Depends(checked)])
    async def complete(body: InternalCompletion, request: Request) -> Response:
        return await traced(COMPLETIONS, body, request, engines, places)

    return app


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"][1:])
    return JSONResponse(envelope(400, f"{where}: {first['msg']}"), 400)


async def _refused(request: Request, error: HTTPError) -> JSONResponse:
    return JSONResponse(envelope(error.status_code, error.detail), error.status_code, error.headers)


async def traced(
    route: str,
    body: InternalChat | InternalCompletion,
    request: Request,
    engines: Engines,
    places: Places,
) -> Response:
    """The response, which may be a refusal, in the trace of its request."""
    with tracing.request("POST", request.headers):
        try:
            answer = await answered(body, request, engines, places)
        except EngineRefused as error:
            headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
            refusal = envelope(error.status, str(error), error.code, error.param)
            answer = JSONResponse(refusal, error.status, headers)
        tracing.answered("POST", route, answer.status_code)
        return answer


async def answered(
    body: InternalChat | InternalCompletion, request: Request, engines: Engines, places: Places
) -> Response:
    """The response, which may still be generated. Raises EngineRefused."""
    state = request.app.state
    state.last_use = time.monotonic()
    try:
        begun = await until_gone(request.receive, begin(body, engines, places))
    except EngineRefused as cause:
        serving_metrics.refused(cause.status)
        raise
    except Exception as cause:
        log.exception("%s cannot be loaded", body.served.base_model)
        serving_metrics.refused(500)
        raise failed_to_load(cause) from cause
    if begun is None:
        serving_metrics.left()
        return Response(status_code=499)
    if isinstance(begun, Proxied):
        return begun
    try:
        return await own.response_of(begun, request)
    finally:
        state.last_use = time.monotonic()


async def begin(
    body: InternalChat | InternalCompletion, engines: Engines, places: Places
) -> Proxied | own.ChatInProgress:
    """Load the model and parse the request. Raises EngineRefused if the request cannot be served."""
    arrived = time.perf_counter()
    async with AsyncExitStack() as stack:
        stack.enter_context(places.take(body.answers))
        model, adapter = await stack.enter_async_context(engines.open(body.served))
        if adapter is not None:
            await asyncio.to_thread(refuse_experts, adapter)
        if isinstance(model, VllmModel):
            proxied = await asyncio.to_thread(model.prepare, body, adapter)
            return proxied.hold(stack.pop_all(), Tally(arrived, body.served.base_model, body.answers))
        if isinstance(body, InternalCompletion):
            raise own.only_vllm("prompt", body.served.base_model, COMPLETIONS)
        return await own.begin(body, cast(Engine, model), adapter, arrived, stack)


def failed_to_load(cause: Exception) -> EngineRefused:
    """The refusal for an unexpected error, whose text is for the log only."""
    if (resource := outage(cause)) is not None:
        return EngineRefused(
            f"The inference server cannot use its {resource} now; retry later.",
            503,
            code="model_unavailable",
            retry_after=OUTAGE_RETRY_AFTER,
        )
    return EngineRefused("The model cannot be loaded. The log of the inference server says why.", 500)


def open_engines(settings: Settings, choice: ModelChoice | None = None, *, shares_device: bool) -> Engines:
    """Create without loaded models. Raises InvalidRegistry. `choice`: the only model. None: all of the registry."""
    from worker.packages import vllm_version
    from worker.serving.transformers_engine import TransformersBuilder

    registry = Registry.reloaded(settings.models_file) if choice is None else choice.registry(settings)
    plain = TransformersBuilder(settings)
    builders: dict[str, Builder] = {"transformers": plain, "fleet": FleetBuilder(settings)}
    if vllm_version():
        from worker.serving.vllm_builder import VllmBuilder

        builders["vllm"] = served = VllmBuilder(settings, shares_device=shares_device)
        for problem in served.problems(registry()):
            log.warning("%s", problem)
    blobs = blobs_of(settings)
    budget = DiskBudget(settings.adapter_cache_bytes)
    folders = AdapterFolders(
        blobs, folder_of_adapters(settings), spared_seconds=SPARED_SECONDS, budget=budget
    )
    models = (settings.data_dir / "tuned-models").resolve()
    wholes = AdapterFolders(blobs, models, max_folders=MODELS_KEPT, budget=budget)
    return Engines(settings, registry, builders, folders, wholes, device=plain.device)


def serve(
    settings: Settings,
    listening: socket.socket,
    choice: ModelChoice | None = None,
    *,
    shares_device: bool = False,
    idle_seconds: float = 0.0,
) -> bool:
    """Serve on this socket until a signal, then complete requests in flight; or until idle for `idle_seconds`.

    Args:
        choice: the only model that is served, loaded at the start. None: all, each on its first request.
        shares_device: with jobs, as the process that `regraft-server up` starts.

    Returns:
        Whether it ended because `choice` cannot be loaded, which is logged.
    """
    engines = open_engines(settings, choice, shares_device=shares_device)
    kept = None if choice is None else KeptModel(engines, choice.name)
    handshake = Handshake.of(settings, engines.registry)
    app = create_app(
        engines,
        settings.inference_key,
        previous_key=settings.inference_previous_key,
        is_ready=lambda: handshake.is_complete and (kept is None or kept.is_ready),
    )
    config = uvicorn.Config(
        app,
        log_config=None,  # which would set levels for the whole process while others start
        log_level="warning",
        timeout_graceful_shutdown=settings.drain_requests_seconds,
        **connection_options(settings),
    )
    server = uvicorn.Server(config)

    async def keep(model: KeptModel) -> None:
        await model.keep()
        server.should_exit = True

    async def answer() -> None:
        work = [_watch(server, app, engines, idle_seconds), handshake.complete()]
        if kept is not None:
            work.append(keep(kept))
        tasks = [asyncio.create_task(one) for one in work]
        await server.serve(sockets=[listening])
        for task in tasks:
            task.cancel()

    asyncio.run(answer())
    return kept is not None and kept.has_failed


async def _watch(server: uvicorn.Server, app: FastAPI, engines: Engines, idle_seconds: float) -> None:
    """Release memory that jobs request, and end a server that is idle."""
    requests = MemoryRequests(MemoryRequest.of(engines.settings))
    while not server.should_exit:
        await asyncio.sleep(min(1.0, idle_seconds or 1.0))
        try:
            if requests.is_new():
                await engines.release_idle()
        except Exception:
            # Without this task the server would neither release memory nor exit when it is idle.
            log.exception("the memory of idle models was not released")
        if idle_seconds and not engines.busy and time.monotonic() - app.state.last_use > idle_seconds:
            server.should_exit = True
