"""The state machine of a pipeline and its stages. Only this file writes them.

    pipeline: running <──> paused      running ──> succeeded | failed      running, paused ──> cancelled
              failed, cancelled ──> running (retry)
    stage:    waiting ──> running ──> succeeded | failed | cancelled ──> waiting (retry)

A process that advances a pipeline holds a `Claim`: every claim and every change by a user increments the epoch of the
row, so that the writes of an outdated process fail the comparison. A stage starts in the transaction that creates its
job, so that a kill neither loses nor repeats one.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Work, db_now
from core.database.pages import Page
from core.database.tables import EvalRun, Job, Pipeline, now
from core.errors import InvalidJobState, PipelineNotFound, QuotaExceeded
from core.evals import lifecycle as eval_runs
from core.jobs import lifecycle as jobs
from core.jobs.claim import Claim, LeaseLost, bound_time
from core.outbound import webhooks
from core.pipelines import graph
from core.pipelines.graph import PlannedStage, StageReference

Stage = dict[str, Any]
"""A stage as stored: name, kind, spec, after, status, and what it has so far of job_id, eval_id, run_id, model, file,
rows, error, note, errors, restarts, tries, waiting_since (of an outage), started_at, finished_at, reused_from and
earlier, the jobs of failed attempts."""

FINAL = frozenset({"succeeded", "failed", "cancelled"})
FOLLOWED = ("running", "paused")
HOLD_SECONDS = 60.0
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


def create(work: Work, made: Pipeline) -> None:
    """Add a pipeline, which starts at once.

    Raises:
        QuotaExceeded: the project has MAX_UNFINISHED pipelines.
    """
    pages.keep_order(work.session, made.project_id)  # locks the project's row
    _refuse_many(work.session, made.project_id)
    work.session.add(made)
    work.session.flush()
    work.record("pipeline.created", made.id, {"stages": len(made.stages)})


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
    """Start no further stage, and pause the running jobs. Idempotent."""
    if pipeline.status == "paused":
        return
    _require(pipeline, "running", "pause")
    for job in _running_jobs(work.session, pipeline):
        if job.status in ("queued", "running"):
            jobs.pause(work, job)
    _change(work, pipeline, "paused")


def resume(work: Work, pipeline: Pipeline) -> None:
    """Let stages start again, and resume the paused jobs."""
    _require(pipeline, "paused", "resume")
    for job in _running_jobs(work.session, pipeline):
        if job.status == "paused":
            jobs.resume(work, job)
    _change(work, pipeline, "running")


def cancel(work: Work, pipeline: Pipeline) -> None:
    """Cancel the jobs and eval runs of running stages; no further stage starts. Idempotent."""
    if pipeline.status == "cancelled":
        return
    if pipeline.status in FINAL:
        raise InvalidJobState(f"The pipeline {pipeline.id} is already {pipeline.status}.")
    for job in _running_jobs(work.session, pipeline):
        if job.status not in jobs.FINAL:
            jobs.cancel(work, job)
    for run in _running_eval_runs(work.session, pipeline):
        if run.status not in eval_runs.FINAL:
            eval_runs.cancel(work, run)

    def ended(stage: Stage) -> Stage:
        return (
            stage | {"status": "cancelled", "finished_at": now()} if stage["status"] == "running" else stage
        )

    pipeline.stages = [ended(stage) for stage in pipeline.stages]
    _change(work, pipeline, "cancelled")
    pipeline.finished_at = now()
    webhooks.pipeline_ended(pipeline)


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
    pipeline.stages = [_again(stage) for stage in pipeline.stages]
    pipeline.finished_at = None
    _change(work, pipeline, "running")


def _refuse_many(session: Session, project_id: str) -> None:
    unfinished = (Pipeline.project_id == project_id) & Pipeline.status.in_(("running", "paused"))
    count = session.scalar(select(func.count()).where(unfinished)) or 0
    if count >= MAX_UNFINISHED:
        hint = "wait until one has ended, or cancel one"
        raise QuotaExceeded("unfinished_pipelines", used=count, maximum=MAX_UNFINISHED, hint=hint)


def _again(stage: Stage) -> Stage:
    if stage["status"] not in ("failed", "cancelled"):
        return stage
    fresh = {name: stage[name] for name in ("name", "kind", "spec", "after")} | {"status": "waiting"}
    earlier = [*stage.get("earlier", ()), *filter(None, [stage.get("job_id")])]
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
    pipeline.held_until = 0.0
    work.record(f"pipeline.{status}", pipeline.id)


def pause_validated(work: Work, pipeline: Pipeline) -> None:
    """Pause the jobs of a paused pipeline whose files were still being validated when it was paused."""
    for job in _running_jobs(work.session, pipeline):
        if job.status == "queued" and job.started_at is None:
            jobs.pause(work, job)


def _running_jobs(session: Session, pipeline: Pipeline) -> Sequence[Job]:
    return session.scalars(select(Job).where(Job.id.in_(_ids(pipeline, "job_id")))).all()


def _running_eval_runs(session: Session, pipeline: Pipeline) -> Sequence[EvalRun]:
    return session.scalars(select(EvalRun).where(EvalRun.id.in_(_ids(pipeline, "run_id")))).all()


def _ids(pipeline: Pipeline, name: str) -> list[str]:
    return [stage[name] for stage in pipeline.stages if stage["status"] == "running" and name in stage]


# Operations of the process that advances pipelines.


def claim(session: Session, owner: str, passed_over: Collection[str] = ()) -> Claim | None:
    """Claim the unfinished pipeline that was looked at longest ago; None: all are held, or have ended.

    Args:
        passed_over: Projects whose pipelines are not claimed.
    """
    due = (
        select(Pipeline.seq)
        .where(due_of_others(passed_over))
        .order_by(Pipeline.held_until, Pipeline.seq)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    take = (
        update(Pipeline)
        .where(Pipeline.seq == due)
        .values(epoch=Pipeline.epoch + 1, held_until=db_now() + HOLD_SECONDS)
        .returning(Pipeline.id, Pipeline.epoch)
        .execution_options(synchronize_session=False)
    )
    row = session.execute(take).one_or_none()
    return None if row is None else Claim(row.id, row.epoch, owner)


def bound_times(session: Session) -> None:
    """As of jobs (core/jobs/lifecycle.py)."""
    bound_time(session, Pipeline.held_until, HOLD_SECONDS)


def due_of_others(passed_over: Collection[str]) -> ColumnElement[bool]:
    """The unfinished pipelines that no process holds, but for those of some projects."""
    return (
        Pipeline.status.in_(FOLLOWED)
        & (Pipeline.held_until <= db_now())
        & Pipeline.project_id.not_in(sorted(passed_over))
    )


def hold(session: Session, claim: Claim, seconds: float = HOLD_SECONDS) -> None:
    """Keep the pipeline from other processes for this long, or hand it back after them."""
    session.execute(
        update(Pipeline)
        .where(Pipeline.id == claim.job_id, Pipeline.epoch == claim.epoch)
        .values(held_until=db_now() + seconds)
        .execution_options(synchronize_session=False)
    )


def fenced(session: Session, claim: Claim, status: str = "running") -> Pipeline:
    """The pipeline, in this status and locked until the commit.

    Raises:
        LeaseLost: a user changed it meanwhile, or another process advances it.
    """
    found = session.scalar(select(Pipeline).where(Pipeline.id == claim.job_id).with_for_update())
    if found is None or found.epoch != claim.epoch or found.status != status:
        raise LeaseLost(f"{claim.owner} no longer holds {claim.job_id} (epoch {claim.epoch})")
    return found


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
    work.record(f"pipeline.{pipeline.status}", pipeline.id)
    webhooks.pipeline_ended(pipeline)
