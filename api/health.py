"""/healthz and /readyz, for whoever runs the service."""

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from fastapi import APIRouter
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from api.deps import Parts
from api.document import refusals
from core.db import Database
from core.migrate import alembic_config

router = APIRouter(tags=["Health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process is up."""
    return {"status": "ok"}


@router.get("/readyz", responses=refusals(503))
def readyz(service: Parts) -> dict[str, str]:
    """Requests can be served: the database answers, and its tables are those of this version."""
    try:
        migrated = _migrated(service.database)
    except SQLAlchemyError as cause:  # its text may hold a host and a user
        raise HTTPException(503, f"The database does not answer: {type(cause).__name__}.") from cause
    if not migrated:
        raise HTTPException(503, "The tables are not those of this version: run the migrations.")
    return {"status": "ok"}


def _migrated(database: Database) -> bool:
    with database.read() as session:
        connection = session.connection()
        there = MigrationContext.configure(connection).get_current_heads()
        ours = ScriptDirectory.from_config(alembic_config(connection)).get_heads()
    return set(there) == set(ours)
