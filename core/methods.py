"""What a user may ask of training, as types that refuse what they do not know. "auto" is resolved here only."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Bounds stand on the number, not on the field: pydantic would compare "auto" with them, too, and raise TypeError.
Auto = Literal["auto"]


class Value(BaseModel):
    # Strict, so that "8" is not silently an 8 and true is not a 1.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Advanced(Value):
    """What OpenAI does not let its users set. Every one is shown on the running job."""

    loss: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    # How a group's rewards become advantages after centring: divide by the std of the group, of the batch, or not.
    advantage_scale: Auto | Literal["group", "batch", "none"] = "auto"
    group_size: Auto | Annotated[int, Field(ge=2, le=256)] = "auto"  # below two there is no sibling to beat
    learning_rate: Auto | Annotated[float, Field(gt=0, le=1)] = "auto"
    lora_rank: int = Field(default=16, ge=1, le=256)
    lora_alpha: int = Field(default=32, ge=1, le=1024)
    temperature: float = Field(default=1.0, gt=0, le=2)
    max_completion_tokens: Auto | Annotated[int, Field(ge=1, le=131072)] = "auto"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0, le=10)  # DAPO's clip-higher
    kl: float = Field(default=0.0, ge=0, le=10)  # weight of k3 against the base model; 0 costs nothing
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    # Temperature of validation: 0 is greedy.
    eval_temperature: Auto | Annotated[float, Field(ge=0, le=2)] = "auto"


class Hyperparameters(Value):
    """method.reinforcement.hyperparameters, with OpenAI's names and bounds."""

    batch_size: Auto | Annotated[int, Field(ge=1, le=256)] = "auto"  # prompts a step
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0)] = "auto"
    n_epochs: Auto | Annotated[int, Field(ge=1, le=50)] = "auto"
    reasoning_effort: Literal["default", "low", "medium", "high"] = "default"
    compute_multiplier: Auto | Annotated[float, Field(gt=0.00001, le=10)] = "auto"
    eval_interval: Auto | Annotated[int, Field(ge=1)] = "auto"
    eval_samples: Auto | Annotated[int, Field(ge=1, le=64)] = "auto"
    advanced: Advanced = Advanced()

    @model_validator(mode="after")
    def combinations_that_work(self) -> "Hyperparameters":
        samples, temperature = self.eval_samples, self.advanced.eval_temperature
        if temperature == 0 and samples != "auto" and samples > 1:
            raise ValueError(
                "eval_samples above 1 needs eval_temperature above 0: greedy answers are all the same"
            )
        if self.reasoning_effort != "default":
            raise ValueError(
                "reasoning_effort other than 'default' is not supported by the models served here"
            )
        if self.advanced.learning_rate != "auto" and self.learning_rate_multiplier != "auto":
            raise ValueError(
                "learning_rate_multiplier scales the automatic learning rate: give it or learning_rate"
            )
        if self.advanced.group_size != "auto" and self.compute_multiplier != "auto":
            raise ValueError("compute_multiplier scales the automatic group size: give it or group_size")
        return self


class Resolved(Value):
    """Hyperparameters with every "auto" replaced by a number: what the run really does."""

    batch_size: int
    learning_rate: float
    n_epochs: int
    total_steps: int
    eval_interval: int
    eval_samples: int
    eval_temperature: float
    loss: Literal["grpo", "dr_grpo", "dapo"]
    advantage_scale: Literal["group", "batch", "none"]
    group_size: int
    lora_rank: int
    lora_alpha: int
    temperature: float
    max_completion_tokens: int
    clip_low: float
    clip_high: float
    kl: float
    max_grad_norm: float
    warmup_steps: int


def base_learning_rate(parameters: int) -> float:
    """For LoRA on all linear layers; small models need more.

    4e-5 and 2e-4 are what trainers publish for 4-8 B and 1 B. For 135 M we measured on the demo's task: 3e-4 takes
    validation reward from 0.40 to 0.89 in ten steps; 1e-3 loses all entropy in five and ends below the base.
    """
    for limit, rate in ((300e6, 3e-4), (1.2e9, 2e-4), (14e9, 4e-5)):
        if parameters <= limit:
            return rate
    return 2e-5


def resolve(asked: Hyperparameters, *, rows: int, parameters: int, context: int) -> Resolved:
    """Replace every "auto". `rows` of training data, `parameters` of the base model, `context` in tokens."""
    advanced = asked.advanced
    batch_size = min(_or(asked.batch_size, 8), rows)
    # Below twenty steps a policy has hardly moved, so small files are read more than once.
    n_epochs = _or(asked.n_epochs, max(1, min(10, math.ceil(20 * batch_size / rows))))
    total_steps = math.ceil(rows * n_epochs / batch_size)
    eval_samples = _or(asked.eval_samples, 1)
    learning_rate = base_learning_rate(parameters) * _or(asked.learning_rate_multiplier, 1.0)
    scale: dict[str, Literal["group", "batch", "none"]] = {
        "grpo": "group",
        "dr_grpo": "none",
        "dapo": "batch",
    }
    return Resolved(
        batch_size=batch_size,
        learning_rate=_or(advanced.learning_rate, learning_rate),
        n_epochs=n_epochs,
        total_steps=total_steps,
        eval_interval=_or(asked.eval_interval, max(1, math.ceil(total_steps / 10))),
        eval_samples=eval_samples,
        eval_temperature=_or(advanced.eval_temperature, 0.0 if eval_samples == 1 else advanced.temperature),
        loss=advanced.loss,
        advantage_scale=_or(advanced.advantage_scale, scale[advanced.loss]),
        group_size=_or(advanced.group_size, max(2, round(8 * _or(asked.compute_multiplier, 1.0)))),
        lora_rank=advanced.lora_rank,
        lora_alpha=advanced.lora_alpha,
        temperature=advanced.temperature,
        max_completion_tokens=_or(advanced.max_completion_tokens, min(512, context // 2)),
        clip_low=advanced.clip_low,
        clip_high=advanced.clip_high,
        kl=advanced.kl,
        max_grad_norm=advanced.max_grad_norm,
        warmup_steps=advanced.warmup_steps,
    )


def _or(value: Any, automatic: Any) -> Any:
    return automatic if value == "auto" else value
