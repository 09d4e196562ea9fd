"""Keyset pagination: a page starts right after a row that the client names, at constant cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnExpressionArgument, Select, delete, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.database.tables import PastCursor, Project
from core.errors import InvalidRequest

T = TypeVar("T")

KEEP_PAST_CURSORS_SECONDS = 30 * 86400


def keep_order(session: Session, project_id: str) -> None:
    """Lock a project's lists before adding a row, so that rows become visible in the order of `seq`.

    The sequence advances on insert but rows become visible on commit, so without the lock PostgreSQL could show row 8
    before row 7, which a client that polls after row 8 would then miss. The lock is the project's row, until the
    commit.
    Events need none: their writers lock the row of their job.
    """
    session.execute(
        # NO KEY UPDATE: does not block inserts of rows with a foreign key to the project.
        select(Project.id).where(Project.id == project_id).with_for_update(key_share=True)
    )


@dataclass(frozen=True)
class Page(Generic[T]):
    """One page of a list, and whether more follow."""

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
    """At most `limit` rows of `statement`, newest first, starting after the row `after`.

    `statement` selects `table` and has the filters; an index on the filtered columns and `seq` makes every page cost
    the same. A concurrently inserted row sorts before the page, so later pages neither repeat nor skip one. `id_column`
    is compared with `after` (default: `table.id`). `cursors` selects the valid values of `after` if they are more than
    the listed rows. `owner` is the project or the job of the list: `after` may also name a row that `delete_row`
    removed from it.

    Raises:
        InvalidRequest: `after` is not and was not a row of `cursors` (default: `statement`).
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
    """The same list in reverse order."""
    seq = table.seq
    if after is not None:
        named = statement if cursors is None else cursors
        cursor = _cursor(session, named, table, after, id_column, owner)
        # SQLite reuses the number of the newest row after its deletion.
        statement = statement.where(seq >= cursor.seq if cursor.deleted else seq > cursor.seq)
    return _first(session, statement.order_by(seq.asc()), limit)


def delete_row(session: Session, row: Any, *, owner: str) -> None:
    """Delete a row of a list. Its id remains a valid cursor of `owner`'s list for KEEP_PAST_CURSORS_SECONDS."""
    session.add(PastCursor(id=row.id, owner=owner, seq=row.seq))
    session.delete(row)


def forget_past_cursors(session: Session, now: float) -> None:
    """Remove the positions of deleted rows that have expired at this Unix time."""
    before = now - KEEP_PAST_CURSORS_SECONDS
    session.execute(delete(PastCursor).where(PastCursor.deleted_at < before))


def fitting(sizes: Iterable[int], max_bytes: int) -> int:
    """The number of items on a page of at most `max_bytes`, which has the first item whatever its size.

    Args:
        sizes: of the items in their order, in bytes. No size behind the first item that does not fit is read.
    """
    number = total = 0
    for size in sizes:
        total += size
        if number and total > max_bytes:
            break
        number += 1
    return number


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
    """The position of the row `after`. The filters also apply to it, so another project's id is unknown."""
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
    # One more than the limit, to determine has_more.
    rows = session.scalars(statement.limit(limit + 1)).all()
    return Page(rows[:limit], has_more=len(rows) > limit)
