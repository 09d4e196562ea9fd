"""The HTTP application, assembled from the components that are passed in."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import anyio
from anyio import CapacityLimiter
from fastapi import FastAPI
from starlette.routing import BaseRoute

from api import azure
from api.http import console, docs_site, errors
from api.http.admission import FILE_READS, UPLOADS, Admission
from api.http.deps import Service, key_owner
from api.http.grader_loop import GraderLoop
from api.http.json_bodies import UniqueKeysRouter
from api.http.json_responses import JSON
from api.http.large_bodies import LargeBodies
from api.http.middleware import RequestHeaders
from api.http.openapi import Documented
from api.http.rate_limits import LocalRates, Rates
from api.http.request_metrics import Measured
from api.http.shapes import Error
from api.http.shutdown import Shutdown
from api.pipelines.driver import PipelineDriver
from api.resources import (
    aliases,
    archive,
    attempts,
    attribution,
    batches,
    chat,
    completions,
    curves,
    embeddings,
    episode_responses,
    episodes,
    estimates,
    eval_compare,
    eval_import,
    eval_runs,
    evals,
    files,
    grader_audits,
    graders,
    health,
    job_compare,
    job_request,
    job_validation,
    jobs,
    ledgers,
    model_checks,
    models,
    operator,
    organization,
    passports,
    permissions,
    pipelines,
    previews,
    profiles,
    project_stream,
    regrades,
    responses,
    rollouts,
    sessions,
    stored_graders,
    stream,
    uploads,
    usage,
    webhooks,
)
from core.asgi import BodyLimit, CutRequests
from core.database.engine import Database, Send
from core.registry import Registry
from core.reloaded import Reloaded
from core.settings import Settings
from core.storage.store import BlobStore
from graders.backends import Backends

# Only file uploads are larger: a python grader has at most 256 kB.
MAX_JSON_BYTES = 2 << 20
# A larger body requires a valid key and a place in `Admission`.
SMALL_JSON_BYTES = 64 << 10
STREAMED = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts")
STREAM_READERS = 4
DESCRIPTION = "Reinforcement fine-tuning behind OpenAI's API."


def create_app(
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    registry: Registry | Reloaded[Registry],
    backends: Backends | Reloaded[Backends],
    send: Send,
    rates: Rates | None = None,
) -> FastAPI:
    """Build the application. The caller opens and closes the components.

    Without `rates`, requests are counted in this process.
    """
    app = Documented(
        title="regraft",
        description=DESCRIPTION,
        docs_url=None,  # FastAPI's own pages would load scripts from elsewhere; /docs is api/http/docs_site.py
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        default_response_class=JSON,
    )
    admission = Admission(settings)
    app.state.service = Service(
        settings,
        database,
        blobs,
        registry,
        backends,
        send,
        rates=rates or LocalRates(),
        admission=admission,
        upload_threads=CapacityLimiter(UPLOADS),
        stream_readers=CapacityLimiter(STREAM_READERS),
        file_readers=CapacityLimiter(FILE_READS),
        graders=GraderLoop(),
        shutdown=Shutdown(),
    )
    app.state.upstream = chat.Upstream(settings)
    app.state.runs = episodes.EpisodeRuns()
    app.router.routes.extend(all_routes())
    app.include_router(docs_site.router(settings.docs_site))
    app.include_router(console.router(settings.console_site, single_sign_on=bool(settings.sso_header)))
    errors.add_handlers(app)
    _add_middleware(app, settings, admission)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(PipelineDriver(app.state.service).run)
        yield
        tasks.cancel_scope.cancel()
    await app.state.upstream.close()
    await app.state.runs.close()
    app.state.service.graders.close()


def _add_middleware(app: FastAPI, settings: Settings, admission: Admission) -> None:
    """Add it from the innermost to the outermost."""
    app.add_middleware(
        LargeBodies,
        small=SMALL_JSON_BYTES,
        streamed=STREAMED,
        owner=key_owner,
        arriving=admission.arriving_bodies,
        parsed=admission.parsed_bodies,
    )
    app.add_middleware(
        BodyLimit,
        most_bytes=MAX_JSON_BYTES,
        streamed=STREAMED,
        most_drained=settings.max_upload_bytes,
        least_rate=settings.min_upload_bytes_per_second,
    )
    app.add_middleware(azure.AzurePaths)  # before everything that reads the path
    app.add_middleware(CutRequests)
    app.add_middleware(RequestHeaders)
    app.add_middleware(Measured)


# Below /v1, in the order in which their paths are matched and documented.
RESOURCES = (
    files,
    uploads,
    jobs,
    permissions,
    attempts,
    episodes,
    episode_responses,
    estimates,
    previews,
    models,
    aliases,
    model_checks,
    profiles,
    chat,
    completions,
    responses,
    embeddings,
    batches,
    graders,
    grader_audits,
    stored_graders,
    rollouts,
    attribution,
    job_compare,
    curves,
    ledgers,
    regrades,
    archive,
    passports,
    evals,
    eval_runs,
    eval_compare,
    eval_import,
    pipelines,
    webhooks,
    organization,
    operator,
    usage,
    sessions,
    project_stream,
    stream,
    job_request,
    job_validation,
)


@cache
def all_routes() -> list[BaseRoute]:
    """Build all routes once per process: it takes half a second, and they hold no state of an application."""
    # 4XX keeps FastAPI from documenting its 422, which we never return; the document then names each status.
    router = UniqueKeysRouter(responses={"4XX": {"model": Error}}, default_response_class=JSON)
    router.include_router(health.router)
    for resource in RESOURCES:
        router.include_router(resource.router, prefix="/v1")
    router.include_router(azure.router)
    return router.routes
