"""The state machine of a pipeline and its stages. Only this file writes them.

    pipeline: running <──> paused      running ──> succeeded | failed      running, paused ──> cancelled
              failed, cancelled ──> running (retry)
    stage:    waiting ──> running ──> succeeded | failed | cancelled ──> waiting (retry)

A process that advances a pipeline holds a `Claim` (core/claims.py). Every change by a user ends it. If the process is
killed, another one claims the pipeline after the lease: nothing has to put it back. A stage starts in the transaction
that creates its job, so that a kill neither loses nor repeats one.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session, aliased

from core.claims import Claim, Leases, due, let_go, lock, put_back, take
from core.database import pages
from core.database.engine import WakeMessage, Work
from core.database.pages import Page
from core.database.states import EVAL_RUN, JOB, PIPELINE
from core.database.tables import EvalRun, Job, Pipeline, now
from core.errors import InvalidJobState, PipelineNotFound, QuotaExceeded
from core.evals import lifecycle as eval_runs
from core.jobs import lifecycle as jobs
from core.outbound import webhooks
from core.pipelines import graph
from core.pipelines.graph import PlannedStage, StageReference

Stage = dict[str, Any]
"""A stage as stored: name, kind, spec, after, status, and what it has so far of job_id, eval_id, run_id, model, file,
rows, error, note, errors, restarts, tries, waiting_since (of an outage), started_at, finished_at, reused_from,
earlier, the jobs of failed attempts, and of a sweep: jobs (each with settings, job_id, stopped, and at the end reward,
difference and low), budget_gpu_seconds, validated (the step of the last validation of each job that was looked at) and
conclusion; its job_id is that of the best job."""

LEASES = Leases(Pipeline, PIPELINE.leased)
heartbeat, locked, fenced = LEASES.heartbeat, LEASES.locked, LEASES.fenced
extend_leases, bound_times = LEASES.extend_leases, LEASES.bound_times
LEASE_SECONDS = 60.0
# Of a project: each is looked at every few seconds.
MAX_UNFINISHED = 100


def new_stage(planned: PlannedStage) -> Stage:
    return {
        "name": planned.name,
        "kind": planned.kind,
        "spec": dict(planned.spec),
        "after": list(planned.after),
        "status": "waiting",
    }


def planned(stages: Sequence[Stage]) -> list[PlannedStage]:
    return [PlannedStage(one["name"], one["kind"], one["spec"], one["after"]) for one in stages]


# Requests of users.


def create(work: Work, pipeline: Pipeline) -> None:
    """Add a pipeline, which starts at once.

    Raises:
        QuotaExceeded: the project has MAX_UNFINISHED pipelines.
    """
    pages.keep_order(work.session, pipeline.project_id)  # locks the project's row
    _refuse_many(work.session, pipeline.project_id)
    work.session.add(pipeline)
    work.session.flush()
    work.record("pipeline.created", pipeline.id, {"stages": len(pipeline.stages)})


def get(session: Session, project_id: str, pipeline_id: str, *, lock: bool = False) -> Pipeline:
    """The project's pipeline.

    Raises:
        PipelineNotFound: the project has none with this id.
    """
    statement = select(Pipeline).where(Pipeline.id == pipeline_id, Pipeline.project_id == project_id)
    found = session.scalar(statement.with_for_update() if lock else statement)
    if found is None:
        raise PipelineNotFound(pipeline_id)
    return found


def page(session: Session, project_id: str, *, after: str | None, limit: int) -> Page[Pipeline]:
    """Newest first."""
    mine = select(Pipeline).where(Pipeline.project_id == project_id)
    return pages.newest_first(session, mine, Pipeline, after=after, limit=limit)


def pause(work: Work, pipeline: Pipeline) -> None:
    """Start no further stage, and pause the running jobs, also those whose files are being validated. Idempotent."""
    if pipeline.status == "paused":
        return
    _require(pipeline, "running", "pause")
    for job in _running_jobs(work.session, pipeline):
        lock(work.session, job)
        if job.status in ("queued", "running"):
            jobs.pause(work, job)
    _change(work, pipeline, "paused")


def resume(work: Work, pipeline: Pipeline) -> None:
    """Let stages start again, and resume the paused jobs, also those that `validated` is holding back now."""
    _require(pipeline, "paused", "resume")
    for job in _running_jobs(work.session, pipeline):
        lock(work.session, job)
        if job.status == "paused":
            jobs.resume(work, job)
    _change(work, pipeline, "running")


def cancel(work: Work, pipeline: Pipeline) -> None:
    """Cancel the jobs and eval runs of running stages; no further stage starts. Idempotent."""
    if pipeline.status == "cancelled":
        return
    if pipeline.status in PIPELINE.final:
        raise InvalidJobState(f"The pipeline {pipeline.id} is already {pipeline.status}.")
    for stage in pipeline.stages:
        cancel_jobs(work, stage)
    for run in _running_eval_runs(work.session, pipeline):
        if run.status not in EVAL_RUN.final:
            eval_runs.cancel(work, run)

    def ended(stage: Stage) -> Stage:
        return (
            stage | {"status": "cancelled", "finished_at": now()} if stage["status"] == "running" else stage
        )

    pipeline.stages = [ended(stage) for stage in pipeline.stages]
    _change(work, pipeline, "cancelled")
    pipeline.finished_at = now()
    webhooks.pipeline_ended(pipeline)


def cancel_jobs(work: Work, stage: Stage) -> None:
    """Cancel the jobs of a running stage."""
    if stage["status"] != "running":
        return
    for job in work.session.scalars(select(Job).where(Job.id.in_(job_ids(stage)))):
        lock(work.session, job)
        if job.status not in JOB.final:
            jobs.cancel(work, job)


def retry(work: Work, pipeline: Pipeline) -> None:
    """Let the failed and cancelled stages start again, and what waits for them.

    Raises:
        InvalidJobState: the pipeline has not failed and was not cancelled.
    """
    if pipeline.status not in ("failed", "cancelled"):
        raise InvalidJobState(
            f"The pipeline {pipeline.id} is {pipeline.status}: only a failed or cancelled one can be retried."
        )
    pages.keep_order(work.session, pipeline.project_id)
    _refuse_many(work.session, pipeline.project_id)
    pipeline.stages = [_requeued_stage(stage) for stage in pipeline.stages]
    pipeline.finished_at = None
    _change(work, pipeline, "running")


def _refuse_many(session: Session, project_id: str) -> None:
    unfinished = (Pipeline.project_id == project_id) & Pipeline.status.in_(PIPELINE.unfinished)
    count = session.scalar(select(func.count()).where(unfinished)) or 0
    if count >= MAX_UNFINISHED:
        hint = "wait until one has ended, or cancel one"
        raise QuotaExceeded("unfinished_pipelines", used=count, maximum=MAX_UNFINISHED, hint=hint)


def _requeued_stage(stage: Stage) -> Stage:
    if stage["status"] not in ("failed", "cancelled"):
        return stage
    fresh = {name: stage[name] for name in ("name", "kind", "spec", "after")} | {"status": "waiting"}
    earlier = [*stage.get("earlier", ()), *job_ids(stage)]
    return fresh | ({"earlier": earlier} if earlier else {})


def cloned(pipeline: Pipeline, first: str | None) -> list[Stage]:
    """The stages of a clone: those from `first` on start again, all others keep their results. None: all start again.

    Raises:
        InvalidJobState: a stage whose result would be kept has not succeeded.
        KeyError: there is no stage of this name.
    """
    plan = planned(pipeline.stages)
    if first is not None and first not in {stage.name for stage in plan}:
        raise KeyError(first)
    again = {stage.name for stage in plan} if first is None else graph.behind(plan, first)
    missing = [s["name"] for s in pipeline.stages if s["name"] not in again and s["status"] != "succeeded"]
    if missing:
        raise InvalidJobState(
            f"The stages {', '.join(missing)} have no results that a clone from '{first}' on could use."
        )
    return [
        new_stage(plan[number])
        if stage["name"] in again
        else stage | {"reused_from": stage.get("reused_from", pipeline.id)}
        for number, stage in enumerate(pipeline.stages)
    ]


def _require(pipeline: Pipeline, status: str, verb: str) -> None:
    if pipeline.status != status:
        raise InvalidJobState(f"The pipeline {pipeline.id} is {pipeline.status}: it cannot {verb}.")


def _change(work: Work, pipeline: Pipeline, status: str) -> None:
    pipeline.status = status
    pipeline.epoch += 1
    put_back(work.session, pipeline)
    work.record(f"pipeline.{status}", pipeline.id)


def validated(session: Session, job: Job) -> list[WakeMessage]:
    """The files of a job are valid: queue it, or pause it if its pipeline is paused. Returns what to wake.

    Call it inside `fenced`. `pause` and `resume` wait for that lock, so that one of both sees the other.
    """
    wake = jobs.validated(session, job)
    paused = select(Pipeline).where(Pipeline.project_id == job.project_id, Pipeline.status == "paused")
    if not any(job.id in _running_job_ids(pipeline) for pipeline in session.scalars(paused)):
        return [wake]
    jobs.hold_back(session, job)
    return []


def _running_jobs(session: Session, pipeline: Pipeline) -> Sequence[Job]:
    return session.scalars(select(Job).where(Job.id.in_(_running_job_ids(pipeline)))).all()


def _running_job_ids(pipeline: Pipeline) -> list[str]:
    return [job_id for stage in pipeline.stages if stage["status"] == "running" for job_id in job_ids(stage)]


def job_ids(stage: Stage) -> list[str]:
    """The jobs of a stage: several of a sweep, one of a job, none of another kind or before it starts."""
    if "jobs" in stage:
        return [job["job_id"] for job in stage["jobs"]]
    return [stage["job_id"]] if "job_id" in stage else []


def _running_eval_runs(session: Session, pipeline: Pipeline) -> Sequence[EvalRun]:
    ids = [stage["run_id"] for stage in pipeline.stages if stage["status"] == "running" and "run_id" in stage]
    return session.scalars(select(EvalRun).where(EvalRun.id.in_(ids))).all()


# Operations of the process that advances pipelines.


def claim(session: Session, owner: str, passed_over: Collection[str] = ()) -> Claim | None:
    """Claim the unfinished pipeline that was looked at longest ago; None: all are held, or have ended.

    Args:
        passed_over: Projects whose pipelines are not claimed.
    """
    candidate = aliased(Pipeline)
    waiting = select(candidate.seq).where(free(candidate, passed_over))
    oldest = waiting.order_by(candidate.next_run_at, candidate.seq)
    pipeline = take(session, Pipeline, oldest, owner, LEASE_SECONDS)
    return None if pipeline is None else Claim(pipeline.id, pipeline.epoch, owner)


def free(pipeline: type[Pipeline], passed_over: Collection[str]) -> ColumnElement[bool]:
    """The unfinished pipelines that no process holds, except for those of some projects."""
    others = pipeline.project_id.not_in(sorted(passed_over))
    return pipeline.status.in_(PIPELINE.leased) & due(pipeline) & others


def release(session: Session, pipeline: Pipeline, after: float) -> None:
    """Let other processes claim the pipeline after this time. Call it inside `fenced`."""
    put_back(session, pipeline, after)


def results(stages: Sequence[Stage]) -> Mapping[StageReference, str]:
    """The models and files of the stages that succeeded."""
    return {
        StageReference(stage["name"], name): stage[name]
        for stage in stages
        if stage["status"] == "succeeded"
        for name in ("model", "file")
        if stage.get(name)
    }


def ready(stages: Sequence[Stage]) -> list[str]:
    """The waiting stages whose needed stages have all succeeded, in order."""
    done = {stage["name"] for stage in stages if stage["status"] == "succeeded"}
    plan = planned(stages)
    return [
        one.name
        for one, stage in zip(plan, stages, strict=True)
        if stage["status"] == "waiting" and done.issuperset(graph.needs(one))
    ]


def update_stage(pipeline: Pipeline, name: str, **changes: Any) -> None:
    """Write fields of a stage."""
    pipeline.stages = [stage | changes if stage["name"] == name else stage for stage in pipeline.stages]


_NO_OUTAGE: Stage = {"note": None, "waiting_since": None, "tries": 0}


def started(pipeline: Pipeline, name: str, **ids: Any) -> None:
    update_stage(pipeline, name, status="running", started_at=now(), **_NO_OUTAGE, **ids)


def succeeded(pipeline: Pipeline, name: str, **results: Any) -> None:
    update_stage(pipeline, name, status="succeeded", finished_at=now(), **_NO_OUTAGE, **results)


def failed(pipeline: Pipeline, name: str, code: str | None, message: str, status: str = "failed") -> None:
    """End a stage without a result; `status` is failed or cancelled."""
    update_stage(
        pipeline,
        name,
        status=status,
        finished_at=now(),
        **_NO_OUTAGE,
        error={"code": code or "internal_error", "message": message},
    )


def settle(work: Work, pipeline: Pipeline) -> None:
    """End the pipeline if no stage runs and none can start."""
    statuses = [stage["status"] for stage in pipeline.stages]
    if "running" in statuses or ready(pipeline.stages):
        return
    pipeline.status = "succeeded" if all(status == "succeeded" for status in statuses) else "failed"
    pipeline.finished_at = now()
    let_go(pipeline)
    work.record(f"pipeline.{pipeline.status}", pipeline.id)
    webhooks.pipeline_ended(pipeline)
