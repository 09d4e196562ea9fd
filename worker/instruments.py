"""Metrics of a run, written to a file that its supervisor reads and exports to Prometheus.

Prometheus cannot scrape a run directly: it is short-lived and may block in a GPU call. No label identifies a job, a
project or a model.
"""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, write_to_textfile

from core.claims import Claim
from core.step_metrics import StepMetrics
from core.storage.disk import Refusals
from core.storage.store import FailedCleanups
from core.telemetry import logs, tracing
from graders.spec import GraderSpec, parts_of
from graders.types import Grade, Grader, Item, Sample
from worker import process
from worker import progress as what_it_does
from worker.progress import PROGRESS, repeated
from worker.sampling import Answer, Sampler, Sampling
from worker.telemetry import Sandbox
from worker.types import Prompt

WRITE_SECONDS = 5.0
COUNTED = CollectorRegistry(auto_describe=False)
COUNTED.register(Sandbox("regraft_run_sandbox"))
COUNTED.register(FailedCleanups("regraft_run_failed_cleanups"))
COUNTED.register(Refusals("regraft_run_storage_refusals"))
STEP_SECONDS = Histogram(
    "regraft_step_seconds",
    "Duration of a training step, by phase; `all` is the whole step.",
    ("phase",),
    buckets=(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
    registry=COUNTED,
)
SAMPLED = Counter("regraft_sampled_tokens", "Completion tokens sampled.", registry=COUNTED)
TRAINED = Counter("regraft_trained_tokens", "Tokens trained on.", registry=COUNTED)
REWARD = Gauge(
    "regraft_reward", "Mean reward of the latest step with a reward.", ("split",), registry=COUNTED
)
MIXED = Gauge(
    "regraft_mixed_groups_share",
    "Share of the latest step's groups with different rewards. Zero-variance groups have no gradient.",
    registry=COUNTED,
)
GRADE_SECONDS = Histogram(
    "regraft_grade_seconds",
    "Duration of one grade.",
    ("grader_type",),
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
    registry=COUNTED,
)
GRADES = Counter(
    "regraft_grades",
    'Grades by result: "graded", or the reason for a missing score.',
    ("grader_type", "result"),
    registry=COUNTED,
)


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Write all metrics to `path` every few seconds during the context, and at its end."""

    def write() -> None:
        with suppress(OSError):  # a full disk, which other writes report; the next write has all counts
            write_to_textfile(str(path), COUNTED)

    with repeated(write, WRITE_SECONDS, name="metrics"):
        yield


@contextmanager
def attempt(claim: Claim, progress: Path, otlp_endpoint: str) -> Iterator[None]:
    """Attribute metrics, logs and traces during the context to this attempt."""
    with (
        written_to(process.figures_of(progress)),
        what_it_does.written_to(process.now_of(progress)),
        logs.bound(job_id=claim.job_id, attempt=claim.epoch),
        tracing.exported(otlp_endpoint, "regraft-run"),
        tracing.attempt(claim.job_id, claim.epoch),
    ):
        yield


def recorded(step: StepMetrics) -> None:
    """Count a finished step."""
    for phase, seconds in step.timing.step:
        STEP_SECONDS.labels("all" if phase == "full_iteration" else phase).observe(seconds)
    TRAINED.inc(step.trained_tokens or 0)
    for split, reward in (("train", step.train_mean_reward), ("valid", step.full_valid_mean_reward)):
        if reward is not None:
            REWARD.labels(split).set(reward)
    if step.groups_mixed_share is not None:
        MIXED.set(step.groups_mixed_share)


class InstrumentedSampler:
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, prompts_P: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Answer]:
        answers = self._sampler.sample(prompts_P, sampling)  # called eagerly, as in HeartbeatSampler
        return self._observed(answers, len(prompts_P) * sampling.group_size, validates=sampling.step == 0)

    async def _observed(
        self, answers: AsyncIterator[Answer], wanted: int, *, validates: bool
    ) -> AsyncIterator[Answer]:
        PROGRESS.sampling(wanted, validates=validates)
        async for answer in answers:
            SAMPLED.inc(len(answer.rollout.output_ids_T))
            PROGRESS.sampled()
            yield answer


class InstrumentedGrader:
    """Counts each grader of a multi or a select by its own type."""

    def __init__(self, grader: Grader, spec: GraderSpec) -> None:
        self._grader = grader
        self.name, self.type = grader.name, grader.type
        self._types = {key: part.type for key, part in parts_of(spec).items()}
        PROGRESS.with_grader()

    async def grade(self, sample: Sample, item: Item) -> Grade:
        started = time.perf_counter()
        try:
            with tracing.span("grade", **{"regraft.grader_type": self.type}):
                grade = await self._grader.grade(sample, item)
        except Exception:
            self._count(self.type, "raised", time.perf_counter() - started)
            raise
        self._count(self.type, _result(grade), time.perf_counter() - started)
        PROGRESS.graded()
        for key, part in grade.sub_grades.items():
            self._count(self._types[key], _result(part), part.seconds)
        return grade

    def _count(self, grader_type: str, result: str, seconds: float) -> None:
        GRADE_SECONDS.labels(grader_type).observe(seconds)
        GRADES.labels(grader_type, result).inc()


def _result(grade: Grade) -> str:
    return "graded" if grade.error is None else grade.error.value
