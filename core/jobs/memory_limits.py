"""The sizes that out-of-memory errors lowered for a model's jobs, with which its next jobs of the same kind begin.

worker/recording/plan_record.py writes them. Those of one job are in `jobs.memory`, and are not touched here.
"""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.tables import MemoryLimit, now

VALID_SECONDS = 7 * 24 * 3600


def is_valid(limit: MemoryLimit) -> bool:
    """Whether further jobs begin with it."""
    return limit.updated_at >= now() - VALID_SECONDS


def valid_ones(session: Session) -> Sequence[MemoryLimit]:
    """Return those that further jobs begin with, newest first."""
    newest = select(MemoryLimit).order_by(MemoryLimit.updated_at.desc(), MemoryLimit.model)
    return [limit for limit in session.scalars(newest) if is_valid(limit)]


def forget(session: Session, model: str, device: str | None = None) -> Sequence[MemoryLimit]:
    """Delete those of a model, and return them.

    Args:
        device: its name. None: of all devices.
    """
    chosen = select(MemoryLimit).where(MemoryLimit.model == model)
    if device is not None:
        chosen = chosen.where(MemoryLimit.device == device)
    found = session.scalars(chosen).all()
    for limit in found:
        session.delete(limit)
    return found
