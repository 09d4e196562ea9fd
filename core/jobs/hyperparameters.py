"""Hyperparameters as types that reject unknown values. Only this module resolves "auto"."""

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core import chat_templates

# The bounds apply to the number, not to the field: pydantic would also compare "auto" with them and raise TypeError.
Auto = Literal["auto"]

Loss = Literal["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "gspo"]
Scale = Literal["group", "batch", "none"]
Std = Literal["population", "sample"]
Supervision = Literal["outcome", "process"]
KlEstimator = Literal["k1", "k3"]
Importance = Literal["truncate", "mask", "none"]
Overlong = Literal["score", "mask", "soft"]
Normalize = Literal["papers", "signal"]

# The divisor of a group's centered rewards, per paper; losses that average over all tokens of a batch use one std for
# the batch, so that all groups have the same divisor (and easy prompts are not amplified).
_SCALES: dict[Loss, Scale] = {
    "grpo": "group",
    "dr_grpo": "none",
    "bnpo": "batch",
    "dapo": "batch",
    "cispo": "batch",
    "gspo": "group",
}
# (clip_low, clip_high). DeepSeekMath and Dr. GRPO: one epsilon; DAPO: clip-higher; GSPO section 5.1: its ratio is a
# mean over the answer, with far less variance than that of a token. CISPO has a cap instead.
_CLIPS: dict[Loss, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "bnpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
}


NO_SAMPLER_OF_ITS_OWN = (
    "off_policy_steps needs a sampler with its own copy of the model, such as vLLM; this model is sampled with the "
    "trainer's own"
)


class Value(BaseModel):
    # Strict: "8" is not coerced to 8, nor true to 1.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Advanced(Value):
    """Hyperparameters beyond OpenAI's. The running job shows all of them."""

    loss: Loss = "dapo"
    # Divisor of a group's centered rewards: the std of the group, of the batch, or none.
    advantage_scale: Auto | Scale = "auto"
    # Std over n or over n - 1: the choice scales the effective learning rate.
    std: Auto | Std = "auto"
    # The answers over which the loss and the std of the batch average: all graded ones, or those of groups with signal.
    normalize: Normalize = "papers"
    # One reward per answer, or one per step that the grader scores.
    supervision: Supervision = "outcome"
    group_size: Auto | Annotated[int, Field(ge=2, le=256)] = "auto"  # advantages need at least two samples
    learning_rate: Auto | Annotated[float, Field(gt=0, le=1)] = "auto"
    lora_rank: int = Field(default=16, ge=1, le=256)
    lora_alpha: int = Field(default=32, ge=1, le=1024)
    temperature: float = Field(default=1.0, gt=0, le=2)
    max_completion_tokens: Auto | Annotated[int, Field(ge=1, le=131072)] = "auto"
    # Truncated answers: scored as usual, excluded from the loss, or penalized as they approach the limit.
    overlong: Overlong = "score"
    overlong_buffer: Auto | Annotated[int, Field(ge=1, le=131072)] = "auto"
    # Prompts resampled per step in place of those with a zero-variance group (DAPO's dynamic sampling).
    resample_prompts: int = Field(default=0, ge=0, le=1024)
    # 1: the next step is sampled during the update of this one, with the policy before that update.
    off_policy_steps: int = Field(default=0, ge=0, le=1)
    # Criteria for early stopping; 0 is off. worker/record/stopping.py implements them.
    stop_after_flat_evals: int = Field(default=0, ge=0)
    stop_after_silent_steps: int = Field(default=0, ge=0)
    stop_above_kl: float = Field(default=0.0, ge=0)  # nats per token
    stop_below_entropy: float = Field(default=0.0, ge=0)  # nats per token
    # The job fails if the share of groups with signal in its first step is lower.
    fail_below_signal: float = Field(default=0.0, ge=0, le=1)
    # The job fails unless its verdict is `improved` (core/jobs/verdict.py).
    require_improvement: bool = False
    updates_per_batch: int = Field(
        default=1, ge=1, le=16
    )  # passes over the same answers, with one optimizer step each
    clip_low: Auto | Annotated[float, Field(gt=0, lt=1)] = "auto"
    clip_high: Auto | Annotated[float, Field(gt=0, le=10)] = "auto"
    # Absolute, not 1 + epsilon. Below 1 it would shrink the gradient of a policy that has not changed.
    cispo_cap: Auto | Annotated[float, Field(ge=1, le=100)] = "auto"
    # Whether gradients of groups are computed as soon as they are graded, while others are still sampled.
    overlap: Auto | bool = "auto"
    # Correction of the mismatch between the probabilities of sampler and trainer.
    importance: Importance = "truncate"
    importance_cap: Auto | Annotated[float, Field(gt=1, le=100)] = "auto"
    kl: float = Field(default=0.0, ge=0, le=10)  # weight of the KL to the reference; 0 skips its computation
    kl_estimator: Auto | KlEstimator = "auto"
    reference_refresh_steps: int = Field(default=0, ge=0)  # 0: the reference stays the base model
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    # Chat template by a name of core/chat_templates.py; auto: that of the registry or the model.
    chat_template: Auto | chat_templates.Name = "auto"
    # Temperature of validation; 0 is greedy.
    eval_temperature: Auto | Annotated[float, Field(ge=0, le=2)] = "auto"

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> "Advanced":
        if self.loss == "cispo" and (self.clip_low != "auto" or self.clip_high != "auto"):
            raise ValueError("clip_low and clip_high have no effect with loss 'cispo': use cispo_cap")
        if self.loss != "cispo" and self.cispo_cap != "auto":
            raise ValueError("cispo_cap is only for loss 'cispo': use clip_low and clip_high")
        if self.std != "auto" and self.scale == "none":
            raise ValueError("std has no effect with advantage_scale 'none', the default of loss 'dr_grpo'")
        if self.importance == "none" and self.importance_cap != "auto":
            raise ValueError("importance_cap has no effect with importance 'none'")
        if self.off_policy_steps and self.importance == "none":
            raise ValueError("off_policy_steps needs importance 'truncate' or 'mask'")
        if self.off_policy_steps and self.resample_prompts:
            raise ValueError("resample_prompts and off_policy_steps cannot be combined")
        if self.off_policy_steps and self.overlap is True:
            raise ValueError("overlap and off_policy_steps cannot be combined")
        if self.overlap is True and self.kl > 0:
            raise ValueError(
                "overlap needs kl 0: the reference of the penalty is the model without its adapter, which is busy "
                "sampling"
            )
        if self.kl == 0 and (self.kl_estimator != "auto" or self.reference_refresh_steps > 0):
            raise ValueError("kl_estimator and reference_refresh_steps have no effect with kl 0")
        return self

    @model_validator(mode="after")
    def rewards_that_fit(self) -> "Advanced":
        if self.supervision == "process" and self.loss == "gspo":
            raise ValueError("loss 'gspo' has one ratio per answer, so it needs supervision 'outcome'")
        if self.supervision == "process" and self.overlong == "soft":
            raise ValueError("overlong 'soft' needs supervision 'outcome': use 'mask' with 'process'")
        if self.overlong_buffer == "auto":
            return self
        if self.overlong != "soft":
            raise ValueError("overlong_buffer needs overlong 'soft'")
        if self.max_completion_tokens == "auto" or self.overlong_buffer > self.max_completion_tokens:
            raise ValueError("overlong_buffer needs a max_completion_tokens that is at least as large")
        return self

    @property
    def scale(self) -> Scale:
        return _SCALES[self.loss] if self.advantage_scale == "auto" else self.advantage_scale


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

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, sent: Any) -> Any:
        """OpenAI's client types serialize unset fields as null."""
        return {k: v for k, v in sent.items() if v is not None} if isinstance(sent, dict) else sent

    @model_validator(mode="after")
    def combinations_that_work(self) -> "Hyperparameters":
        samples, temperature = self.eval_samples, self.advanced.eval_temperature
        if temperature == 0 and samples != "auto" and samples > 1:
            raise ValueError(
                "eval_samples above 1 needs eval_temperature above 0: greedy answers are identical"
            )
        if self.advanced.learning_rate != "auto" and self.learning_rate_multiplier != "auto":
            raise ValueError(
                "learning_rate_multiplier scales the automatic learning rate: give only one of it and learning_rate"
            )
        if self.advanced.group_size != "auto" and self.compute_multiplier != "auto":
            raise ValueError(
                "compute_multiplier scales the automatic group size: give only one of it and group_size"
            )
        return self

    @property
    def warnings(self) -> list[str]:
        """One sentence for each accepted value without effect."""
        if self.reasoning_effort == "default":
            return []
        return [
            f"reasoning_effort '{self.reasoning_effort}' has no effect in this version: the model uses its default "
            "effort. To limit the length of answers, set hyperparameters.advanced.max_completion_tokens."
        ]


class Resolved(Value):
    """Hyperparameters with every "auto" resolved, as the run uses them. None: not used."""

    batch_size: int
    learning_rate: float
    n_epochs: int
    total_steps: int
    eval_interval: int
    eval_samples: int
    eval_temperature: float
    loss: Loss
    advantage_scale: Scale
    std: Std | None
    normalize: Normalize
    supervision: Supervision
    group_size: int
    lora_rank: int
    lora_alpha: int
    temperature: float
    max_completion_tokens: int
    overlong: Overlong
    overlong_buffer: int | None
    updates_per_batch: int
    overlap: bool
    resample_prompts: int
    off_policy_steps: int
    stop_after_flat_evals: int
    stop_after_silent_steps: int
    stop_above_kl: float
    stop_below_entropy: float
    fail_below_signal: float
    require_improvement: bool
    clip_low: float | None
    clip_high: float | None
    cispo_cap: float | None
    importance: Importance
    importance_cap: float | None
    kl: float
    kl_estimator: KlEstimator | None
    reference_refresh_steps: int
    max_grad_norm: float
    warmup_steps: int
    chat_template: chat_templates.Name | None

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The lower and upper clip bounds of the ratio between the new and the old policy."""
        if self.cispo_cap is not None:
            return 0.0, self.cispo_cap
        assert self.clip_low is not None and self.clip_high is not None
        return 1.0 - self.clip_low, 1.0 + self.clip_high


# Names of the same hyperparameters in TRL, verl and OpenRLHF, for hints in error messages.
_ELSEWHERE = {
    "num_generations": "group_size",
    "rollout_n": "group_size",
    "n_samples_per_prompt": "group_size",
    "beta": "kl",
    "kl_coef": "kl",
    "kl_loss_coef": "kl",
    "epsilon": "clip_low",
    "clip_ratio_low": "clip_low",
    "clip_ratio": "clip_low",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "clip_ratio_high": "clip_high",
    "loss_type": "loss",
    "scale_rewards": "advantage_scale",
    "max_completion_length": "max_completion_tokens",
    "max_tokens": "max_completion_tokens",
    "max_new_tokens": "max_completion_tokens",
    "max_response_length": "max_completion_tokens",
    "num_iterations": "updates_per_batch",
    "ppo_epochs": "updates_per_batch",
    "mask_truncated_completions": "overlong",
    "ref_model_sync_steps": "reference_refresh_steps",
    "vllm_importance_sampling_correction": "importance",
    "vllm_importance_sampling_cap": "importance_cap",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "lr": "learning_rate",
    "epochs": "n_epochs",
    "num_epochs": "n_epochs",
    "num_train_epochs": "n_epochs",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "eval_steps": "eval_interval",
}


def meant(param: str) -> str | None:
    """The hyperparameter that an unknown dotted path probably means; None without a similar one."""
    *path, name = param.split(".")
    if path[-1:] == ["advanced"]:
        path.pop()
    if path[-1:] != ["hyperparameters"]:
        return None
    known = [*Hyperparameters.model_fields, *Advanced.model_fields]
    name = _ELSEWHERE.get(name, name)
    close = [name] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not close:
        return None
    group = "hyperparameters.advanced" if close[0] in Advanced.model_fields else "hyperparameters"
    return f"{group}.{close[0]}"


def base_learning_rate(parameters: int) -> float:
    """The base learning rate for LoRA on all linear layers; small models need a higher one.

    Published rates are 4e-5 and 2e-4 for 4-8 B and 1 B. Measured for 135 M on the demo's task: 3e-4 raises the
    validation
    reward from 0.40 to 0.89 in ten steps; 1e-3 loses all entropy in five and ends below the base.
    """
    for limit, rate in ((300e6, 3e-4), (1.2e9, 2e-4), (14e9, 4e-5)):
        if parameters <= limit:
            return rate
    return 2e-5


def resolve(asked: Hyperparameters, *, rows: int, parameters: int, context: int) -> Resolved:
    """Resolve every "auto". `rows` of training data, `parameters` of the base model, `context` in tokens."""
    advanced = asked.advanced
    batch_size = min(_or(asked.batch_size, 8), rows)
    # A policy hardly changes in fewer than twenty steps, so small files are repeated.
    n_epochs = _or(asked.n_epochs, max(1, min(10, math.ceil(20 * batch_size / rows))))
    total_steps = math.ceil(rows * n_epochs / batch_size)
    eval_samples = _or(asked.eval_samples, 1)
    learning_rate = base_learning_rate(parameters) * _or(asked.learning_rate_multiplier, 1.0)
    max_completion_tokens = _or(advanced.max_completion_tokens, min(512, context // 2))
    low, high = _CLIPS.get(advanced.loss, (None, None))
    return Resolved(
        batch_size=batch_size,
        learning_rate=_or(advanced.learning_rate, learning_rate),
        n_epochs=n_epochs,
        total_steps=total_steps,
        eval_interval=_or(asked.eval_interval, max(1, math.ceil(total_steps / 10))),
        eval_samples=eval_samples,
        eval_temperature=_or(advanced.eval_temperature, 0.0 if eval_samples == 1 else advanced.temperature),
        loss=advanced.loss,
        advantage_scale=advanced.scale,
        std=None if advanced.scale == "none" else _or(advanced.std, "population"),
        normalize=advanced.normalize,
        supervision=advanced.supervision,
        group_size=_or(advanced.group_size, max(2, round(8 * _or(asked.compute_multiplier, 1.0)))),
        lora_rank=advanced.lora_rank,
        lora_alpha=advanced.lora_alpha,
        temperature=advanced.temperature,
        max_completion_tokens=max_completion_tokens,
        overlong=advanced.overlong,
        overlong_buffer=(
            _or(advanced.overlong_buffer, max(1, round(0.2 * max_completion_tokens)))
            if advanced.overlong == "soft"
            else None
        ),
        updates_per_batch=advanced.updates_per_batch,
        # On a CPU both compete for cores: a step takes a third longer (bench/overlap.py). Not measured on a GPU, where
        # both
        # compete for multiprocessors.
        overlap=_or(advanced.overlap, False),
        resample_prompts=advanced.resample_prompts,
        off_policy_steps=advanced.off_policy_steps,
        stop_after_flat_evals=advanced.stop_after_flat_evals,
        stop_after_silent_steps=advanced.stop_after_silent_steps,
        stop_above_kl=advanced.stop_above_kl,
        stop_below_entropy=advanced.stop_below_entropy,
        fail_below_signal=advanced.fail_below_signal,
        require_improvement=advanced.require_improvement,
        clip_low=_or(advanced.clip_low, low),
        clip_high=_or(advanced.clip_high, high),
        cispo_cap=_or(advanced.cispo_cap, 5.0) if advanced.loss == "cispo" else None,
        importance=advanced.importance,
        importance_cap=None if advanced.importance == "none" else _or(advanced.importance_cap, 2.0),
        kl=advanced.kl,
        kl_estimator=_or(advanced.kl_estimator, "k3") if advanced.kl > 0 else None,
        reference_refresh_steps=advanced.reference_refresh_steps,
        max_grad_norm=advanced.max_grad_norm,
        warmup_steps=advanced.warmup_steps,
        chat_template=None if advanced.chat_template == "auto" else advanced.chat_template,
    )


# The behavior of versions without a hyperparameter, where it differs from the current "auto".
_BEFORE: dict[str, Any] = {"normalize": "signal"}


def kept(resolved: Resolved, first: Mapping[str, Any] | None) -> Resolved:
    """The hyperparameters of a job that started with `first`; None for a job that starts now.

    The job keeps them even if this version would resolve "auto" differently: the shape of its adapter and the number of
    its steps depend on them. A hyperparameter that is newer than `first` gets the behavior of that version, or else the
    value in `resolved`.
    """
    if first is None:
        return resolved
    known = {name: value for name, value in first.items() if name in Resolved.model_fields}
    return Resolved.model_validate(resolved.model_dump() | _BEFORE | known)


def _or(value: Any, automatic: Any) -> Any:
    return automatic if value == "auto" else value
