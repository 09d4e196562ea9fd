"""Keyset pagination: a page starts right after a row the caller names, however deep in the table that row is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnExpressionArgument, Select, delete, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.errors import InvalidRequest
from core.models import PastCursor, Project, now

T = TypeVar("T")

KEEP_PAST_CURSORS_SECONDS = 30 * 86400


def keep_order(session: Session, project_id: str) -> None:
    """Call it before adding a row to a project's list: what is added under it appears in the order of `seq`.

    A sequence counts at the insert and rows appear at the commit, so without it PostgreSQL could show row 8, and 7 a
    moment later: behind the cursor of whoever reads the list from its old end, or looks again for what is new. The
    lock is the project's row, until the commit. Events need none: the row of their job is locked by whoever writes.
    """
    session.execute(
        # NO KEY UPDATE: rows that merely refer to the project are inserted meanwhile.
        select(Project.id).where(Project.id == project_id).with_for_update(key_share=True)
    )


@dataclass(frozen=True)
class Page(Generic[T]):
    """One page of a list, and whether there is another after it."""

    items: Sequence[T]
    has_more: bool


def newest_first(
    session: Session,
    statement: Select[T],
    table: Any,
    *,
    after: str | None = None,
    limit: int,
    id_column: InstrumentedAttribute[str] | None = None,
    cursors: Select[T] | None = None,
    owner: str | None = None,
) -> Page[T]:
    """At most `limit` rows of `statement`, those inserted last first, beginning behind the row `after`.

    `statement` selects `table` and carries the filters; an index on its filter and `seq` makes every page cost the
    same. A row inserted meanwhile comes before the page, so following pages neither repeat nor skip one.
    `id_column` is what `after` is compared with, `table.id` unless said. `cursors` are the rows that `after` may
    name, where they are more than those that are listed. `owner` is the project or the job whose list it is: `after`
    may also name a row that `delete_row` took out of it.

    Raises:
        InvalidRequest: `after` is and was no row of `cursors`, which is `statement` unless said.
    """
    seq = table.seq
    if after is not None:
        named = statement if cursors is None else cursors
        statement = statement.where(seq < _cursor(session, named, table, after, id_column, owner).seq)
    return _first(session, statement.order_by(seq.desc()), limit)


def oldest_first(
    session: Session,
    statement: Select[T],
    table: Any,
    *,
    after: str | None = None,
    limit: int,
    id_column: InstrumentedAttribute[str] | None = None,
    cursors: Select[T] | None = None,
    owner: str | None = None,
) -> Page[T]:
    """The same list read from its other end."""
    seq = table.seq
    if after is not None:
        named = statement if cursors is None else cursors
        cursor = _cursor(session, named, table, after, id_column, owner)
        # SQLite gives the number of the newest row, if it was deleted, to the next one.
        statement = statement.where(seq >= cursor.seq if cursor.deleted else seq > cursor.seq)
    return _first(session, statement.order_by(seq.asc()), limit)


def delete_row(session: Session, row: Any, *, owner: str) -> None:
    """Delete a row of a list. Its id stays a cursor of the list of `owner` for KEEP_PAST_CURSORS_SECONDS."""
    session.add(PastCursor(id=row.id, owner=owner, seq=row.seq))
    session.delete(row)


def forget_past_cursors(session: Session) -> None:
    """Remove the places of rows that were deleted long ago."""
    session.execute(delete(PastCursor).where(PastCursor.deleted_at < now() - KEEP_PAST_CURSORS_SECONDS))


@dataclass(frozen=True)
class _Cursor:
    seq: int
    deleted: bool


def _cursor(
    session: Session,
    statement: Select[T],
    table: Any,
    after: str,
    id_column: InstrumentedAttribute[str] | None,
    owner: str | None,
) -> _Cursor:
    """Where the row `after` stands. The filters apply to it too: another project's id is as unknown as any."""
    is_it: ColumnExpressionArgument[bool] = (table.id if id_column is None else id_column) == after
    seq: int | None = session.scalar(statement.with_only_columns(table.seq).where(is_it))
    if seq is not None:
        return _Cursor(seq, deleted=False)
    past = PastCursor.id == after, PastCursor.owner == owner
    seq = None if owner is None else session.scalar(select(PastCursor.seq).where(*past))
    if seq is None:
        raise InvalidRequest(f"No item with id '{after}' in this list.", param="after")
    return _Cursor(seq, deleted=True)


def _first(session: Session, statement: Select[T], limit: int) -> Page[T]:
    # One more than asked, to see whether there is more.
    rows = session.scalars(statement.limit(limit + 1)).all()
    return Page(rows[:limit], has_more=len(rows) > limit)
