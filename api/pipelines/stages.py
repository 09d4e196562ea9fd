"""The actions of each kind of stage: when it starts, and when its job, file or eval run has ended."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from anyio import to_thread
from sqlalchemy import select

from api.http.deps import Service
from api.resources import eval_checks, job_checks, jobs, validation_split
from api.resources.estimates import in_reader
from api.resources.eval_requests import RunCreate
from api.resources.job_body import JobCreate
from api.resources.job_checks import Accepted, EarlierRuns
from api.resources.pipeline_requests import (
    MixStage,
    SampleStage,
    SelectStage,
    SweepStage,
    of_pipeline,
    parsed_job,
)
from core.claims import Claim, LeaseLost
from core.database.audit import Actor
from core.database.engine import Work, unit_of_work
from core.database.states import EVAL_RUN
from core.database.tables import Eval, EvalRun, File, Job, Pipeline, Project, now
from core.errors import ModelNotFound, NotFound, QuotaExceeded, ServiceError
from core.evals import catalog, items, summary
from core.evals import lifecycle as eval_runs
from core.evals.items import MAX_ROWS
from core.jobs.budgets import Price
from core.outages import Resource, outage
from core.outbound.http import is_passing
from core.pipelines import graph, lifecycle, rows, sweep_jobs
from core.pipelines.lifecycle import Stage
from core.storage import files
from core.storage.datasets import LineError, numbered_lines, read_objects
from core.storage.disk import count_refusal
from core.storage.store import BlobNotFound
from core.storage.uncommitted import Uncommitted
from core.tenancy import tenants
from graders.build import NotConfigured
from graders.spec import dump

log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_ERRORS = 5  # of the service, not of the request, before a stage fails
# A file that ends the process that makes it, for example by its memory, must not do so for ever.
MAX_RESTARTS = 20
MAX_BACK_OFF = 30.0
REPEATED_ERROR = "The service failed repeatedly; its log has the reason. Retry the pipeline later."


class StageFailed(Exception):
    """The stage cannot have a result. The message is for users."""


def is_of_older_files(refusal: ServiceError) -> bool:
    """Whether a name in the operator's files is refused. The API that accepted the pipeline may have newer files."""
    return isinstance(refusal, ModelNotFound) or isinstance(refusal.__cause__, NotConfigured)


@dataclass
class Advance:
    """One look at a pipeline that `claim` holds: follow its running stages, then start those that are ready."""

    service: Service
    claim: Claim
    _pause: float = 0.0

    async def run(self) -> float:
        """Return the seconds until the next look is due, beyond the regular ones.

        Raises:
            LeaseLost: a user or another process has changed the pipeline.
        """
        self._pause = 0.0
        pipeline = await to_thread.run_sync(self._read)
        if (await to_thread.run_sync(lambda: self.project)).archived_at is not None:
            await self._write(lambda work, row: lifecycle.cancel(work, row))
            return 0.0
        if pipeline.status == "paused":
            return 0.0
        for stage in pipeline.stages:
            if stage["status"] == "running":
                await self._guarded(stage, self._follow)
        pipeline = await to_thread.run_sync(self._read)
        known = {stage["name"]: stage for stage in pipeline.stages}
        for name in lifecycle.ready(pipeline.stages):
            await self._guarded(known[name], partial(self._start, pipeline))
        await self._write(lambda work, row: lifecycle.settle(work, row))
        return self._pause

    async def _guarded(self, stage: Stage, act: Callable[[Stage], Any]) -> None:
        """Call `act`. A mistake of the user fails the stage; after a temporary failure it is tried again."""
        try:
            await act(stage)
        except LeaseLost:
            raise
        except StageFailed as cause:
            await self._fail(stage, "invalid_stage", str(cause))
        except QuotaExceeded as limit:  # until work of the project has ended, or its user has freed storage
            await self._back_off(stage, {"note": limit.message, "waiting_since": None})
        except ServiceError as cause:
            if is_passing(cause.status_code) or is_of_older_files(cause):
                await self._try_again(stage, cause.message, cause)
            else:
                await self._fail(stage, cause.code or "invalid_stage", cause.message)
        except Exception as cause:
            resource = outage(cause)
            if resource is Resource.DATABASE:  # nothing can be noted
                raise
            log.exception("the stage %s of %s failed", stage["name"], self.claim.job_id)
            count_refusal(resource)
            note = None if resource is None else f"The stage waits for the {resource}."
            await self._try_again(stage, note, ServiceError(REPEATED_ERROR))

    async def _try_again(self, stage: Stage, note: str | None, error: ServiceError) -> None:
        """After an error of the service: at most MAX_ERRORS times, beside those within the patience with an outage.

        Args:
            note: the unavailable resource; None: the error is not temporary.
            error: the error of the stage if no further try succeeds.
        """
        is_patient, errors = False, stage.get("errors", 0)
        changes: Stage = {"note": note or "The service had an error; the stage is tried again."}
        if note is not None:
            changes["waiting_since"] = since = stage.get("waiting_since") or now()
            is_patient = now() - since < self.service.settings.patience_seconds
        if not is_patient:
            changes["errors"] = errors = errors + 1
        if errors > MAX_ERRORS:
            await self._fail(stage, error.code, error.message)
            return
        await self._back_off(stage, changes)

    async def _back_off(self, stage: Stage, changes: Stage) -> None:
        """Try the stage again, later after each try."""
        tries = stage.get("tries", 0) + 1
        self._pause = max(self._pause, min(2.0 ** min(tries, 10), MAX_BACK_OFF))
        # `restarts` as it was before this try, which ended with an error and not with its process.
        changes |= {"tries": tries, "restarts": stage.get("restarts", 0)}
        await self._write(lambda work, row: lifecycle.update_stage(row, stage["name"], **changes))

    async def _fail(self, stage: Stage, code: str | None, message: str) -> None:
        def fail(work: Work, row: Pipeline) -> None:
            lifecycle.cancel_jobs(work, stage)  # a retry of the stage makes others
            lifecycle.failed(row, stage["name"], code, message)

        await self._write(fail)

    # Reading and writing.

    def _read(self) -> Pipeline:
        with self.service.database.read() as session:
            return session.scalars(select(Pipeline).where(Pipeline.id == self.claim.job_id)).one()

    @cached_property
    def author(self) -> Actor:
        """The creator of the pipeline, on whose behalf its stages start."""
        return Actor(self._read().actor, self.project.organization_id, self.project.id)

    @cached_property
    def project(self) -> Project:
        with self.service.database.read() as session:
            return tenants.get_project(session, self._read().project_id)

    async def _write(self, change: Callable[[Work, Pipeline], T]) -> T:
        """Change the pipeline in one transaction, if it is still held."""

        def write() -> T:
            with unit_of_work(self.service.database, self.service.send, self.author) as work:
                return change(work, lifecycle.locked(work.session, self.claim))

        return await to_thread.run_sync(write)

    # Starting.

    async def _start(self, pipeline: Pipeline, stage: Stage) -> None:
        spec = graph.filled(stage["spec"], lifecycle.results(pipeline.stages))
        match stage["kind"]:
            case "job":
                await self._start_job(pipeline, stage, spec)
            case "sweep":
                await self._start_sweep(pipeline, stage, spec)
            case "sample":
                await self._start_sampling(pipeline, stage, spec)
            case _:
                await self._write(lambda work, row: lifecycle.started(row, stage["name"]))
                await self._make_file(stage, spec)

    async def _start_job(self, pipeline: Pipeline, stage: Stage, spec: Mapping[str, Any]) -> None:
        project, service = self.project, self.service
        body = parsed_job(of_pipeline(spec, pipeline.id, stage["name"]), stage["name"])
        body = await job_checks.usable_body(body, service, project)
        accepted = await to_thread.run_sync(job_checks.accept, body, service, project)
        earlier = await to_thread.run_sync(job_checks.earlier_runs, body, accepted.model, project, service)
        parts = None if body.validation_split is None else await self._split(body, body.validation_split)
        uncommitted = Uncommitted(service.blobs, *(() if parts is None else parts.keys()))

        def create(work: Work, row: Pipeline) -> None:
            job = jobs.added(work, body, accepted, project, service, earlier, parts)
            lifecycle.started(row, stage["name"], job_id=job.id)
            if parts is not None:
                uncommitted.keep(*parts.keys(job.training_file, job.validation_file))

        try:
            await self._write(create)
        finally:
            await to_thread.run_sync(uncommitted.close)

    async def _start_sweep(self, pipeline: Pipeline, stage: Stage, spec: Mapping[str, Any]) -> None:
        project, service, sweep = self.project, self.service, SweepStage.model_validate(spec)
        sweep = sweep.with_one_seed()
        budget = sweep.gpu_seconds(Price.of(service.settings))  # a later change of the price does not move it
        sent = [of_pipeline(job, pipeline.id, stage["name"]) for job in sweep.jobs]
        bodies = [parsed_job(job, stage["name"]) for job in sent]
        # All have the same grader and the same tools.
        usable = await job_checks.usable_body(bodies[0], service, project)
        if tools := usable.reinforcement("A sweep").tools:
            bodies = [body.with_tools(tools) for body in bodies]

        def accepted(body: JobCreate) -> tuple[JobCreate, Accepted, EarlierRuns]:
            model = job_checks.accept(body, service, project)
            return body, model, job_checks.earlier_runs(body, model.model, project, service)

        ready = await to_thread.run_sync(lambda: [accepted(body) for body in bodies])

        def create(work: Work, row: Pipeline) -> None:
            made = [jobs.added(work, body, one, project, service, earlier) for body, one, earlier in ready]
            entries = sweep_jobs.stage_jobs(sweep.settings, made)
            lifecycle.started(row, stage["name"], jobs=entries, budget_gpu_seconds=budget)

        await self._write(create)

    async def _split(self, body: JobCreate, share: float) -> validation_split.SplitFiles:
        made = partial(
            validation_split.split,
            self.service,
            self.project,
            body.training_file,
            share,
            body.method.type,
            learns_from_file=body.method.learns_from_file,
        )
        return await in_reader(self.service, self.project, made)

    async def _start_sampling(self, pipeline: Pipeline, stage: Stage, spec: Mapping[str, Any]) -> None:
        project, service = self.project, self.service
        sampled = SampleStage.model_validate(spec)
        criteria = [] if sampled.grader is None else [sampled.grader]
        name = f"{pipeline.name or pipeline.id}: {stage['name']}"[:256]

        def prepared() -> File:
            content = self._most(rows.prompts(self._objects(sampled.file), sampled.n), sampled.n)
            return self._store_file(f"{pipeline.id}.{stage['name']}.prompts.jsonl", content, purpose="evals")

        file = await in_reader(service, project, partial(self._create_file, prepared))
        uncommitted = Uncommitted(service.blobs, file.blob_key)
        try:
            run = _sampling_run(sampled.model, file, spec)
            await eval_checks.refuse_run(run, {}, criteria, service, project)

            def checked() -> int:
                eval_checks.refuse_model(run.data_source, service, project)  # type: ignore[arg-type]
                return eval_checks.count_rows(run, file, {}, criteria, service, project)

            total = await in_reader(service, project, checked)

            def create(work: Work, row: Pipeline) -> None:
                self._add(work, file)
                eval_run = self._add_eval_run(work, name, sampled, run.stored_source(), file, total)
                lifecycle.started(row, stage["name"], eval_id=eval_run.eval_id, run_id=eval_run.id)
                uncommitted.keep_all()

            await self._write(create)
        finally:
            await to_thread.run_sync(uncommitted.close)

    def _add_eval_run(
        self, work: Work, name: str, sampled: SampleStage, source: dict[str, Any], file: File, total: int
    ) -> EvalRun:
        """Create the eval of a sampling stage and its only run."""
        criteria = [] if sampled.grader is None else [sampled.grader]
        parent = Eval(
            project_id=self.project.id,
            name=name,
            data_source_config={"type": "custom", "item_schema": {"type": "object"}},
            testing_criteria=[dump(criterion) for criterion in criteria],
        )
        catalog.create(work, parent)
        eval_run = EvalRun(
            eval_id=parent.id,
            project_id=self.project.id,
            name=name,
            model=sampled.model,
            data_source=source,
            file_id=file.id,
            total=total,
            budget=None if sampled.budget is None else sampled.budget.to_row(),
            summary=summary.empty([criterion.name for criterion in criteria]),
        )
        eval_runs.create(work, eval_run)
        limits = tenants.limits(self.project, self.service.settings.default_limits)
        tenants.refuse_eval_run_beyond(work.session, self.project.id, limits)
        return eval_run

    # Following.

    async def _follow(self, stage: Stage) -> None:
        if "job_id" in stage:
            await self._follow_job(stage)
        elif "jobs" in stage:
            await self._follow_sweep(stage)
        elif "run_id" in stage:
            await self._follow_sampling(stage)
        else:
            await self._make_file_again(stage)

    async def _follow_job(self, stage: Stage) -> None:
        job = await to_thread.run_sync(self._job, stage["job_id"])
        name = stage["name"]
        if job.status == "succeeded" and job.fine_tuned_model:
            model = job.fine_tuned_model
            await self._write(lambda work, row: lifecycle.succeeded(row, name, model=model))
        elif job.status in ("failed", "cancelled"):
            error = job.error or {"code": "cancelled", "message": "The job was cancelled."}
            await self._write(
                lambda work, row: lifecycle.failed(
                    row, name, error["code"], error["message"], status=job.status
                )
            )

    async def _follow_sweep(self, stage: Stage) -> None:
        stop_losers = SweepStage.model_validate(stage["spec"]).stop_losers

        def follow(work: Work, row: Pipeline) -> None:
            sweep_jobs.follow(work, row, stage, stop_losers=stop_losers)

        await self._write(follow)

    def _job(self, job_id: str) -> Job:
        with self.service.database.read() as session:
            return session.scalars(select(Job).where(Job.id == job_id)).one()

    def _eval_run(self, run_id: str) -> EvalRun:
        with self.service.database.read() as session:
            return session.scalars(select(EvalRun).where(EvalRun.id == run_id)).one()

    async def _follow_sampling(self, stage: Stage) -> None:
        run = await to_thread.run_sync(self._eval_run, stage["run_id"])
        name = stage["name"]

        def forget_prompts(work: Work) -> None:
            with suppress(NotFound):  # deleted by the user
                files.delete(work, self.project.id, run.file_id or "")

        if run.status == "completed":
            spec = SampleStage.model_validate({**stage["spec"], "file": "x", "model": "x"})

            def answers() -> Iterator[rows.Row]:
                with self.service.database.read() as session:
                    where = items.items_of_run(session, run.id)
                for item in items.find(self.service.blobs, where):
                    if (row := rows.answered(item, spec.n)) is not None:
                        yield row

            failed = "Every answer failed: see the items of the eval run."
            await self._succeed(stage, answers, failed, then=forget_prompts)
        elif run.status in EVAL_RUN.final:
            status = "cancelled" if run.status == "canceled" else "failed"
            error = run.error or {"code": "cancelled", "message": "The eval run was cancelled."}

            def end(work: Work, row: Pipeline) -> None:
                lifecycle.failed(row, name, error["code"], error["message"], status=status)
                forget_prompts(work)

            await self._write(end)

    # Files.

    async def _make_file_again(self, stage: Stage) -> None:
        """A process was stopped, or met an error, while it made the file."""
        restarts, name = stage.get("restarts", 0) + 1, stage["name"]
        if restarts > MAX_RESTARTS:
            raise StageFailed("The service was stopped repeatedly while it made the file.")
        await self._write(lambda work, row: lifecycle.update_stage(row, name, restarts=restarts))
        pipeline = await to_thread.run_sync(self._read)
        await self._make_file(stage, graph.filled(stage["spec"], lifecycle.results(pipeline.stages)))

    async def _make_file(self, stage: Stage, spec: Mapping[str, Any]) -> None:
        if stage["kind"] == "select":
            select_stage = SelectStage.model_validate(spec)

            def selected() -> Iterator[rows.Row]:
                return rows.selected(self._samples(select_stage.file), select_stage.selection())

            await self._succeed(stage, selected, "No row is left: no answer meets the conditions.")
            return
        mix = MixStage.model_validate(spec)
        parts = [rows.Part(partial(self._lines, one.file), one.weight) for one in mix.files]
        most = self.service.settings.max_upload_bytes
        await self._succeed(
            stage, lambda: rows.mixed(parts, mix.seed, most_bytes=most), "The files have no rows."
        )

    async def _succeed(
        self,
        stage: Stage,
        content: Callable[[], Iterable[rows.Row | bytes]],
        if_empty: str,
        then: Callable[[Work], None] = lambda work: None,
    ) -> None:
        """Store the stage's file and end the stage; `then` is part of its transaction."""
        service, project, name = self.service, self.project, stage["name"]
        count = 0

        def counted() -> Iterator[rows.Row | bytes]:
            nonlocal count
            for row in content():
                count += 1
                yield row

        def store() -> File:
            return self._store_file(f"{self.claim.job_id}.{name}.jsonl", counted(), purpose=files.FINE_TUNE)

        file = await in_reader(service, project, partial(self._create_file, store))
        uncommitted = Uncommitted(service.blobs, file.blob_key)
        try:
            if count == 0:
                raise StageFailed(if_empty)

            def finish(work: Work, row: Pipeline) -> None:
                self._add(work, file)
                lifecycle.succeeded(row, name, file=file.id, rows=count)
                then(work)
                uncommitted.keep_all()

            await self._write(finish)
        finally:
            await to_thread.run_sync(uncommitted.close)

    def _create_file(self, make: Callable[[], File]) -> File:
        try:
            return make()
        except (ValueError, KeyError, files.FileDamaged, BlobNotFound) as cause:
            raise StageFailed(f"The file could not be made: {cause}") from cause

    def _store_file(self, filename: str, content: Iterable[rows.Row | bytes], *, purpose: str) -> File:
        lines = self._within_storage(bounded(content, self.service.settings.max_upload_bytes))
        return files.put(self.service.blobs, self.project.id, filename, lines, purpose=purpose)

    def _within_storage(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """The lines, as far as the project may store them. Raises QuotaExceeded."""
        limits = tenants.limits(self.project, self.service.settings.default_limits)

        def free_bytes(needed: int) -> int | None:
            with self.service.database.read() as session:
                return tenants.free_storage(session, self.project.id, limits, needed=needed)

        size, free = 0, free_bytes(1)
        for line in lines:
            size += len(line)
            if free is not None and size > free:
                free = free_bytes(size)
            yield line

    def _add(self, work: Work, file: File) -> None:
        limits = tenants.limits(self.project, self.service.settings.default_limits)
        tenants.refuse_file_beyond(work.session, self.project.id, limits, file.bytes)
        files.add(work, file)

    def _content(self, file_id: str) -> Iterator[bytes]:
        with self.service.database.read() as session:
            file = files.get(session, self.project.id, file_id)
        return files.read_content(self.service.blobs, file)

    def _objects(self, file_id: str) -> Iterator[rows.Row]:
        for row in read_objects(self._content(file_id)):
            if isinstance(row, LineError):
                raise StageFailed(f"{file_id}: {row}")
            yield row[1]

    def _most(self, found: Iterable[rows.Row], samples: int) -> Iterator[rows.Row]:
        for number, row in enumerate(found, 1):
            if number > MAX_ROWS:
                most = MAX_ROWS // samples
                raise StageFailed(f"With n = {samples}, a sample stage has at most {most:,} prompts.")
            yield row

    def _samples(self, file_id: str) -> Iterator[rows.Row]:
        for row in self._objects(file_id):
            try:
                yield rows.checked(row)
            except ValueError as cause:
                raise StageFailed(f"{file_id} is not the file of a sample stage: {cause}.") from None

    def _lines(self, file_id: str) -> Iterator[bytes]:
        for number, line in numbered_lines(self._content(file_id)):
            if line is None:
                raise StageFailed(f"{file_id}: line {number} is too long.")
            yield line


def _sampling_run(model: str, file: File, spec: Mapping[str, Any]) -> RunCreate:
    """The request of an eval run that samples the prompts of the file."""
    source = {
        "type": "completions",
        "model": model,
        "source": {"type": "file_id", "id": file.id},
        "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
        "sampling_params": spec.get("sampling_params") or {},
    }
    return RunCreate.model_validate({"data_source": source, "budget": spec.get("budget")})


def bounded(content: Iterable[rows.Row | bytes], most: int) -> Iterator[bytes]:
    """The rows as lines of JSON. Raises StageFailed beyond `most` bytes, those of the largest upload."""
    size = 0
    for row in content:
        line = row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() + b"\n"
        size += len(line)
        if size > most:
            raise StageFailed(f"The file would be larger than {most:,} bytes, the limit of an upload.")
        yield line
