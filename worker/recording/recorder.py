"""Records the steps, events, rollouts and the end of a run."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from sqlalchemy.orm import Session

from core.database.tables import File, Job, Project, RolloutPage, StepMetric
from core.jobs import budgets, events, lifecycle, usage
from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.jobs.remaining import RemainingSteps
from core.jobs.verdict import Verdict
from core.outbound import webhooks
from core.results import evals, rollouts
from core.results.lineage import Parent, start_name
from core.results.rollouts import Row
from core.step_metrics import StepMetrics
from core.tenancy import tenants
from core.tenancy.limits import NO_LIMITS, Limits
from core.units import GIB
from worker import instruments
from worker.attempt import Attempt
from worker.history import History, best_validation
from worker.recording import metrics, results
from worker.recording.checkpoints import publish
from worker.recording.rollouts import TextsOf, rows_of, with_tokens
from worker.types import Finding, GradedStep, Pause, RowScores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quota:
    """Limits of the stored samples of a job: bytes in total, and samples of one step's training or validation, and how
    many of their tokens have their values."""

    bytes_per_job: int = GIB
    samples_per_page: int = 10_000
    tokens_per_page: int = 20_000


def unreached(settings: Resolved | ResolvedOffline) -> Iterator[str]:
    """Yield a warning for each value that a warm-up as long as the job never reaches."""
    steps = f"the job has {settings.total_steps} steps"
    if (warmup := settings.warmup_steps) >= settings.total_steps:
        yield f"The learning rate never reaches {settings.learning_rate:g}: {steps}, and warmup_steps is {warmup}."
    if isinstance(settings, Resolved) and settings.kl and settings.kl_warmup_steps > settings.total_steps:
        warmup = settings.kl_warmup_steps
        yield f"The weight of the KL never reaches {settings.kl:g}: {steps}, and kl.warmup_steps is {warmup}."


class JobRecorder:
    """Writes down what a run does, in short transactions that only the holder of its claim can commit."""

    def __init__(
        self,
        attempt: Attempt,
        default_limits: Limits = NO_LIMITS,
        quota: Quota = Quota(),
        texts_of: TextsOf | None = None,
    ) -> None:
        """Without `texts_of` the values of tokens are not stored."""
        self.attempt = attempt
        self.job = attempt.job
        self.default_limits = default_limits
        self.quota = quota
        self.texts_of = texts_of

    @property
    def method(self) -> str:
        return self.job.method

    @property
    def parent_model(self) -> str | None:
        parent = Parent.of(self.job)
        return None if parent is None else parent.model

    @property
    def start_name(self) -> str:
        return start_name(Parent.of(self.job))

    @property
    def is_held_out(self) -> bool:
        return self.job.validation_file != self.job.training_file

    def resolved(self, settings: Resolved | ResolvedOffline, sampler: str | None = None) -> None:
        """Show on the job what "auto" became, and say what it is sampled with, if it is."""

        def write(session: Session, job: Job) -> None:
            if job.resolved is None:
                for warning in unreached(settings):
                    events.append(session, job.id, warning, level="warn")
            job.resolved = settings.model_dump()
            if sampler is not None:
                events.append(session, job.id, f"Sampling with {sampler}", data={"sampler": sampler})

        self.attempt.write(write)

    def recorded(self) -> tuple[list[StepMetrics], History]:
        """The metrics of all recorded steps, in order, and what rules read of them. Once for each attempt."""

        def read(session: Session) -> tuple[list[StepMetrics], History]:
            steps = events.metrics(session, self.job.id)
            job_id = self.job.id
            base_scores = events.valid_scores(session, job_id, 0)
            base_shadow_scores = events.shadow_scores(session, job_id, 0)
            warned = events.warned(session, job_id)
            best = best_validation(steps)
            best_scores = None if best is None else events.valid_scores(session, job_id, best)
            return steps, History.of(steps, base_scores, warned, base_shadow_scores, best_scores)

        return self.attempt.read(read)

    def row_scores(self, step: int) -> RowScores | None:
        return self.attempt.read(lambda session: events.valid_scores(session, self.job.id, step))

    def step(
        self,
        measured: StepMetrics,
        stored: Sequence[GradedStep],
        *,
        ahead: RemainingSteps,
        valid_scores: RowScores | None = None,
        shadow_scores: RowScores | None = None,
        findings: Sequence[Finding] = (),
        alarm: Pause | None = None,
    ) -> bool:
        """The warnings of the step are in its transaction, so that each is written exactly as often as its step."""
        step = measured.step
        pages = self._write_pages(step, stored, ahead)
        ledger = self.attempt.ledger
        grader_tokens = ledger.unbooked  # the answers of asynchronous batches are graded before their step
        learned, sampled = _sampled_tokens(stored), self.attempt.sampled

        def write(session: Session, job: Job) -> bool:
            recorded = session.get(StepMetric, (job.id, step))
            again = recorded is not None and recorded.epoch == self.attempt.claim.epoch
            if not again:  # else it was committed, and the connection broke before we heard of it
                for page in pages:
                    session.merge(page)
                events.record_step(session, self.attempt.claim, measured, valid_scores, shadow_scores)
                message, data = metrics.message(measured), measured.to_data()
                events.append(session, job.id, message, type="metrics", data=data, step=step)
                for finding in findings:
                    told = finding.event_data(step)
                    events.append(session, job.id, finding.message, level="warn", data=told, step=step)
                pending = max(0, sampled.pending - learned)
                usage.record(
                    session, job, measured, ahead, grader_tokens=grader_tokens, pending_tokens=pending
                )
                webhooks.emit_thresholds(job, measured)
                if ahead.steps:
                    self._pause_at_a_cap(session, job)
                    if alarm is not None:
                        lifecycle.pause_by_service(session, job, alarm.message, dict(alarm.data))
            return job.status == "pausing"

        pause = self.attempt.write(write)
        ledger.book(grader_tokens)
        sampled.take(learned)
        instruments.recorded(measured)
        log.info("%s", metrics.message(measured))
        return pause

    def _pause_at_a_cap(self, session: Session, job: Job) -> None:
        """The job's own budget, or what its project may use."""
        if (spent := budgets.reached(job, job.gpu_seconds)) is not None:
            message = f"Pausing fine-tuning job at its budget: {spent.message}"
            lifecycle.pause_by_service(session, job, message, spent.data)
            return
        limits = tenants.limits(session.get_one(Project, job.project_id), self.default_limits)
        if (beyond := tenants.used_up(session, job.project_id, limits)) is not None:
            message = f"Pausing fine-tuning job at a limit of its project: {beyond.message}"
            lifecycle.pause_by_service(session, job, message, {})

    def warn(self, message: str, data: dict[str, Any]) -> None:
        self.attempt.event(message, data, level="warn")

    def inform(self, message: str, data: dict[str, Any]) -> None:
        self.attempt.event(message, data)

    def judged(self, verdict: Verdict, message: str, *, level: str, data: dict[str, Any]) -> None:
        """Store the verdict with its event, once: a run that ended here before finds it stored."""
        stored = verdict.to_row()

        def write(session: Session, job: Job) -> None:
            if job.verdict != stored:
                job.verdict = stored
                events.append(
                    session, job.id, message, level=level, data={"verdict": verdict.to_row(), **data}
                )

        self.attempt.write(write)

    def succeed(self, step: int) -> None:
        file = self._result_file()

        def write(session: Session, job: Job) -> None:
            results.attach(session, job, file)
            lifecycle.succeed(session, job, fine_tuned_model=publish(session, job, step))

        self.attempt.write(write)

    def fail(self, *, code: str, message: str, param: str | None = None) -> None:
        file = self._result_file()

        def write(session: Session, job: Job) -> None:
            results.attach(session, job, file)
            lifecycle.fail(session, job, code=code, message=message, param=param)

        self.attempt.write(write)

    def _result_file(self) -> File | None:
        attempt = self.attempt
        return attempt.retry(partial(results.prepare, attempt.database, attempt.blobs, self.job))

    def _write_pages(
        self, step: int, stored: Sequence[GradedStep], ahead: RemainingSteps
    ) -> list[RolloutPage]:
        """Write the pages of a step. Each may use an equal share of the rest of the quota, so that the last steps of a
        long job have samples as well as the first ones; later pages share the bytes that a page does not use."""

        used = self.attempt.read(lambda session: rollouts.bytes_before(session, self.job.id, step))
        left = self.quota.bytes_per_job - used
        to_come = len(stored) + ahead.plain + 2 * ahead.validated
        pages: list[RolloutPage] = []
        for graded in stored:
            page, data = self._page(step, graded, left // to_come)
            self.attempt.put(page.blob_key, data)
            pages.append(page)
            left, to_come = left - page.bytes, to_come - 1
        return pages

    def _page(self, step: int, graded: GradedStep, most_bytes: int) -> tuple[RolloutPage, bytes]:
        groups = rows_of(step, graded)
        # Of validations the same prompts are left out each time, so that they can be compared.
        seed = f"{self.job.seed}/{step if graded.split == 'train' else 'valid'}"
        if self.texts_of is not None:
            groups = with_tokens(
                groups, graded, self.texts_of, most_tokens=self.quota.tokens_per_page, seed=seed
            )
        fitted = rollouts.fitted(
            groups, most_samples=self.quota.samples_per_page, most_bytes=most_bytes, seed=seed
        )
        key = f"{self.attempt.prefix}/rollouts/{graded.split}-{step:06d}.parquet"
        page = RolloutPage(
            job_id=self.job.id,
            step=step,
            split=graded.split,
            epoch=self.attempt.claim.epoch,
            blob_key=key,
            samples=fitted.samples,
            total=fitted.total,
            bytes=len(fitted.data),
            summary=self._summary(groups) if graded.split == "valid" and "grader" in self.job.body else None,
        )
        return page, fitted.data

    def _summary(self, groups: list[list[Row]]) -> dict[str, Any]:
        return evals.summary(chain.from_iterable(groups), evals.criteria(self.job.body["grader"]))


def _sampled_tokens(stored: Sequence[GradedStep]) -> int:
    """Of the answers that the step learned from."""
    groups = (group for graded in stored if graded.split == "train" for group in graded.groups_P)
    return sum(len(rollout.output_ids_T) for group in groups for rollout in group.rollouts_G)
