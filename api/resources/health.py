"""/healthz and /readyz: liveness and readiness probes."""

from fastapi import APIRouter
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from api.http.deps import ServiceDep
from api.http.openapi import refusals
from core.database.engine import READ_ONLY
from core.database.migrate import OLDER_SCHEMA, is_ready
from core.storage.disk import Disks

router = APIRouter(tags=["Health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Liveness: the process is running."""
    return {"status": "ok"}


@router.get("/readyz", responses=refusals(503))
def readyz(service: ServiceDep) -> dict[str, str]:
    """Readiness: a usable schema, a database that accepts writes, free space on the disks, and a usable blob store.

    The blob store is tested once a minute. 503: it refuses the service, as after a change of rights. While it does not
    respond, the service stays ready, because most requests do not need it; the others receive 503.
    """
    try:
        with service.database.read() as session:
            ready = is_ready(session.connection())
        accepts_writes = service.database.accepts_writes()
    except SQLAlchemyError as cause:  # the message may contain a host and a user
        raise HTTPException(503, f"The database does not respond: {type(cause).__name__}.") from cause
    if not ready:
        raise HTTPException(503, OLDER_SCHEMA)
    if not accepts_writes:
        raise HTTPException(503, READ_ONLY)
    if problem := Disks(service.settings).problem():
        raise HTTPException(503, problem)
    if problem := service.store_test.problem(service.settings, service.blobs):
        raise HTTPException(503, problem)
    return {"status": "ok"}
