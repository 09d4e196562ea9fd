"""When a worker counts as silent, as an expression for queries."""

from sqlalchemy import ColumnElement

from core.database.engine import db_now
from core.database.tables import Worker

REPORT_SECONDS = 15.0
# Three reports are missing: the process was killed, its machine is gone, or it does not reach the database.
SILENT_SECONDS = 3 * REPORT_SECONDS


def reports_itself() -> ColumnElement[bool]:
    """Whether the process of a row of `workers` still reports itself."""
    return Worker.seen_at >= db_now() - SILENT_SECONDS
