"""/healthz and /readyz, for whoever runs the service."""

from fastapi import APIRouter
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from api.deps import Parts
from api.document import refusals
from core.disk import Disks
from core.migrate import is_ready

router = APIRouter(tags=["Health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process is up."""
    return {"status": "ok"}


@router.get("/readyz", responses=refusals(503))
def readyz(service: Parts) -> dict[str, str]:
    """Requests can be served: the database answers with tables of this version or a later one, and disks have room."""
    try:
        with service.database.read() as session:
            ready = is_ready(session.connection())
    except SQLAlchemyError as cause:  # its text may hold a host and a user
        raise HTTPException(503, f"The database does not answer: {type(cause).__name__}.") from cause
    if not ready:
        raise HTTPException(503, "The tables are not those of this version: run the migrations.")
    if problem := Disks(service.settings).problem():
        raise HTTPException(503, problem)
    return {"status": "ok"}
