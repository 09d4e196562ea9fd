"""Jobs with the method `distillation`: a student learns from a teacher's probabilities of answers.

They are the student's own (`on_policy`) or those of a file (`logits`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from core.database.tables import Job
from core.errors import InvalidParameter
from core.jobs.hyperparameter_groups import (
    AnyEvaluation,
    AnyStopping,
    Auto,
    ImportanceGroup,
    Lora,
    OnlyLora,
    Optimizer,
    SampledHyperparameters,
    Sampling,
    Truncate,
    Value,
)
from core.jobs.hyperparameter_places import with_values
from core.jobs.hyperparameters import Hyperparameters
from core.jobs.offline_hyperparameters import LogitsHyperparameters

METHOD = "distillation"

# Limit of `top_k` for a teacher on a server.
MAX_SERVED_TOP_K = 1000

# Answers to each prompt. Each token has its own advantage, so fewer are needed than for one score per answer.
GROUP_SIZE = 4


class TeacherName(Value):
    # A model of the registry, a tuned model of the project, or a model on a server that the operator names.
    model: str


class DistillationSampling(Sampling):
    """Sampling of the student, in training and in validation."""

    # No thought is cut off: tokens that a budget forces are not the student's.
    thinking_budget: Auto = "auto"


class DistillationAdvanced(Value):
    """Hyperparameters beyond OpenAI's, in the groups of reinforcement jobs that `on_policy` reads."""

    train: OnlyLora = "lora"
    importance: ImportanceGroup = Truncate()
    sampling: DistillationSampling = DistillationSampling()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    stopping: AnyStopping = AnyStopping()
    evaluation: AnyEvaluation = AnyEvaluation()


class DistillationHyperparameters(SampledHyperparameters):
    """method.distillation.hyperparameters in the mode `on_policy`, with the names and bounds of reinforcement jobs."""

    advanced: DistillationAdvanced = DistillationAdvanced()

    @model_validator(mode="after")
    def _combinations_that_work(self) -> "DistillationHyperparameters":
        self.as_reinforcement()
        return self

    def as_reinforcement(self) -> Hyperparameters:
        """The same values for the loop of reinforcement jobs.

        The loss is a mean over the tokens. Validation samples at the temperature of training: the KL of greedy answers
        is another quantity.
        """
        asked = self.model_dump()
        advanced = asked.pop("advanced")
        sampling = advanced["sampling"]
        if sampling["group_size"] == "auto":
            sampling["group_size"] = GROUP_SIZE
        evaluation = advanced["evaluation"] | {"temperature": sampling["temperature"]}
        loss = {"type": "dapo", "advantage_scale": "none"}
        return Hyperparameters.model_validate(
            asked | {"advanced": advanced | {"loss": loss, "evaluation": evaluation}}
        )


class _Distillation(Value):
    teacher: TeacherName

    @field_validator("hyperparameters", mode="before", check_fields=False)
    @classmethod
    def _empty_for_null(cls, value: Any) -> Any:
        return {} if value is None else value


class OnPolicyDistillation(_Distillation):
    """method.distillation: the student samples the answers."""

    mode: Literal["on_policy"] = "on_policy"
    hyperparameters: DistillationHyperparameters = DistillationHyperparameters()


class LogitsDistillation(_Distillation):
    """method.distillation: the answers are in the file."""

    mode: Literal["logits"]
    hyperparameters: LogitsHyperparameters = LogitsHyperparameters()


def _with_mode(sent: Any) -> Any:
    """`on_policy` unless there is a mode."""
    if not isinstance(sent, Mapping):
        return sent
    if sent.get("mode") == "sequence":
        raise InvalidParameter(
            "The mode 'sequence' is not supported by this version. It is a pipeline: let the teacher answer the "
            "prompts (a stage 'sample'), keep the answers that a grader finds right ('select'), and train on them with "
            "the method 'supervised'. examples/recipes/r1_distill.toml is one.",
            param=f"method.{METHOD}.mode",
            code="invalid_value",
        )
    return {**sent, "mode": "on_policy"} if sent.get("mode") is None else sent


Distillation = Annotated[
    Annotated[OnPolicyDistillation | LogitsDistillation, Field(discriminator="mode")],
    BeforeValidator(_with_mode),
]


def teacher_of(job: Job) -> str | None:
    """The name of the job's teacher; None: a grader scores its answers."""
    return job.body["teacher"]["model"] if job.method == METHOD else None


def top_of(job: Job) -> int | None:
    """How many of a teacher's likeliest tokens the job compares; None: those of the whole vocabulary, or none."""
    if job.method != METHOD or job.body.get("mode") != "logits":
        return None
    top_k = LogitsHyperparameters.model_validate(job.body["hyperparameters"]).advanced.loss.top_k
    return None if top_k == "auto" else top_k


def other_base(name: str, base_model: str, student: str) -> str:
    """The refusal of a teacher that is a tuned model on another base model."""
    return (
        f"The teacher '{name}' is a tuned model on '{base_model}', and the student's base model is '{student}'. A "
        "tuned model can teach students on its own base model only."
    )


def hyperparameters_of(job: Job) -> Hyperparameters:
    """The hyperparameters of a job that samples answers, as its loop reads them."""
    asked = job.body["hyperparameters"]
    if job.method == METHOD:
        return DistillationHyperparameters.model_validate(asked).as_reinforcement()
    return Hyperparameters.model_validate(asked)


def with_resolved_values(requested: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The requested hyperparameters with their resolved values, as the API shows them."""
    known = {name: resolved[name] for name in requested if name in resolved}
    return {**requested, **known, "advanced": with_values(requested["advanced"], resolved)}
