"""Which row a worker claims next: of the project whose turn it is, the one that has waited longest.

A free worker selects, among the projects with a row that may start now, the one with the fewest running rows; among
equals the one whose last turn was longest ago. Without the second rule, a machine with one worker, where nothing runs
during selection, would order by age alone, and a project with a thousand rows would block all others. Projects at their
limit of running rows are skipped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

from sqlalchemy import (
    CTE,
    ColumnElement,
    Integer,
    Select,
    Subquery,
    cast,
    func,
    literal,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from core.claims import Row, due, take
from core.database.engine import db_now, json_text
from core.database.tables import Project, ProjectTurns
from core.tenancy.limits import NO_LIMITS, Limits


@dataclass(frozen=True)
class ClaimQueue(Generic[Row]):
    """The rows of one status that wait for a worker. Methods that take `equal` consider rows with these values only.

    Args:
        table: has an index of its status, the columns of `equal`, its project and `seq`: the cost of a claim does not
            depend on the length of the queue.
        claimed: the status of a claimed row.
        turn: the column of project_turns that counts their claims.
        limit: of the running rows of a project; None: there is none.
        running: the statuses that count toward the limit.
    """

    table: type[Row]
    waiting: str
    claimed: str
    turn: Literal["last_turn", "last_validation", "last_eval_run"]
    limit: Literal["running_jobs", "running_eval_runs"] | None = None
    running: tuple[str, ...] = ()

    # Operations of workers.

    def claim(
        self,
        session: Session,
        *,
        owner: str,
        lease_seconds: float,
        defaults: Limits = NO_LIMITS,
        fits: Callable[[Row], bool] = lambda row: True,
        **equal: str,
    ) -> Row | None:
        """Claim the next row.

        None: none waits, or the next one does not fit. Concurrent callers never claim the same row, and no project
        exceeds its limit; `defaults` applies to projects without their own limits.

        Args:
            fits: whether the worker can take this row now. No row behind one that does not fit is claimed: a worker
                that always had a fitting one would never take it.
        """
        while True:
            with session.begin_nested() as attempt:
                for turn in session.execute(self._turns(defaults, equal)).all():
                    oldest = self._free(aliased(self.table), turn.project_id, equal)
                    row = take(session, self.table, oldest, owner, lease_seconds, status=self.claimed)
                    if row is not None:
                        break
                else:
                    return None
                if not fits(row):
                    attempt.rollback()
                    return None
                if turn.limit is None or not self._exceeds(session, row.project_id, turn.limit):
                    break
                attempt.rollback()  # another worker was faster; now its claim is visible
        self._note_turn(session, row.project_id)
        return row

    def turns(self, session: Session, defaults: Limits = NO_LIMITS, **equal: str) -> Sequence[str]:
        """The projects with a row that may start and capacity to run it, in order of their turn."""
        return session.scalars(self._turns(defaults, equal)).all()

    def _turns(self, defaults: Limits, equal: dict[str, str]) -> Select[str, int | None]:
        """As `turns`, each with its limit."""
        projects = self.each(self.table.project_id, **equal)
        running, limit = self.running_by_project(), self.limit_of_project(defaults)
        count = func.coalesce(running.c.rows, 0)
        oldest = self._free(aliased(self.table), projects.c.value, equal).limit(1).scalar_subquery()
        ready = select(projects.c.value.label("project_id"), oldest.label("seq")).subquery()
        return (
            select(ready.c.project_id, limit.label("limit"))
            .join(Project, Project.id == ready.c.project_id)
            .outerjoin(ProjectTurns, ProjectTurns.project_id == ready.c.project_id)
            .outerjoin(running, running.c.project_id == ready.c.project_id)
            .where(ready.c.seq.is_not(None), or_(limit.is_(None), count < limit))
            .order_by(count, last_turn(self.turn), ready.c.seq)
        )

    # Wake-ups.

    def has_work(self, session: Session, **equal: str) -> bool:
        """Whether a worker could claim a row now, apart from the limits of projects."""
        work = select(self.table.seq).where(self.free(self.table), *self._equal(self.table, equal)).limit(1)
        return session.scalar(work) is not None

    def stamp_wake_up(self, session: Session, older_than: float, **equal: str) -> bool:
        """Record a wake-up on the newest row of each project. False: all were woken in the last `older_than` seconds.

        A woken worker takes rows until none waits. So the time is recorded on one row per project, the newest, which
        waits longest: recording it on ten thousand rows every few seconds would only add load.
        """
        projects, row, stamped = self.each(self.table.project_id, **equal), aliased(self.table), self.table
        newest = self._free(row, projects.c.value, equal).order_by(None).order_by(row.seq.desc()).limit(1)
        candidate = aliased(self.table)
        unstamped = (
            select(candidate.seq)
            .where(candidate.seq.in_(select(newest.scalar_subquery()).select_from(projects)))
            .where(candidate.dispatched_at < db_now() - older_than)
            .with_for_update(skip_locked=True)
        )
        stamp = update(stamped).where(stamped.seq.in_(unstamped)).values(dispatched_at=db_now())
        stamp = stamp.returning(stamped.seq).execution_options(synchronize_session=False)
        return bool(session.scalars(stamp).all())

    # Queries.

    def free(self, table: type[Row]) -> ColumnElement[bool]:
        """Whether a worker may claim the row now, apart from the limits of projects."""
        return (table.status == self.waiting) & due(table)

    def startable(self, defaults: Limits = NO_LIMITS) -> Select[Row]:
        """The rows that a free worker could claim now, unordered."""
        running, limit = self.running_by_project(), self.limit_of_project(defaults)
        return (
            select(self.table)
            .join(Project, Project.id == self.table.project_id)
            .outerjoin(running, running.c.project_id == self.table.project_id)
            .where(self.free(self.table), or_(limit.is_(None), func.coalesce(running.c.rows, 0) < limit))
        )

    def each(self, column: InstrumentedAttribute[str], **equal: str) -> CTE:
        """The distinct values of a column of waiting rows, in `value`, and a NULL: one index lookup per value."""
        where = [self.table.status == self.waiting, *self._equal(self.table, equal)]
        values = select(func.min(column).label("value")).where(*where).cte(recursive=True)
        after = select(func.min(column)).where(*where, column > values.c.value).scalar_subquery()
        return values.union_all(select(after).where(values.c.value.is_not(None)))

    def running_by_project(self) -> Subquery:
        """The number of running rows, in `rows`, of each project that has some."""
        busy = aliased(self.table)
        running = select(busy.project_id, func.count().label("rows")).where(busy.status.in_(self.running))
        return running.group_by(busy.project_id).subquery()

    def limit_of_project(self, defaults: Limits) -> ColumnElement[Any]:
        if self.limit is None:
            return cast(null(), Integer)
        own = cast(json_text(Project.limits, self.limit), Integer)
        default: int | None = getattr(defaults, self.limit)
        return own if default is None else func.coalesce(own, default)

    def _free(
        self, table: type[Row], project_id: ColumnElement[str] | str, equal: dict[str, str]
    ) -> Select[int]:
        """The `seq` of the free rows of a project, oldest first."""
        its_own = [table.project_id == project_id, *self._equal(table, equal)]
        return select(table.seq).where(self.free(table), *its_own).order_by(table.seq)

    def _equal(self, table: type[Row], equal: dict[str, str]) -> list[ColumnElement[bool]]:
        return [getattr(table, name) == value for name, value in equal.items()]

    def _exceeds(self, session: Session, project_id: str, limit: int) -> bool:
        """Whether the project exceeds its limit.

        In PostgreSQL two workers may claim its last place concurrently, without seeing each other's changes. This waits
        until the other one has committed or rolled back, and then counts both.
        """
        # Not FOR UPDATE, which would block inserts of rows with a foreign key to the project.
        session.execute(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))
        running = (self.table.project_id == project_id) & self.table.status.in_(self.running)
        return session.scalars(select(func.count()).where(running)).one() > limit

    def _note_turn(self, session: Session, project_id: str) -> None:
        latest = select(
            func.coalesce(func.max(getattr(aliased(ProjectTurns), self.turn)), 0)
        ).scalar_subquery()
        turns = select(ProjectTurns.project_id).where(ProjectTurns.project_id == project_id)
        # Skipped if another worker is recording the project's turn, which has the same effect without waiting.
        free = turns.with_for_update(skip_locked=True)
        noted = update(ProjectTurns).where(ProjectTurns.project_id.in_(free)).values({self.turn: latest + 1})
        noted = noted.returning(ProjectTurns.project_id).execution_options(synchronize_session=False)
        if session.scalar(noted) is None:  # the project's first turn, or another worker is recording it
            first = select(literal(project_id), latest + 1).where(~turns.exists())
            is_postgresql = session.get_bind().dialect.name == "postgresql"
            if is_postgresql:
                # An insert would wait for that of another worker, whose row it does not see yet.
                first = first.where(func.pg_try_advisory_xact_lock(func.hashtextextended(project_id, 0)))
            insert = postgresql.insert if is_postgresql else sqlite.insert
            new = insert(ProjectTurns).from_select(["project_id", self.turn], first)
            session.execute(new.on_conflict_do_nothing())


def last_turn(turn: Literal["last_turn", "last_validation", "last_eval_run"]) -> ColumnElement[int]:
    """When the project had its last turn, where project_turns is an outer join."""
    return func.coalesce(getattr(ProjectTurns, turn), 0)
