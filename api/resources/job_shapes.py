"""Jobs, their events and their checkpoints, as responses show them."""

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from api.http.shapes import Measured, SchemaOf
from core.database.states import JOB
from core.database.tables import Checkpoint, Event, Job
from core.jobs import (
    budgets,
    distillation,
    fairness,
    integrations,
    lifecycle,
    methods,
    offline_hyperparameters,
    usage,
)
from core.jobs.budgets import Price
from core.jobs.hyperparameter_places import with_values
from core.jobs.verdict import Outcome
from core.masking import hide_in_method
from core.results import evals
from core.results.job_results import JobResult
from core.results.lineage import Parent


class QueueOut(BaseModel):
    """Position of a waiting job in its queue, from 1, and what blocks it."""

    position: int
    reason: str


class VerdictOut(BaseModel):
    """The delivered model against the start of the job on the validation rows (docs/howto/verdict.md)."""

    outcome: Outcome
    base_reward: float
    tuned_reward: float
    difference: float
    ci_low: Annotated[
        float | None,
        Field(description="Lower end of the 95 % interval of the difference; null: too few rows."),
    ]
    ci_high: Annotated[float | None, Field(description="Upper end.")]
    wins: int
    losses: int
    ties: int
    rows: int
    ungraded: Annotated[
        int, Field(description="Rows that are left out because one of the two has no graded answer.")
    ]
    step: Annotated[int, Field(description="Of the delivered checkpoint.")]
    ground: Annotated[
        str | None, Field(description="The damage that makes it worse; null: decided by the interval alone.")
    ] = None
    start: Annotated[
        str | None, Field(description="The tuned model that the job trained further; null: the base model.")
    ] = None
    held_out: Annotated[bool, Field(description="False: the validation file is the training file.")] = True
    shadow_difference: Annotated[
        float | None, Field(description="The difference by the shadow grader; null: the job has none.")
    ] = None
    shadow_ci_low: Annotated[float | None, Field(description="Lower end of its 95 % interval.")] = None
    shadow_ci_high: Annotated[float | None, Field(description="Upper end.")] = None


class ResultOut(BaseModel):
    """The validation of the delivered checkpoint. Lists, pages and commands show these numbers as the job's result."""

    step: Annotated[int, Field(description="Of the delivered checkpoint.")]
    metric: Literal["full_valid_mean_reward", "full_valid_loss"]
    start: Annotated[
        float | None, Field(description="Of the model that the job started from; null: it was not validated.")
    ]
    value: float


class ProgressOut(BaseModel):
    """The work of the job's run inside of its step, about a second ago."""

    step: Annotated[
        int | None,
        Field(
            description="null: no step has begun. 0: the validation of the model that the job starts from."
        ),
    ]
    phase: Literal[
        "loading",
        "starting the sampler",
        "sampling",
        "grading",
        "compiling",
        "training",
        "validation",
        "saving",
        "waiting for the database",
        "waiting for the blob store",
        "waiting for the disk",
        "waiting for the file descriptors",
        "waiting for the name server",
        "waiting for the network",
        "waiting for the main memory",
        "waiting for the inference server",
        "waiting for the grader's server",
        "waiting for the teacher",
    ]
    done: Annotated[
        int | None,
        Field(
            description="Answers of this phase, rows of a file, or kernels that are compiled; null: none are counted."
        ),
    ]
    of: int | None
    since: Annotated[int, Field(description="Unix time in seconds.")]


class JobErrorOut(BaseModel):
    code: str
    message: str
    param: str | None


class MethodOut(BaseModel, extra="allow"):
    """The method, and under its type its object, as in the request."""

    type: methods.Method


class PreviewedOut(BaseModel):
    """The results of the preview of the same request (docs/howto/preview.md)."""

    id: str
    created_at: int
    answers: int
    passed: int
    mean_reward: float | None
    signal: Annotated[
        float, Field(description="The expected share of groups with signal at the job's group size.")
    ]
    verdict: str


class ResourcesOut(BaseModel):
    """The choice of the request. null: that of the job's GPU class."""

    gpus: Annotated[int | None, Field(description="On each node.")]
    nodes: int | None


class JobOut(BaseModel):
    """Every key of OpenAI's job is always present, with null for no value."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    error: Annotated[dict[str, Any], SchemaOf(JobErrorOut)] | None
    seed: int
    hyperparameters: dict[str, Any] | None  # of a supervised job, as in method.supervised; else null
    method: Annotated[dict[str, Any], SchemaOf(MethodOut)]
    integrations: list[Any]
    metadata: dict[str, str] | None
    user_provided_suffix: str | None
    usage_metrics: dict[str, Any] | None
    queue: QueueOut | None  # null: the job is not waiting
    shared_with_openai: Literal[False] = False
    eval_id: str | None  # the eval of its validations; null: nothing is graded
    # Extensions.
    lineage: dict[str, Any] | None  # the tuned model that the job trains further; null: a base model
    budget: dict[str, Any] | None
    resources: ResourcesOut
    estimate: dict[str, Any] | None
    result: ResultOut | None  # null: no checkpoint is delivered, or it was not validated
    verdict: VerdictOut | None  # null: the job has not ended, or there was nothing to compare
    progress: ProgressOut | None  # null: the job is not running
    preview: PreviewedOut | None  # null: the request had no preview

    @classmethod
    def of(
        cls, job: Job, price: Price, place: fairness.QueuePosition | None, result: JobResult | None
    ) -> "JobOut":
        """Build it from the row, its place in the queue and its result.

        `render` reads the places and the results of a hundred jobs with one query each.
        """
        asked = integrations.of_method(job)
        parent = Parent.of(job)
        shown = hide_in_method(asked) | {"hyperparameters": render_hyperparameters(job)}
        return cls(
            id=job.id,
            created_at=job.created_at,
            finished_at=job.finished_at,
            estimated_finish=job.estimated_finish,
            model=job.model if parent is None else parent.model,
            fine_tuned_model=job.fine_tuned_model,
            organization_id=job.organization_id,
            status=job.status,
            training_file=job.training_file,
            validation_file=job.validation_file,
            result_files=[job.result_file] if job.result_file else [],
            trained_tokens=job.trained_tokens if job.status in JOB.final else None,
            error=job.error,
            seed=job.seed,
            hyperparameters=shown["hyperparameters"] if job.method == "supervised" else None,
            method={"type": job.method, job.method: shown},
            integrations=integrations.render(job),
            metadata=job.metadata_,
            user_provided_suffix=job.suffix,
            usage_metrics=usage.render(job, price),
            queue=None if place is None else QueueOut(position=place.position, reason=place.reason),
            eval_id=evals.eval_id(job.id) if evals.has_eval(job) else None,
            budget=budgets.render(job),
            resources=ResourcesOut(gpus=job.gpus, nodes=job.nodes),
            lineage=None if parent is None else parent.as_data() | {"base_model": job.model},
            result=None if result is None else ResultOut.model_validate(asdict(result)),
            verdict=None if job.verdict is None else VerdictOut(**job.verdict),
            progress=lifecycle.progress_of(job),
            preview=None if job.preview is None else PreviewedOut(**job.preview),
            estimate=None if job.status in JOB.final else usage.render_estimate(job, price),
        )


class EventOut(BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    type: str
    data: Measured | dict[str, Any]  # of the type `metrics`: the step's

    @classmethod
    def of(cls, event: Event) -> "EventOut":
        return cls(
            id=event.id,
            created_at=event.created_at,
            level=event.level,
            message=event.message,
            type=event.type,
            data=event.data,
        )


class CheckpointOut(BaseModel):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str | None  # null: the name was deleted
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, int | float]
    # The folder of its PEFT adapter, or of its whole model, where server and user share a machine.
    adapter: str | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str | None, adapter: str | None) -> "CheckpointOut":
        return cls(
            id=checkpoint.id,
            created_at=checkpoint.created_at,
            fine_tuned_model_checkpoint=name,
            fine_tuning_job_id=checkpoint.job_id,
            step_number=checkpoint.step,
            metrics=checkpoint_metrics(checkpoint),
            adapter=adapter,
        )


# The automatic values that a multiplier scales.
SCALED = {"learning_rate": "learning_rate_multiplier", "group_size": "compute_multiplier"}


def render_hyperparameters(job: Job) -> dict[str, Any]:
    """The requested hyperparameters, "auto" included, and their resolved values once a run has resolved them.

    A clone may send all of them. So a value that a requested multiplier scales is left out.
    """
    asked: dict[str, Any] = job.body["hyperparameters"]
    resolved = job.resolved
    if resolved is None:
        return asked
    if methods.variant(job.method, job.body) in methods.OFFLINE:
        return offline_hyperparameters.with_resolved_values(asked, resolved)
    if job.method == distillation.METHOD:
        return distillation.with_resolved_values(asked, resolved)
    # OpenAI's own names stay at the top level, where its users expect them.
    known = {name: value for name, value in resolved.items() if name in asked}
    hidden = {name for name, by in SCALED.items() if asked.get(by, "auto") != "auto"}
    ours = {name: value for name, value in resolved.items() if name not in hidden}
    return asked | known | {"advanced": with_values(asked["advanced"], ours)}


OFFLINE_CHECKPOINT_METRICS = (
    "train_loss",
    "train_mean_token_accuracy",
    "valid_loss",
    "valid_mean_token_accuracy",
    "full_valid_loss",
    "full_valid_mean_token_accuracy",
    "train_mean_reward_accuracy",
    "full_valid_mean_reward_accuracy",
    "full_valid_mean_reward_margin",
)
DISTILLATION_CHECKPOINT_METRICS = ("teacher_kl", "full_valid_teacher_kl")


def checkpoint_metrics(checkpoint: Checkpoint) -> dict[str, int | float]:
    """The numbers that clients rank checkpoints by, in both common spellings."""
    measured = checkpoint.metrics
    train, valid = measured.get("train_mean_reward"), measured.get("full_valid_mean_reward")
    shown = {
        "step": checkpoint.step,
        "train_mean_reward": train,
        "train_reward_mean": train,
        "full_valid_mean_reward": checkpoint.valid_reward if valid is None else valid,
        "valid_reward_mean": checkpoint.valid_reward if valid is None else valid,
        "full_valid_mean_parse_error": measured.get("full_valid_mean_parse_error"),
        "full_valid_stderr": measured.get("full_valid_stderr"),
        "full_valid_difference": measured.get("full_valid_difference"),
        **{
            name: measured.get(name)
            for name in (*OFFLINE_CHECKPOINT_METRICS, *DISTILLATION_CHECKPOINT_METRICS)
        },
        "completion_tokens_mean": measured.get("completion_tokens_mean"),
        "reasoning_tokens_mean": measured.get("reasoning_tokens_mean"),
    }
    return {name: value for name, value in shown.items() if value is not None}
