"""The state machine of a job. Only this file writes its status, its epoch and its lease.

    validating_files ──> queued <──> running ──> succeeded
                         │    ^         │
                         v    │         v
                         paused <─── pausing

failed is reached from the states with a worker, cancelled from every state that is not final.

A worker holds a `Claim` on its job: the epoch of the row when the job was claimed. Every claim, cancel and lost lease
increments the row's epoch, so the writes of an outdated worker fail the comparison.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from core.database import pages
from core.database.engine import Database, WakeMessage, Work, db_now, json_text
from core.database.pages import Page
from core.database.tables import Attempt, File, Job, Project, now
from core.errors import InvalidJobState, JobNotFound
from core.jobs import budgets, events, fairness, queue, usage
from core.jobs.claim import Claim, LeaseLost, bound_time
from core.outbound import webhooks
from core.telemetry import logs, tracing
from core.tenancy.limits import NO_LIMITS, Limits

EDGES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "validating_files": frozenset({"queued", "failed", "cancelled"}),
        "queued": frozenset({"running", "paused", "cancelled"}),
        "running": frozenset({"queued", "pausing", "succeeded", "failed", "cancelled"}),
        # A run may end before it sees the request to pause.
        "pausing": frozenset({"paused", "succeeded", "failed", "cancelled"}),
        "paused": frozenset({"queued", "cancelled"}),
        "succeeded": frozenset(),
        "failed": frozenset(),
        "cancelled": frozenset(),
    }
)
FINAL = frozenset(status for status, further in EDGES.items() if not further)
# States in which a worker may hold the job.
HELD = frozenset({"validating_files", "running", "pausing"})

STARTED, RESUMED = "Fine-tuning job started", "Fine-tuning job resumed"
RESUMING = "Resuming fine-tuning job, moving job to queued state"
MAX_BACK_OFF = 60.0
# Limit for the event of a crashed run and the error of a job; the run's log has the rest.
MAX_CRASH_MESSAGE = 400


# Requests of users.


def create(
    work: Work,
    *,
    project: Project,
    model: str,
    training_file: File,
    validation_file: File | None,
    suffix: str | None,
    seed: int,
    metadata: dict[str, str] | None,
    method: str = "reinforcement",
    body: dict[str, Any],
    parent: dict[str, Any] | None = None,
    gpu_class: str,
    budget: dict[str, Any] | None = None,
) -> Job:
    """Create a job and its first events. A worker validates its files next."""
    job = Job(
        organization_id=project.organization_id,
        project_id=project.id,
        model=model,
        training_file=training_file.id,
        validation_file=validation_file.id if validation_file else None,
        suffix=suffix,
        seed=seed,
        metadata_=metadata,
        method=method,
        body=body,
        parent=parent,
        gpu_class=gpu_class,
        budget=budget,
        status="validating_files",
    )
    pages.keep_order(work.session, project.id)
    work.session.add(job)
    work.session.flush()  # assigns the id
    events.append(work.session, job.id, f"Created fine-tuning job: {job.id}")
    files = f"training file: {training_file.id}"
    if validation_file:
        files += f" and validation file: {validation_file.id}"
    if parent is not None:
        start = f"Starts from {parent['model']} (step {parent['step']} of {parent['job_id']})"
        events.append(work.session, job.id, start)
    events.append(work.session, job.id, f"Validating {files}")
    work.record("job.created", job.id, {"model": model, "training_file": training_file.id})
    tracing.job_created(job.id)
    work.wake(queue.VALIDATE, queue.DEFAULT_QUEUE, job.id)
    return job


def get(session: Session, project_id: str, job_id: str) -> Job:
    """Return the project's job; raise JobNotFound also for another project's."""
    job = session.scalar(select(Job).where(Job.id == job_id, Job.project_id == project_id))
    if job is None:
        raise JobNotFound(job_id)
    return job


def page(
    session: Session,
    project_id: str,
    *,
    after: str | None = None,
    limit: int,
    metadata: Mapping[str, str] | None = None,
    without_metadata: bool = False,
) -> Page[Job]:
    """List jobs newest first; filters by all pairs of `metadata`, or by jobs without any."""
    statement = mine = select(Job).where(Job.project_id == project_id)
    for key, value in (metadata or {}).items():
        statement = statement.where(json_text(Job.metadata_, key) == value)
    if without_metadata:
        statement = statement.where(Job.metadata_.is_(None))
    return pages.newest_first(session, statement, Job, after=after, limit=limit, cursors=mine)


def cancel(work: Work, job: Job) -> None:
    """Cancel immediately, regardless of the worker. Idempotent."""
    _lock(work.session, job)
    if job.status == "cancelled":
        return
    _move(job, "cancelled")
    _end_attempt(work.session, job, "cancelled")
    job.epoch += 1
    events.append(work.session, job.id, "Fine-tuning job cancelled")
    work.record("job.cancelled", job.id)


def pause(work: Work, job: Job) -> None:
    """Pause a waiting job at once, or a running one at its next checkpoint."""
    _lock(work.session, job)
    if job.status in ("pausing", "paused"):
        return
    if job.status == "queued":
        _move(job, "paused")
        events.append(work.session, job.id, "Fine-tuning job paused")
    else:
        _move(job, "pausing")
        events.append(work.session, job.id, "Pausing fine-tuning job")
    work.record("job.paused", job.id)


def resume(work: Work, job: Job) -> None:
    """Queue a paused job, which will resume from its last checkpoint."""
    _lock(work.session, job)
    if job.status != "paused":  # EDGES would also allow a running job to be queued
        raise _refusal(job, "queued")
    if job.budget is not None:
        budgets.refuse_if_reached(job, usage.captured_gpu_seconds(work.session, job))
    _move(job, "queued")
    events.append(work.session, job.id, RESUMING)
    webhooks.emit(job, webhooks.RESUMED)
    work.record("job.resumed", job.id)
    work.wake(queue.RUN, queue.gpu_queue(job.gpu_class), job.id)


def set_budget(work: Work, job: Job, budget: dict[str, Any] | None) -> None:
    """Set or remove the cap (from `budgets.stored`), effective from the end of the current step. Does not resume."""
    _lock(work.session, job)
    if job.status in FINAL:
        raise _refusal(job, job.status)
    job.budget = budget
    events.append(work.session, job.id, budgets.changed(budget))
    work.record("job.budget_changed", job.id, {"budget": budget})


# Operations of workers.


def claim(
    session: Session,
    *,
    gpu_class: str,
    owner: str,
    lease_seconds: float,
    defaults: Limits = NO_LIMITS,
    fits: Callable[[Job], bool] = lambda job: True,
) -> Claim | None:
    """Claim the next job of this class in fair order (core/jobs/fairness.py).

    None: no job is waiting, or the next one does not fit. Concurrent callers never claim the same job, and no project
    exceeds its `running_jobs`; `defaults` applies to projects without their own limits.

    Args:
        fits: whether the worker can take this job now. No job behind one that does not fit is claimed: a worker that
            always had a fitting one would never take it.
    """
    while True:
        with session.begin_nested() as attempt:
            # Sets the status without _move: choosing and claiming must be one statement.
            for project_id in fairness.turns(session, gpu_class, defaults):
                oldest = fairness.oldest(project_id, gpu_class)
                job = _take(session, oldest, owner, lease_seconds, status="running")
                if job is not None:
                    break
            else:
                return None
            if not fits(job):
                attempt.rollback()
                return None
            if not fairness.oversubscribed(session, job.project_id, defaults):
                break
            attempt.rollback()  # another worker was faster; now its claim is visible
    fairness.note_turn(session, job.project_id, "last_turn")
    _begin_attempt(session, job, "run")
    if job.started_at is None:
        job.started_at = now()
        events.append(session, job.id, STARTED)
    else:
        events.append(session, job.id, RESUMED, data={"attempt": _runs(session, job)})
    return Claim(job.id, job.epoch, owner)


def claim_validation(session: Session, *, owner: str, lease_seconds: float) -> Claim | None:
    """Claim a job for file validation, of the project whose turn it is (core/jobs/fairness.py)."""
    for project_id in fairness.validation_turns(session):
        job = _take(session, fairness.oldest_unvalidated(project_id), owner, lease_seconds)
        if job is not None:
            break
    else:
        return None
    fairness.note_turn(session, project_id, "last_validation")
    _begin_attempt(session, job, "validation")
    return Claim(job.id, job.epoch, owner)


def heartbeat(session: Session, claim: Claim, lease_seconds: float) -> bool:
    """Extend the lease by `lease_seconds`. False: the claim has lost the job."""
    renewal = (
        update(Job)
        .where(Job.id == claim.job_id, Job.epoch == claim.epoch, Job.status.in_(HELD))
        .where(Job.lease_owner.is_not(None))  # see _let_go
        .values(lease_expires_at=db_now() + lease_seconds)
        .returning(Job.seq)
        .execution_options(synchronize_session=False)
    )
    return session.scalar(renewal) is not None


def report(session: Session, claim: Claim, progress: Mapping[str, Any]) -> None:
    """Store what a run is doing; nothing if the claim has lost the job."""
    statement = (
        update(Job)
        .where(Job.id == claim.job_id, Job.epoch == claim.epoch, Job.status.in_(HELD))
        .values(progress={"epoch": claim.epoch, **progress})
        .execution_options(synchronize_session=False)
    )
    session.execute(statement)


def progress_of(job: Job) -> dict[str, Any] | None:
    """The work of the job's run, as `Progress.now` has it; None: it does not run, or has not said it yet."""
    if job.status != "running" or job.progress is None or job.progress["epoch"] != job.epoch:
        return None
    return {name: value for name, value in job.progress.items() if name != "epoch"}


@contextmanager
def fenced(database: Database, claim: Claim) -> Iterator[tuple[Session, Job]]:
    """A write transaction that locks the job's row; all writes of a run use it.

    Keep it short: it blocks cancel, heartbeat and, on SQLite, every other writer.

    Raises:
        LeaseLost: the claim has lost the job. Nothing was written.
    """
    with database.write() as session:
        job = session.scalar(select(Job).where(Job.id == claim.job_id).with_for_update())
        held = job is not None and job.status in HELD and job.lease_owner is not None
        if job is None or not held or job.epoch != claim.epoch:
            raise LeaseLost(f"{claim.owner} no longer holds {claim.job_id} (epoch {claim.epoch})")
        yield session, job


def resumed_from(session: Session, claim: Claim, step: int) -> None:
    """Record the checkpoint from which the claim's attempt resumed; 0 is the beginning."""
    session.get_one(Attempt, (claim.job_id, claim.epoch)).resumed_from = step


def attempts(session: Session, job_id: str) -> Sequence[Attempt]:
    """All attempts at the job, in order."""
    return session.scalars(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.epoch)).all()


def pause_at_cap(session: Session, job: Job, message: str, data: dict[str, Any]) -> None:
    """Pause a running job at its next checkpoint because it reached its cap. Call it inside `fenced`.

    Without effect on a job that is already pausing.
    """
    if job.status == "running":
        _move(job, "pausing")
        events.append(session, job.id, message, level="warn", data=data)


# The ends of a claim. Call these inside `fenced`.


def validated(session: Session, job: Job) -> WakeMessage:
    """The files are valid: queue the job. Returns what to wake after the commit."""
    _move(job, "queued")
    _end_attempt(session, job, "validated")
    job.failures = 0  # failures of the validation do not count against the run
    events.append(session, job.id, "Files validated, moving job to queued state")
    return WakeMessage(queue.RUN, queue.gpu_queue(job.gpu_class), job.id)


def succeed(session: Session, job: Job, *, fine_tuned_model: str) -> None:
    _move(job, "succeeded")
    _end_attempt(session, job, "succeeded")
    job.fine_tuned_model = fine_tuned_model
    events.append(session, job.id, f"New fine-tuned model created: {fine_tuned_model}")
    data = {"verdict": job.verdict} if job.verdict else None
    events.append(session, job.id, "The job has successfully completed", data=data)


def fail(session: Session, job: Job, *, code: str, message: str, param: str | None = None) -> None:
    """Fail the job permanently, without a retry."""
    _move(job, "failed")
    _end_attempt(session, job, "failed", message)
    job.error = {"code": code, "message": message, "param": param}
    events.append(session, job.id, message, level="error")


def release(session: Session, job: Job) -> None:
    """The worker stopped at a checkpoint on request: counts as no failure.

    A pausing job becomes paused. Any other is queued again.
    """
    _put_back(job)
    _end_attempt(session, job, "paused" if job.status == "paused" else "drained")
    job.next_run_at = 0.0  # immediately
    message = {
        "paused": "Fine-tuning job paused",
        "queued": "Fine-tuning job interrupted at a checkpoint, moving job to queued state",
        "validating_files": "Validation interrupted, it will start over",
    }[job.status]
    events.append(session, job.id, message)


def crashed(session: Session, job: Job, *, reason: str, max_failures: int, outcome: str = "crashed") -> None:
    """The worker crashed: retry after a back-off, at most `max_failures` times in a row.

    A pausing job becomes paused, and resumes from its last checkpoint. The message has the first line of the reason,
    cut to MAX_CRASH_MESSAGE, and names the run's log.
    """
    reason = next(iter(logs.cleaned(reason).strip().splitlines()), "")
    # A validation writes no log.
    log = "" if job.status == "validating_files" else f"Log: GET /v1/regraft/jobs/{job.id}/logs"
    _end_attempt(session, job, outcome, _fitted("", reason, ""))
    job.failures += 1
    if job.status != "pausing" and job.failures > max_failures:
        message = _fitted(f"The job failed after {job.failures} interruptions, the last one: ", reason, log)
        fail(session, job, code="internal_error", message=message)
        return
    _put_back(job)
    job.next_run_at = _db_time(session) + min(2**job.failures, MAX_BACK_OFF)
    message = _fitted("Fine-tuning job interrupted: ", reason, log)
    events.append(session, job.id, message, level="warn", data={"failures": job.failures})


def _fitted(before: str, reason: str, after: str) -> str:
    """Concatenate, with the reason cut to fit MAX_CRASH_MESSAGE characters."""
    after = f". {after}" if after else ""
    room = MAX_CRASH_MESSAGE - len(before) - len(after)
    reason = reason.rstrip(".")
    return before + (reason if len(reason) <= room else f"{reason[: room - 1]}…") + after


def put_off(session: Session, job: Job, *, reason: str) -> None:
    """This worker lacks a requirement of the job: another one may claim it after a minute. Counts as no failure.

    The event is written once per reason.
    """
    message = f"Fine-tuning job waits: {reason}"
    _end_attempt(session, job, "put_off", reason)
    _put_back(job)
    job.next_run_at = _db_time(session) + MAX_BACK_OFF
    if not events.has_message(session, job.id, message):
        events.append(session, job.id, message, level="warn")


def leave_alone(session: Session, job: Job, *, reason: str) -> None:
    """The job cannot run beside others: it is queued again, and runs alone. Counts as no failure.

    The event is written once per reason.
    """
    message = f"Fine-tuning job will run alone on its worker: {reason}"
    _end_attempt(session, job, "put_off", reason)
    _put_back(job)
    job.next_run_at = 0.0  # immediately
    if not events.has_message(session, job.id, message):
        events.append(session, job.id, message)


# Operations of the reconciler.


def expire_leases(session: Session, *, max_failures: int) -> int:
    """Release the jobs of workers whose lease expired, and return their number."""
    expired = (
        select(Job)
        .where(Job.status.in_(HELD), Job.lease_expires_at < db_now())
        .order_by(Job.seq)
        # A locked row is being written to, so its worker is alive, or another reconciler handles it.
        .with_for_update(skip_locked=True)
        .execution_options(populate_existing=True)
    )
    jobs = session.scalars(expired).all()
    for job in jobs:
        job.epoch += 1
        reason = "the worker stopped answering"
        crashed(session, job, reason=reason, max_failures=max_failures, outcome="expired")
    return len(jobs)


def give_time(session: Session, lease_seconds: float, message: str) -> int:
    """Restart all leases after a jump of the database's clock, or an outage in which no lease could be renewed.

    Each job whose lease changes gets `message` as an event. Returns their number.
    """
    # Skip those renewed since, by their workers or another reconciler.
    fresh = Job.lease_expires_at.between(db_now() + 0.9 * lease_seconds, db_now() + 1.1 * lease_seconds)
    held = session.scalars(
        select(Job).where(Job.status.in_(HELD), Job.lease_expires_at.is_not(None), ~fresh).with_for_update()
    ).all()
    for job in held:
        job.lease_expires_at = _db_time(session) + lease_seconds
        events.append(session, job.id, message, level="warn")
    return len(held)


def bound_times(session: Session, lease_seconds: float) -> None:
    """Bound the times of all jobs after the database's clock was set back."""
    bound_time(session, Job.lease_expires_at, lease_seconds)
    bound_time(session, Job.next_run_at, MAX_BACK_OFF)
    bound_time(session, Job.dispatched_at, 0.0)


def tell_waiting(session: Session, message: str) -> None:
    """Append an event to every job that waits for a worker."""
    idle = (
        select(Job.id)
        .where(or_(fairness.runnable(Job), fairness.unvalidated(Job)))
        .order_by(Job.seq)
        .limit(1000)
    )
    for job_id in session.scalars(idle).all():
        events.append(session, job_id, message, level="warn")


def to_wake(session: Session, *, older_than: float) -> list[tuple[str, str]]:
    """The (task, queue) pairs with work that were not woken in the last `older_than` seconds.

    A woken worker takes jobs until none waits. So the time is recorded on one job per project and class, the newest,
    which waits longest: recording it on ten thousand jobs every few seconds would only add load.
    """
    woken: set[tuple[str, str]] = set()
    for status, free in (("queued", fairness.runnable), ("validating_files", fairness.unvalidated)):
        classes = session.scalars(select(fairness.each(Job.gpu_class, Job.status == status).c.value)).all()
        for gpu_class in classes:
            if gpu_class is not None and _tell(session, status, gpu_class, free, older_than):
                woken.add(_wake_up(status, gpu_class))
    return sorted(woken)


def tasks_waiting(session: Session, gpu_class: str) -> list[str]:
    """The tasks with work that a worker of this class could claim now, apart from its projects' limits."""
    waiting = [
        (queue.RUN, fairness.runnable(Job) & (Job.gpu_class == gpu_class)),
        (queue.VALIDATE, fairness.unvalidated(Job)),
    ]
    return [
        task for task, work in waiting if session.scalar(select(Job.seq).where(work).limit(1)) is not None
    ]


def _tell(
    session: Session,
    status: str,
    gpu_class: str,
    free: Callable[[type[Job]], ColumnElement[bool]],
    older_than: float,
) -> bool:
    """Record the wake-up on the newest free job of each project. False: all were woken recently."""
    line = fairness.each(Job.project_id, Job.status == status, Job.gpu_class == gpu_class)
    job, candidate = aliased(Job), aliased(Job)
    newest = (
        select(job.seq)
        .where(job.project_id == line.c.value, job.gpu_class == gpu_class, free(job))
        .order_by(job.seq.desc())
        .limit(1)
        .scalar_subquery()
    )
    untold = (
        select(candidate.seq)
        .where(candidate.seq.in_(select(newest).select_from(line)))
        .where(candidate.dispatched_at < db_now() - older_than)
        .with_for_update(skip_locked=True)
    )
    stamp = update(Job).where(Job.seq.in_(untold)).values(dispatched_at=db_now()).returning(Job.seq)
    return bool(session.scalars(stamp.execution_options(synchronize_session=False)).all())


def _wake_up(status: str, gpu_class: str) -> tuple[str, str]:
    if status == "validating_files":
        return queue.VALIDATE, queue.DEFAULT_QUEUE
    return queue.RUN, queue.gpu_queue(gpu_class)


# Transitions.


def _lock(session: Session, job: Job) -> None:
    """Lock the row until the commit and refresh it: the job may have changed since it was read."""
    session.flush()  # a refresh discards pending changes
    session.refresh(job, with_for_update=True)


def _move(job: Job, to: str) -> None:
    """The only transition of the status, with its side effects."""
    if to not in EDGES[job.status]:
        raise _refusal(job, to)
    job.status = to
    if to not in HELD:
        _let_go(job)
    if to in FINAL:
        job.finished_at = now()
    if to == "queued":
        job.dispatched_at = 0.0  # no worker was woken for it yet
    webhooks.status_changed(job)


def _put_back(job: Job) -> None:
    """Return the job to the state in which it waits for a worker."""
    if job.status == "validating_files":
        _let_go(job)  # the status stays: queued would mean that its files are valid
    else:
        _move(job, "paused" if job.status == "pausing" else "queued")


def _let_go(job: Job) -> None:
    # Also ends a released validation, whose job keeps its status and epoch.
    job.lease_owner = job.lease_expires_at = None
    job.estimated_finish = None  # null unless the job is running, as at OpenAI


def _refusal(job: Job, to: str) -> InvalidJobState:
    if job.status == "cancelled":
        return InvalidJobState(f"Job has already been cancelled: {job.id}")
    if job.status in FINAL:
        return InvalidJobState(f"Job has already completed: {job.id}")
    return InvalidJobState(f"Job is {job.status} and cannot become {to}: {job.id}")


# Choosing and claiming.


def _take(
    session: Session, seq: ScalarSelect[int], owner: str, lease_seconds: float, **values: Any
) -> Job | None:
    statement = (
        update(Job)
        .where(Job.seq == seq)
        .values(epoch=Job.epoch + 1, lease_owner=owner, lease_expires_at=db_now() + lease_seconds, **values)
        .returning(Job)
        .execution_options(synchronize_session=False, populate_existing=True)
    )
    return session.scalar(statement)


def _begin_attempt(session: Session, job: Job, kind: str) -> None:
    _end_attempt(
        session, job, "expired", "the worker stopped answering"
    )  # without effect unless an attempt is open
    session.add(
        Attempt(
            job_id=job.id,
            epoch=job.epoch,
            kind=kind,
            worker=job.lease_owner or "",
            started_at=_db_time(session),
        )
    )
    session.flush()


def _end_attempt(session: Session, job: Job, outcome: str, reason: str | None = None) -> None:
    """Close the open attempt, if any."""
    ended = (
        update(Attempt)
        .where(Attempt.job_id == job.id, Attempt.ended_at.is_(None))
        .values(ended_at=db_now(), outcome=outcome, reason=reason)
    )
    session.execute(ended.execution_options(synchronize_session=False))


def _runs(session: Session, job: Job) -> int:
    """Number of runs. The epoch is higher: it also counts validations and lost leases."""
    runs = select(func.count()).select_from(Attempt).where(Attempt.job_id == job.id, Attempt.kind == "run")
    return session.scalars(runs).one()


def _db_time(session: Session) -> float:
    return session.scalars(select(db_now())).one()
