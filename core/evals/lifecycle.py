"""The state machine of an eval run. Only this file writes its status, its epoch and its lease.

    queued <──> in_progress ──> completed | failed
       └────────────┴──> canceled

A worker holds a `Claim` on its run (core/claims.py), and runs start in turns of their projects (core/turns.py).
"""

from sqlalchemy import Select, case, delete, select
from sqlalchemy.orm import Session

from core.claims import MAX_BACK_OFF, Claim, Leases, back_off, bound_time, db_time, let_go, lock, put_back
from core.database import pages
from core.database.engine import Work, earliest_now
from core.database.states import EVAL_RUN
from core.database.tables import EvalJournal, EvalPage, EvalRun, now
from core.errors import InvalidRequest
from core.evals import imported
from core.jobs import queue
from core.outages import Resource
from core.outbound import webhooks
from core.tenancy.limits import NO_LIMITS, Limits
from core.turns import ClaimQueue

(WAITING,), (RUNNING,) = EVAL_RUN.waiting, EVAL_RUN.running
PUT_OFF_SECONDS = 120.0  # of a run that its worker cannot begin
LEASES = Leases(EvalRun, EVAL_RUN.leased, max_wait=max(PUT_OFF_SECONDS, MAX_BACK_OFF))
heartbeat, fenced, is_current = LEASES.heartbeat, LEASES.fenced, LEASES.is_current
extend_leases = LEASES.extend_leases
QUEUE = ClaimQueue(
    EvalRun, WAITING, RUNNING, turn="last_eval_run", limit="running_eval_runs", running=EVAL_RUN.running
)
# A run that ends its worker's process by itself, for example by its memory, must not do so for ever.
MAX_LOST_WORKERS = 20
EXPIRED = "batch_expired"  # the error of a batch that was not finished in time
MAX_NOTE = 256  # characters


# Requests of users.


def create(work: Work, run: EvalRun) -> None:
    """Queue a run. One that has failed already is a batch whose input file is invalid."""
    pages.keep_order(work.session, run.project_id)
    work.session.add(run)
    work.session.flush()
    work.record(
        "eval.run.created",
        imported.public_id(run.id),
        {"eval": imported.public_id(run.eval_id), "model": run.model},
    )
    if run.status == WAITING:
        work.wake(queue.EVAL, queue.DEFAULT_QUEUE, run.id)
    elif run.status == "failed":
        webhooks.batch_ended(run, "failed")


def cancel(work: Work, run: EvalRun) -> None:
    """Cancel immediately, regardless of the worker. The items so far are kept. Idempotent.

    Raises:
        InvalidRequest: the run has completed or failed.
    """
    lock(work.session, run)
    if run.status == "canceled":
        return
    if run.status in EVAL_RUN.final:
        kind = "batch" if run.id.startswith("batch_") else "run"
        raise InvalidRequest(
            f"The {kind} {imported.public_id(run.id)} is already {run.status}.", code="invalid_run_state"
        )
    _end(run, "canceled")
    run.epoch += 1
    work.record("eval.run.canceled", imported.public_id(run.id))


def remove(work: Work, run: EvalRun) -> list[str]:
    """Delete a run with its items, and cancel it first. Returns the keys of the blobs to delete after the commit."""
    if run.status not in EVAL_RUN.final:
        cancel(work, run)
    session = work.session
    keys = list(session.scalars(select(EvalPage.blob_key).where(EvalPage.run_id == run.id)))
    session.execute(delete(EvalPage).where(EvalPage.run_id == run.id))
    session.execute(delete(EvalJournal).where(EvalJournal.run_id == run.id))
    run.deleted_at = now()
    run.content = None
    work.record("eval.run.deleted", imported.public_id(run.id))
    return keys


# Operations of workers.


def claim(
    session: Session, *, owner: str, lease_seconds: float, defaults: Limits = NO_LIMITS
) -> Claim | None:
    """Claim the next run; see `ClaimQueue.claim`."""
    run = QUEUE.claim(session, owner=owner, lease_seconds=lease_seconds, defaults=defaults)
    if run is None:
        return None
    run.started_at = run.started_at or now()
    return Claim(run.id, run.epoch, owner)


def canceled_from(session: Session, claim: Claim) -> EvalRun | None:
    """The run, locked, if its user canceled it while the claim had it. Its worker may then still count usage."""
    run = session.scalar(select(EvalRun).where(EvalRun.id == claim.job_id).with_for_update())
    if run is None or (run.status, run.epoch) != ("canceled", claim.epoch + 1):
        return None
    return run


# The ends of a claim. Call these inside `fenced`.


def complete(run: EvalRun) -> None:
    _end(run, "completed")


def fail(run: EvalRun, *, code: str, message: str) -> None:
    """Fail the run permanently. Its items so far are kept."""
    run.error = {"code": code, "message": message}
    _end(run, "failed")


def release(session: Session, run: EvalRun) -> None:
    """The worker stops on request: another one resumes the run at once. Counts as no failure."""
    _put_back(session, run)


def put_off(session: Session, run: EvalRun, *, reason: str) -> None:
    """The worker lacks what the run needs, or a file of the operator is invalid. It waits, and counts no failure."""
    _put_back(session, run, PUT_OFF_SECONDS)
    run.note = f"The run waits: {reason}"[:MAX_NOTE]


def put_off_within(session: Session, run: EvalRun, seconds: float, *, reason: str) -> bool:
    """As `put_off`, of a name that the worker does not know. False, and nothing: none has known it for so long."""
    since = run.unknown_since or db_time(session)
    if db_time(session) - since >= seconds:
        return False
    put_off(session, run, reason=reason)
    run.unknown_since = since
    return True


def wait_for(session: Session, claim: Claim, resource: Resource) -> None:
    """Note what the run waits for; nothing if the claim has lost it."""
    LEASES.write(session, claim, note=f"The run waits for the {resource}.")


def progressed(run: EvalRun) -> None:
    """The run has a new item: forget its failures. Call it inside `fenced`."""
    run.failures = run.lost_workers = 0
    run.note = run.unknown_since = None


def crashed(session: Session, run: EvalRun, *, reason: str, max_failures: int) -> None:
    """The attempt failed or an outage outlasted the patience: retry after a back-off, `max_failures` times in a row.

    A new item resets the count.
    """
    run.failures += 1
    if run.failures > max_failures:
        fail(run, code="internal_error", message=f"The run failed after {run.failures} attempts: {reason}")
        return
    _put_back(session, run, back_off(run.failures))


# Operations of the reconciler.


def bound_times(session: Session, lease_seconds: float) -> None:
    """As `Leases.bound_times`."""
    LEASES.bound_times(session, lease_seconds)
    bound_time(session, EvalRun.unknown_since, 0.0)


def expire_leases(session: Session) -> int:
    """Queue the runs of workers whose lease expired, and return their number.

    The process of a worker ends for many reasons, such as a restart of the service, so this counts as no failure of the
    run. It fails when MAX_LOST_WORKERS in a row have ended before it had a new item.
    """
    runs = LEASES.expired(session)
    for run in runs:
        run.lost_workers += 1
        if run.lost_workers > MAX_LOST_WORKERS:
            message = f"{run.lost_workers} workers in a row stopped while they worked on the run."
            fail(run, code="internal_error", message=message)
            continue
        _put_back(session, run, back_off(run.lost_workers))
        run.note = "The worker of the run stopped. The run is queued again and keeps its items."
    return len(runs)


def expire_batches(session: Session, seconds: float) -> None:
    """End the batches that were created `seconds` ago. Their answers so far are kept."""
    before = earliest_now(session) - seconds
    over = (
        select(EvalRun)
        .where(
            EvalRun.output_due,
            EvalRun.status.in_(EVAL_RUN.unfinished),
            EvalRun.created_at < before,
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


def to_wake(session: Session, *, older_than: float) -> list[tuple[str, str]]:
    """The (task, queue) to send if a run waits that no worker was woken for in the last `older_than` seconds."""
    return [(queue.EVAL, queue.DEFAULT_QUEUE)] if QUEUE.stamp_wake_up(session, older_than) else []


def tasks_waiting(session: Session) -> list[str]:
    """The task with a run that a worker could claim now."""
    return [queue.EVAL] if QUEUE.has_work(session) else []


def startable(defaults: Limits) -> Select[float]:
    """The Unix times since which the runs wait that a free worker could claim now, unordered."""
    # A run that was put back waits since then, or since the end of its back-off.
    since = case((EvalRun.next_run_at > EvalRun.created_at, EvalRun.next_run_at), else_=EvalRun.created_at)
    return QUEUE.startable(defaults).with_only_columns(since)


# Transitions.


def _end(run: EvalRun, status: str) -> None:
    run.status = status
    run.finished_at = now()
    let_go(run)
    run.note = None
    if not run.output_due:  # a batch ends with its files
        webhooks.eval_run_ended(run)


def _put_back(session: Session, run: EvalRun, after: float = 0.0) -> None:
    run.status = WAITING
    run.unknown_since = None
    put_back(session, run, after)
