"""Leases on the rows that workers claim: jobs, eval runs and pipelines.

A worker holds a `Claim` on its row: the epoch of the row when it was claimed, and a lease that the worker renews. Every
claim, cancel and lost lease increments the epoch, so the writes of an outdated worker fail the comparison.

The lifecycle of each kind of row (core/jobs, core/evals and core/pipelines) decides about its statuses, and which end a
claim. core/turns.py decides which row is claimed next.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Select, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.database.engine import Database, db_now
from core.database.tables import Leased

Row = TypeVar("Row", bound=Leased)
MAX_BACK_OFF = 60.0


@dataclass(frozen=True)
class Claim:
    """The right of one attempt to write to its row. Valid as long as its epoch is that of the row."""

    job_id: str  # or the id of an eval run or a pipeline
    epoch: int
    owner: str


class LeaseLost(Exception):
    """The row was cancelled, or claimed by another worker. Stop, and write nothing more."""


def due(table: type[Row]) -> ColumnElement[bool]:
    """Whether no worker holds the row, and it does not back off."""
    now = select(db_now()).scalar_subquery()  # evaluated once, not per row
    free = or_(table.lease_expires_at.is_(None), table.lease_expires_at < now)
    return (table.next_run_at <= now) & free


def take(
    session: Session, table: type[Row], waiting: Select[int], owner: str, lease_seconds: float, **values: Any
) -> Row | None:
    """Claim the first row of `waiting`, a query of the `seq` of an alias; None: there is none."""
    # SKIP LOCKED: skips a row that another worker is claiming instead of waiting for it. SQLite has no row locks and
    # needs none, since its write transactions are exclusive.
    first = waiting.limit(1).with_for_update(skip_locked=True).scalar_subquery()
    claimed = update(table).where(table.seq == first).returning(table)
    lease = {"lease_owner": owner, "lease_expires_at": db_now() + lease_seconds}
    options = {"synchronize_session": False, "populate_existing": True}
    return session.scalar(
        claimed.values(epoch=table.epoch + 1, **lease, **values).execution_options(**options)
    )


def lock(session: Session, row: Leased) -> None:
    """Lock the row until the commit and refresh it: it may have changed since it was read."""
    session.flush()  # a refresh discards pending changes
    session.refresh(row, with_for_update=True)


def let_go(row: Leased) -> None:
    """End the lease. The epoch stays: the claim may still be needed to see who had the row."""
    row.lease_owner = row.lease_expires_at = None
    row.dispatched_at = 0.0  # no worker was woken for it yet


def put_back(session: Session, row: Leased, after: float = 0.0) -> None:
    """End the lease, and let other workers claim the row after this time."""
    let_go(row)
    row.next_run_at = db_time(session) + after


def back_off(failures: int) -> float:
    return min(2.0 ** min(failures, 10), MAX_BACK_OFF)


def db_time(session: Session) -> float:
    return session.scalars(select(db_now())).one()


def bound_time(
    session: Session,
    column: "InstrumentedAttribute[float] | InstrumentedAttribute[float | None]",
    seconds: float | ColumnElement[float],
) -> None:
    """Let no row have a time later than `seconds` from now: the database's clock has been set back since."""
    latest = db_now() + seconds
    late = update(column.class_).where(column > latest).values({column: latest})
    session.execute(late.execution_options(synchronize_session=False))


@dataclass(frozen=True)
class Leases(Generic[Row]):
    """The leases on the rows of one table.

    Args:
        claimed: the statuses in which a worker may hold a row.
        max_wait: the longest time in seconds until a row that was put back may be claimed.
    """

    table: type[Row]
    claimed: frozenset[str]
    max_wait: float = MAX_BACK_OFF

    # Operations of workers.

    def heartbeat(self, session: Session, claim: Claim, lease_seconds: float) -> bool:
        """Extend the lease by `lease_seconds`. False: the claim has lost the row."""
        return self.write(session, claim, lease_expires_at=db_now() + lease_seconds)

    def write(self, session: Session, claim: Claim, **values: Any) -> bool:
        """Write columns of the row without reading it. False: nothing, because the claim has lost the row."""
        change = update(self.table).where(self._claimed_by(claim)).values(**values).returning(self.table.seq)
        return session.scalar(change.execution_options(synchronize_session=False)) is not None

    def is_current(self, session: Session, claim: Claim) -> bool:
        """Whether the claim still has the row."""
        return session.scalar(select(self.table.seq).where(self._claimed_by(claim))) is not None

    def locked(self, session: Session, claim: Claim) -> Row:
        """The row, locked until the commit.

        Raises:
            LeaseLost: the claim has lost the row.
        """
        row = session.scalar(select(self.table).where(self._claimed_by(claim)).with_for_update())
        if row is None:
            raise LeaseLost(f"{claim.owner} no longer holds {claim.job_id} (epoch {claim.epoch})")
        return row

    @contextmanager
    def fenced(self, database: Database, claim: Claim) -> Iterator[tuple[Session, Row]]:
        """A write transaction that locks the row; all writes of a worker use it.

        Keep it short: it blocks cancel, heartbeat and, on SQLite, every other writer.

        Raises:
            LeaseLost: the claim has lost the row. Nothing was written.
        """
        with database.write() as session:
            yield session, self.locked(session, claim)

    def _claimed_by(self, claim: Claim) -> ColumnElement[bool]:
        # A released validation of a job keeps its status and its epoch, so the owner decides.
        held = self.table.status.in_(self.claimed) & self.table.lease_owner.is_not(None)
        return (self.table.id == claim.job_id) & (self.table.epoch == claim.epoch) & held

    # Operations of the reconciler.

    def expired(self, session: Session) -> Sequence[Row]:
        """Lock the rows of workers whose lease expired, and fence these workers off. The caller puts the rows back."""
        expired = (
            select(self.table)
            .where(self.table.status.in_(self.claimed), self.table.lease_expires_at < db_now())
            .order_by(self.table.seq)
            # A locked row is being written to, so its worker is alive, or another reconciler handles it.
            .with_for_update(skip_locked=True)
            .execution_options(populate_existing=True)
        )
        rows = session.scalars(expired).all()
        for row in rows:
            row.epoch += 1
        return rows

    def extend_leases(self, session: Session, lease_seconds: float) -> Sequence[Row]:
        """Restart all leases after a jump of the database's clock, or an outage in which none could be renewed.

        Returns the rows whose lease has changed.
        """
        expires = self.table.lease_expires_at
        # Skip those renewed since, by their workers or another reconciler.
        fresh = expires.between(db_now() + 0.9 * lease_seconds, db_now() + 1.1 * lease_seconds)
        held = select(self.table).where(self.table.status.in_(self.claimed), expires.is_not(None), ~fresh)
        rows = session.scalars(held.order_by(self.table.seq).with_for_update()).all()
        for row in rows:
            row.lease_expires_at = db_time(session) + lease_seconds
        return rows

    def bound_times(self, session: Session, lease_seconds: float) -> None:
        """Bound the times of all rows after the database's clock was set back."""
        bound_time(session, self.table.lease_expires_at, lease_seconds)
        bound_time(session, self.table.next_run_at, self.max_wait)
        bound_time(session, self.table.dispatched_at, 0.0)
