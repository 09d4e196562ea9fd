"""The state machine of an eval run. Only this file writes its status, its epoch and its lease.

    queued <──> in_progress ──> completed | failed
       └────────────┴──> canceled

As with jobs (core/jobs/lifecycle.py), a worker holds a `Claim`: every claim, cancel and lost lease increments the epoch
of the row, so that the writes of an outdated worker fail the comparison.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Integer, Select, case, cast, delete, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from core.database import pages
from core.database.engine import Database, Work, db_now, json_text
from core.database.tables import EvalJournal, EvalPage, EvalRun, Project, now
from core.errors import InvalidRequest
from core.evals import imported
from core.jobs import queue
from core.jobs.claim import Claim, LeaseLost, bound_time
from core.outages import Resource
from core.outbound import webhooks
from core.tenancy.limits import NO_LIMITS, Limits

WAITING, RUNNING = "queued", "in_progress"
FINAL = frozenset({"completed", "failed", "canceled"})
MAX_BACK_OFF = 60.0
# A run that ends its worker's process by itself, for example by its memory, must not do so for ever.
MAX_LOST_WORKERS = 20
EXPIRED = "batch_expired"  # the error of a batch that was not finished in time


# Requests of users.


def create(work: Work, run: EvalRun) -> None:
    """Queue a run."""
    pages.keep_order(work.session, run.project_id)
    work.session.add(run)
    work.session.flush()
    work.record(
        "eval.run.created", imported.shown(run.id), {"eval": imported.shown(run.eval_id), "model": run.model}
    )
    if run.status == WAITING:
        work.wake(queue.EVAL, queue.DEFAULT_QUEUE, run.id)


def cancel(work: Work, run: EvalRun) -> None:
    """Cancel immediately, regardless of the worker. The items so far are kept. Idempotent.

    Raises:
        InvalidRequest: the run has completed or failed.
    """
    _lock(work.session, run)
    if run.status == "canceled":
        return
    if run.status in FINAL:
        raise InvalidRequest(
            f"The run {imported.shown(run.id)} is already {run.status}.", code="invalid_run_state"
        )
    _end(run, "canceled")
    run.epoch += 1
    work.record("eval.run.canceled", imported.shown(run.id))


def remove(work: Work, run: EvalRun) -> list[str]:
    """Delete a run with its items, and cancel it first. Returns the keys of the blobs to delete after the commit."""
    if run.status not in FINAL:
        cancel(work, run)
    session = work.session
    keys = list(session.scalars(select(EvalPage.blob_key).where(EvalPage.run_id == run.id)))
    session.execute(delete(EvalPage).where(EvalPage.run_id == run.id))
    session.execute(delete(EvalJournal).where(EvalJournal.run_id == run.id))
    run.deleted_at = now()
    run.content = None
    work.record("eval.run.deleted", imported.shown(run.id))
    return keys


# Operations of workers.


def claim(
    session: Session, *, owner: str, lease_seconds: float, defaults: Limits = NO_LIMITS
) -> Claim | None:
    """Claim the next run: of the project with the fewest running ones, then of the one whose turn is longest ago.

    None: no run may start. No project exceeds its `running_eval_runs`.
    """
    for project_id in _turns(session, defaults):
        if _at_limit(session, project_id, defaults):
            continue
        candidate = aliased(EvalRun)
        oldest = (
            select(candidate.seq)
            .where(_free(candidate), candidate.project_id == project_id)
            .order_by(candidate.seq)
            .limit(1)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        take = (
            update(EvalRun)
            .where(EvalRun.seq == oldest)
            .values(
                status=RUNNING,
                epoch=EvalRun.epoch + 1,
                lease_owner=owner,
                lease_expires_at=db_now() + lease_seconds,
                started_at=func.coalesce(EvalRun.started_at, now()),
            )
            .returning(EvalRun)
            .execution_options(synchronize_session=False, populate_existing=True)
        )
        run = session.scalar(take)
        if run is not None:
            latest = select(func.max(aliased(Project).last_eval_run)).scalar_subquery()
            session.execute(
                update(Project)
                .where(Project.id == project_id)
                .values(last_eval_run=latest + 1)
                .execution_options(synchronize_session=False)
            )
            return Claim(run.id, run.epoch, owner)
    return None


def heartbeat(session: Session, claim: Claim, lease_seconds: float) -> bool:
    """Extend the lease by `lease_seconds`. False: the claim has lost the run."""
    renewal = (
        update(EvalRun)
        .where(EvalRun.id == claim.job_id, EvalRun.epoch == claim.epoch, EvalRun.status == RUNNING)
        .values(lease_expires_at=db_now() + lease_seconds)
        .returning(EvalRun.seq)
        .execution_options(synchronize_session=False)
    )
    return session.scalar(renewal) is not None


@contextmanager
def fenced(database: Database, claim: Claim) -> Iterator[tuple[Session, EvalRun]]:
    """A write transaction that locks the run's row; all writes of a worker use it.

    Raises:
        LeaseLost: the claim has lost the run. Nothing was written.
    """
    with database.write() as session:
        run = session.scalar(select(EvalRun).where(EvalRun.id == claim.job_id).with_for_update())
        if run is None or run.status != RUNNING or run.epoch != claim.epoch:
            raise LeaseLost(f"{claim.owner} no longer holds {claim.job_id} (epoch {claim.epoch})")
        yield session, run


def canceled_from(session: Session, claim: Claim) -> EvalRun | None:
    """The run, locked, if its user canceled it while the claim had it. Its worker may then still count usage."""
    run = session.scalar(select(EvalRun).where(EvalRun.id == claim.job_id).with_for_update())
    if run is None or (run.status, run.epoch) != ("canceled", claim.epoch + 1):
        return None
    return run


def is_held(session: Session, claim: Claim) -> bool:
    """Whether the claim still has the run."""
    state = session.execute(select(EvalRun.epoch, EvalRun.status).where(EvalRun.id == claim.job_id)).one()
    return (state.epoch, state.status) == (claim.epoch, RUNNING)


# The ends of a claim. Call these inside `fenced`.


def complete(run: EvalRun) -> None:
    _end(run, "completed")


def fail(run: EvalRun, *, code: str, message: str) -> None:
    """Fail the run permanently. Its items so far are kept."""
    run.error = {"code": code, "message": message}
    _end(run, "failed")


def release(session: Session, run: EvalRun) -> None:
    """The worker stops on request: another one resumes the run at once. Counts as no failure."""
    _put_back(run)
    run.next_run_at = session.scalars(select(db_now())).one()


def wait_for(session: Session, claim: Claim, resource: Resource) -> None:
    """Note what the run waits for; nothing if the claim has lost it."""
    noted = (
        update(EvalRun)
        .where(EvalRun.id == claim.job_id, EvalRun.epoch == claim.epoch, EvalRun.status == RUNNING)
        .values(note=f"The run waits for the {resource}.")
    )
    session.execute(noted.execution_options(synchronize_session=False))


def progressed(run: EvalRun) -> None:
    """The run has a new item: forget its failures. Call it inside `fenced`."""
    run.failures = run.lost_workers = 0
    run.note = None


def crashed(session: Session, run: EvalRun, *, reason: str, max_failures: int) -> None:
    """The attempt failed or an outage outlasted the patience: retry after a back-off, `max_failures` times in a row.

    A new item resets the count.
    """
    run.failures += 1
    if run.failures > max_failures:
        fail(run, code="internal_error", message=f"The run failed after {run.failures} attempts: {reason}")
        return
    _put_back(run)
    run.next_run_at = session.scalars(select(db_now())).one() + min(2**run.failures, MAX_BACK_OFF)


# Operations of the reconciler.


def expire_leases(session: Session) -> int:
    """Queue the runs of workers whose lease expired, and return their number.

    The process of a worker ends for many reasons, such as a restart of the service, so this counts as no failure of the
    run. It fails when MAX_LOST_WORKERS in a row have ended before it had a new item.
    """
    expired = (
        select(EvalRun)
        .where(EvalRun.status == RUNNING, EvalRun.lease_expires_at < db_now())
        .order_by(EvalRun.seq)
        .with_for_update(skip_locked=True)
        .execution_options(populate_existing=True)
    )
    runs = session.scalars(expired).all()
    for run in runs:
        run.epoch += 1
        run.lost_workers += 1
        if run.lost_workers > MAX_LOST_WORKERS:
            message = f"{run.lost_workers} workers in a row stopped while they worked on the run."
            fail(run, code="internal_error", message=message)
            continue
        _put_back(run)
        run.next_run_at = session.scalars(select(db_now())).one() + min(2**run.lost_workers, MAX_BACK_OFF)
        run.note = "The worker of the run stopped. The run is queued again and keeps its items."
    return len(runs)


def expire_batches(session: Session, seconds: float) -> None:
    """End the batches that were created `seconds` ago. Their answers so far are kept."""
    over = (
        select(EvalRun)
        .where(
            EvalRun.output_due, EvalRun.status.in_((WAITING, RUNNING)), EvalRun.created_at < now() - seconds
        )
        .order_by(EvalRun.seq)
        .with_for_update(skip_locked=True)
        .execution_options(populate_existing=True)
    )
    for run in session.scalars(over).all():
        run.error = {
            "code": EXPIRED,
            "message": "The batch was not finished before the end of its completion window.",
        }
        _end(run, "canceled")
        run.epoch += 1


def give_time(session: Session, lease_seconds: float) -> None:
    """Restart all leases after a jump of the database's clock, or an outage in which none could be renewed."""
    renew = update(EvalRun).where(EvalRun.status == RUNNING).values(lease_expires_at=db_now() + lease_seconds)
    session.execute(renew.execution_options(synchronize_session=False))


def bound_times(session: Session, lease_seconds: float) -> None:
    """As of jobs (core/jobs/lifecycle.py)."""
    bound_time(session, EvalRun.lease_expires_at, lease_seconds)
    bound_time(session, EvalRun.next_run_at, MAX_BACK_OFF)
    bound_time(session, EvalRun.dispatched_at, 0.0)


def to_wake(session: Session, *, older_than: float) -> list[tuple[str, str]]:
    """The (task, queue) to send if a run waits that no worker was woken for in the last `older_than` seconds."""
    newest = select(func.max(EvalRun.seq)).where(_free(EvalRun)).scalar_subquery()
    stamp = (
        update(EvalRun)
        .where(EvalRun.seq == newest, EvalRun.dispatched_at < db_now() - older_than)
        .values(dispatched_at=db_now())
        .returning(EvalRun.seq)
        .execution_options(synchronize_session=False)
    )
    return [(queue.EVAL, queue.DEFAULT_QUEUE)] if session.scalars(stamp).all() else []


def tasks_waiting(session: Session) -> list[str]:
    """The task with a run that a worker could claim now."""
    return (
        [queue.EVAL] if session.scalar(select(EvalRun.seq).where(_free(EvalRun)).limit(1)) is not None else []
    )


# Transitions.


def _lock(session: Session, run: EvalRun) -> None:
    session.flush()  # a refresh discards pending changes
    session.refresh(run, with_for_update=True)


def _end(run: EvalRun, status: str) -> None:
    run.status = status
    run.finished_at = now()
    run.lease_owner = run.lease_expires_at = run.note = None
    if not run.output_due:  # a batch ends with its files
        webhooks.eval_run_ended(run)


def _put_back(run: EvalRun) -> None:
    run.status = WAITING
    run.lease_owner = run.lease_expires_at = None
    run.next_run_at = run.dispatched_at = 0.0


# Choosing.


def _free(run: type[EvalRun]) -> ColumnElement[bool]:
    # A subquery, so that the clock is evaluated once, not per row.
    return (run.status == WAITING) & (run.next_run_at <= select(db_now()).scalar_subquery())


def startable(defaults: Limits) -> Select[float]:
    """The Unix times since which the runs wait that a free worker could claim now, unordered."""
    claimable, _ = _claimable(defaults)
    # A run that was put back waits since then, or since the end of its back-off.
    since = case((EvalRun.next_run_at > EvalRun.created_at, EvalRun.next_run_at), else_=EvalRun.created_at)
    return claimable.with_only_columns(since)


def _turns(session: Session, defaults: Limits) -> Sequence[str]:
    """The projects with a free run, in the order of their turn."""
    claimable, busy = _claimable(defaults)
    order = (
        claimable.with_only_columns(EvalRun.project_id)
        .group_by(EvalRun.project_id, busy, Project.last_eval_run)
        .order_by(busy, Project.last_eval_run, func.min(EvalRun.seq))
    )
    return session.scalars(order).all()


def _claimable(defaults: Limits) -> tuple[Select[EvalRun], ColumnElement[int]]:
    """The free runs of projects below their limit, and how many runs such a project has in progress."""
    running = (
        select(EvalRun.project_id, func.count().label("runs"))
        .where(EvalRun.status == RUNNING)
        .group_by(EvalRun.project_id)
        .subquery()
    )
    busy, limit = func.coalesce(running.c.runs, 0), _limit(defaults)
    runs = (
        select(EvalRun)
        .join(Project, Project.id == EvalRun.project_id)
        .outerjoin(running, running.c.project_id == EvalRun.project_id)
        .where(_free(EvalRun), or_(limit.is_(None), busy < limit))
    )
    return runs, busy


def _limit(defaults: Limits) -> ColumnElement[Any]:
    own = cast(json_text(Project.limits, "running_eval_runs"), Integer)
    return own if defaults.running_eval_runs is None else func.coalesce(own, defaults.running_eval_runs)


def _at_limit(session: Session, project_id: str, defaults: Limits) -> bool:
    """Count the project's runs again behind a lock, so that concurrent claims do not exceed its limit."""
    limit = session.scalar(select(_limit(defaults)).where(Project.id == project_id))
    if limit is None:
        return False
    session.execute(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))
    count = select(func.count()).where(EvalRun.project_id == project_id, EvalRun.status == RUNNING)
    return session.scalars(count).one() >= int(limit)
