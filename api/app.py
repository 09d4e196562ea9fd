"""The HTTP service, put together from parts that are passed in."""

from anyio import CapacityLimiter
from fastapi import APIRouter, FastAPI
from sqlalchemy import text
from starlette.exceptions import HTTPException

from api import errors, files, graders, jobs, models, rollouts
from api.deps import Parts, Service
from api.middleware import BodyLimit, RequestHeaders
from api.wire import Error
from core import migrate
from core.blobs import BlobStore
from core.db import Database, Send
from core.registry import Registry
from core.settings import Settings

# Nothing but files is large: a python grader has at most 256 kB.
MOST_JSON_BYTES = 2 << 20
UPLOADS_AT_ONCE = 32

health = APIRouter(tags=["Health"])


@health.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process is up."""
    return {"status": "ok"}


@health.get("/readyz")
def readyz(service: Parts) -> dict[str, str]:
    """Requests can be served: the database answers, and its tables are those of this version."""
    try:
        with service.database.read() as session:
            session.execute(text("SELECT 1"))
        missing = migrate.pending(service.database)
    except Exception as cause:  # whatever the driver raises; its text may hold a host or a password
        raise HTTPException(503, f"The database does not answer: {type(cause).__name__}.") from cause
    if missing:
        raise HTTPException(503, "The database's tables are not those of this version: run the migrations.")
    return {"status": "ok"}


def create_app(
    settings: Settings, database: Database, blobs: BlobStore, registry: Registry, send: Send
) -> FastAPI:
    """The application. It opens nothing and closes nothing: that is for whoever made its parts."""
    app = FastAPI(
        title="regraft",
        description="Reinforcement fine-tuning behind OpenAI's API.",
        docs_url=None,  # the pages behind these two would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        # Takes the place of FastAPI's 422, which we never send.
        responses={"4XX": {"model": Error}},
    )
    app.state.service = Service(settings, database, blobs, registry, send, CapacityLimiter(UPLOADS_AT_ONCE))
    app.include_router(health)
    for resource in (files, jobs, models, graders, rollouts):
        app.include_router(resource.router, prefix="/v1")
    errors.add_handlers(app)
    app.add_middleware(
        BodyLimit,
        most_bytes=MOST_JSON_BYTES,
        streamed_path="/v1/files",
        most_drained=settings.max_upload_bytes,
    )
    app.add_middleware(RequestHeaders)  # the last one added is the outermost
    return app
