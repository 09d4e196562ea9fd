"""The state machine of a job. Only this file writes its status, its epoch and its lease.

    validating_files ──> queued <──> running ──> succeeded
                         │    ^         │
                         v    │         v
                         paused <─── pausing

failed is reached from the states with a worker, cancelled from every state that is not final.

A worker holds a `Claim` on its job (core/claims.py), in the order of core/jobs/fairness.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from core.claims import Claim, Leases, back_off, db_time, let_go, lock, put_back
from core.database import pages
from core.database.engine import WakeMessage, Work, db_now, json_text
from core.database.pages import Page
from core.database.states import JOB, JOB_EDGES
from core.database.tables import Attempt, File, Job, Project, now
from core.errors import InvalidJobState, JobNotFound
from core.jobs import budgets, events, fairness, queue, usage
from core.outbound import webhooks
from core.telemetry import logs, tracing
from core.tenancy.limits import NO_LIMITS, Limits

# Between two tries of a job that its worker cannot run. Longer than that worker rests, or the job would be due, and
# first in the queue, each time that the worker claims one again.
FIRST_PUT_OFF, MAX_PUT_OFF = 120.0, 600.0
LEASES = Leases(Job, JOB.leased, max_wait=MAX_PUT_OFF)
heartbeat, fenced, bound_times = LEASES.heartbeat, LEASES.fenced, LEASES.bound_times

STARTED, RESUMED = "Fine-tuning job started", "Fine-tuning job resumed"
RESUMING = "Resuming fine-tuning job, moving job to queued state"
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
    gpus: int | None = None,
    nodes: int | None = None,
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
        gpus=gpus,
        nodes=nodes,
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
    lock(work.session, job)
    if job.status == "cancelled":
        return
    _move(job, "cancelled")
    _end_attempt(work.session, job, "cancelled")
    job.epoch += 1
    events.append(work.session, job.id, "Fine-tuning job cancelled")
    work.record("job.cancelled", job.id)


def pause(work: Work, job: Job) -> None:
    """Pause a waiting job at once, or a running one at its next checkpoint."""
    lock(work.session, job)
    if job.status in ("pausing", "paused"):
        return
    if job.status == "queued":
        _move(job, "paused")
        events.append(work.session, job.id, "Fine-tuning job paused")
    else:
        _move(job, "pausing")
        events.append(work.session, job.id, "Pausing fine-tuning job")
    work.record("job.paused", job.id)


def hold_back(session: Session, job: Job) -> None:
    """Pause a queued job before its start, on behalf of what it is a part of. Call it inside `fenced`."""
    _move(job, "paused")
    events.append(session, job.id, "Fine-tuning job paused")


def resume(work: Work, job: Job) -> None:
    """Queue a paused job, which will resume from its last checkpoint."""
    lock(work.session, job)
    if job.status != "paused":  # JOB_EDGES would also allow a running job to be queued
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
    lock(work.session, job)
    if job.status in JOB.final:
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
    job_id: str = "",
) -> Claim | None:
    """Claim the next job of this class, or only the one with the id `job_id`; see `ClaimQueue.claim`."""
    equal = {"gpu_class": gpu_class} | ({"id": job_id} if job_id else {})
    job = fairness.RUNS.claim(
        session, owner=owner, lease_seconds=lease_seconds, defaults=defaults, fits=fits, **equal
    )
    if job is None:
        return None
    _begin_attempt(session, job, "run")
    if job.started_at is None:
        job.started_at = now()
        events.append(session, job.id, STARTED)
    else:
        events.append(session, job.id, RESUMED, data={"attempt": _runs(session, job)})
    return Claim(job.id, job.epoch, owner)


def claim_validation(session: Session, *, owner: str, lease_seconds: float) -> Claim | None:
    """Claim a job for file validation."""
    job = fairness.VALIDATIONS.claim(session, owner=owner, lease_seconds=lease_seconds)
    if job is None:
        return None
    _begin_attempt(session, job, "validation")
    return Claim(job.id, job.epoch, owner)


def report(session: Session, claim: Claim, progress: Mapping[str, Any]) -> None:
    """Store what a run is doing; nothing if the claim has lost the job."""
    LEASES.write(session, claim, progress={"epoch": claim.epoch, **progress})


def progress_of(job: Job) -> dict[str, Any] | None:
    """The work of the job's run, as `Progress.now` has it; None: it does not run, or has not said it yet."""
    if job.status != "running" or job.progress is None or job.progress["epoch"] != job.epoch:
        return None
    return {name: value for name, value in job.progress.items() if name != "epoch"}


def resumed_from(session: Session, claim: Claim, step: int) -> None:
    """Record the checkpoint from which the claim's attempt resumed; 0 is the beginning."""
    session.get_one(Attempt, (claim.job_id, claim.epoch)).resumed_from = step


def attempts(session: Session, job_id: str) -> Sequence[Attempt]:
    """All attempts at the job, in order."""
    return session.scalars(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.epoch)).all()


def put_off_for(session: Session, job_id: str, reason: str) -> float:
    """Return for how many seconds all attempts at the job have been put off for this reason; 0 if the last was not."""
    since = None
    for attempt in reversed(attempts(session, job_id)):
        if attempt.ended_at is None:
            continue  # it is under way
        if attempt.outcome != "put_off" or reason not in (attempt.reason or ""):
            break
        since = attempt.started_at
    return 0.0 if since is None else db_time(session) - since


def pause_by_service(session: Session, job: Job, message: str, data: dict[str, Any]) -> None:
    """Pause a running job, at its next checkpoint or when its attempt ends. Call it inside `fenced`.

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


def release(session: Session, job: Job, *, is_rolled_back: bool = False) -> None:
    """The worker stopped at a checkpoint on request, or after a rollback: counts as no failure.

    A pausing job becomes paused. Any other is queued again.
    """
    _put_back(session, job)
    _end_attempt(session, job, "paused" if job.status == "paused" else "drained")
    message = {
        "paused": "Fine-tuning job paused",
        "queued": "Fine-tuning job returned to an earlier checkpoint, moving job to queued state"
        if is_rolled_back
        else "Fine-tuning job interrupted at a checkpoint, moving job to queued state",
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
    _put_back(session, job, back_off(job.failures))
    message = _fitted("Fine-tuning job interrupted: ", reason, log)
    events.append(session, job.id, message, level="warn", data={"failures": job.failures})


def _fitted(before: str, reason: str, after: str) -> str:
    """Concatenate, with the reason cut to fit MAX_CRASH_MESSAGE characters."""
    after = f". {after}" if after else ""
    room = MAX_CRASH_MESSAGE - len(before) - len(after)
    reason = reason.rstrip(".")
    return before + (reason if len(reason) <= room else f"{reason[: room - 1]}…") + after


def put_off(session: Session, job: Job, *, reason: str) -> None:
    """This worker lacks a requirement of the job: another one may claim it after some minutes. Counts as no failure.

    Each time in a row it waits longer, so that the jobs behind it get their turn. The event is written once per reason.
    """
    message = f"Fine-tuning job waits: {reason}"
    _end_attempt(session, job, "put_off", reason)
    _put_back(session, job, min(FIRST_PUT_OFF * 2 ** min(_put_offs(session, job) - 1, 10), MAX_PUT_OFF))
    if not events.has_message(session, job.id, message):
        events.append(session, job.id, message, level="warn")


def run_exclusively(session: Session, job: Job, *, reason: str) -> None:
    """The job cannot run beside others: it is queued again, and runs alone. Counts as no failure.

    The event is written once per reason.
    """
    message = f"Fine-tuning job will run alone on its worker: {reason}"
    _end_attempt(session, job, "put_off", reason)
    _put_back(session, job)
    if not events.has_message(session, job.id, message):
        events.append(session, job.id, message)


def run_smaller(session: Session, job: Job, *, reason: str) -> None:
    """The job has run out of memory: it is queued again, and begins with the sizes that were lowered. Counts as no
    failure. After the first time in a row it backs off."""
    _end_attempt(session, job, "put_off", reason)
    times = _put_offs(session, job)
    _put_back(session, job, back_off(times - 1) if times > 1 else 0.0)


# Operations of the reconciler.


def expire_leases(session: Session, *, max_failures: int) -> int:
    """Release the jobs of workers whose lease expired, and return their number."""
    jobs = LEASES.expired(session)
    for job in jobs:
        reason = "the worker stopped answering"
        crashed(session, job, reason=reason, max_failures=max_failures, outcome="expired")
    return len(jobs)


def extend_leases(session: Session, lease_seconds: float, message: str) -> int:
    """As `Leases.extend_leases`. Each job whose lease changes gets `message` as an event. Returns their number."""
    held = LEASES.extend_leases(session, lease_seconds)
    for job in held:
        events.append(session, job.id, message, level="warn")
    return len(held)


def notify_queued(session: Session, message: str) -> None:
    """Append an event to every job that waits for a worker."""
    idle = (
        select(Job.id)
        .where(or_(fairness.RUNS.free(Job), fairness.VALIDATIONS.free(Job)))
        .order_by(Job.seq)
        .limit(1000)
    )
    for job_id in session.scalars(idle).all():
        events.append(session, job_id, message, level="warn")


def to_wake(session: Session, *, older_than: float) -> list[tuple[str, str]]:
    """The (task, queue) pairs with work that were not woken in the last `older_than` seconds."""
    classes = session.scalars(select(fairness.RUNS.each(Job.gpu_class).c.value)).all()
    woken = [
        (queue.RUN, queue.gpu_queue(gpu_class))
        for gpu_class in classes
        if gpu_class is not None and fairness.RUNS.stamp_wake_up(session, older_than, gpu_class=gpu_class)
    ]
    if fairness.VALIDATIONS.stamp_wake_up(session, older_than):
        woken.append((queue.VALIDATE, queue.DEFAULT_QUEUE))
    return woken


def tasks_waiting(session: Session, gpu_class: str) -> list[str]:
    """The tasks with work that a worker of this class could claim now, apart from its projects' limits."""
    tasks = [queue.RUN] if fairness.RUNS.has_work(session, gpu_class=gpu_class) else []
    return [*tasks, queue.VALIDATE] if fairness.VALIDATIONS.has_work(session) else tasks


# Transitions.


def _move(job: Job, to: str) -> None:
    """The only transition of the status, with its side effects."""
    if to not in JOB_EDGES[job.status]:
        raise _refusal(job, to)
    job.status = to
    if to not in JOB.leased:
        let_go(job)
        job.estimated_finish = None  # null unless the job is running, as at OpenAI
    if to in JOB.final:
        job.finished_at = now()
    webhooks.status_changed(job)


def _put_back(session: Session, job: Job, after: float = 0.0) -> None:
    """Return the job to the state in which it waits for a worker, which may claim it after this time."""
    if job.status != "validating_files":  # which it keeps: queued would mean that its files are valid
        _move(job, "paused" if job.status == "pausing" else "queued")
    put_back(session, job, after)
    job.estimated_finish = None


def _refusal(job: Job, to: str) -> InvalidJobState:
    if job.status == "cancelled":
        return InvalidJobState(f"Job has already been cancelled: {job.id}")
    if job.status in JOB.final:
        return InvalidJobState(f"Job has already completed: {job.id}")
    return InvalidJobState(f"Job is {job.status} and cannot become {to}: {job.id}")


# Attempts.


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
            started_at=db_time(session),
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


def _put_offs(session: Session, job: Job) -> int:
    """Number of the job's last attempts, in a row, that were put off."""
    mine = Attempt.job_id == job.id
    other = select(func.max(Attempt.epoch)).where(mine, Attempt.outcome != "put_off").scalar_subquery()
    since = select(func.count()).select_from(Attempt).where(mine, Attempt.epoch > func.coalesce(other, -1))
    return session.scalars(since).one()


def _runs(session: Session, job: Job) -> int:
    """Number of runs. The epoch is higher: it also counts validations and lost leases."""
    runs = select(func.count()).select_from(Attempt).where(Attempt.job_id == job.id, Attempt.kind == "run")
    return session.scalars(runs).one()
