"""Hyperparameters as types that reject unknown values. Only this module resolves "auto"."""

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from core import chat_templates
from core.jobs.hyperparameter_groups import (
    RATIO_TO_SAMPLER,
    WITHOUT_STD,
    Auto,
    Correction,
    Dapo,
    Divergence,
    Dppo,
    Evaluation,
    Importance,
    ImportanceGroup,
    ImportanceLevel,
    Kl,
    KlEstimator,
    LearningRateSchedule,
    Length,
    Lora,
    LoraTargets,
    Loss,
    LossGroup,
    NoImportance,
    Normalize,
    OnAlarm,
    OnPolicy,
    Optimizer,
    Overlong,
    OverlongGroup,
    PromptOrder,
    Rejection,
    SampledHyperparameters,
    Sampling,
    Scale,
    ScheduleGroup,
    ScoreOverlong,
    Std,
    Stopping,
    Supervision,
    TokenLoss,
    TokenRewardLoss,
    TokenRewards,
    Train,
    Truncate,
    Value,
    automatic_warmup,
    refuse_unused_lora,
)
from core.jobs.hyperparameter_places import GROUPS, PLACES, as_sent

NO_SAMPLER_OF_ITS_OWN = (
    "off-policy steps need a sampler with its own copy of the model, such as vLLM; this model is sampled with the "
    "trainer's own"
)

NO_ENGINES_OF_ITS_OWN = (
    "continue_in_flight needs vLLM engines of the job's own, and this model is sampled by a fleet (REGRAFT_SAMPLERS), "
    "whose answers end with the adapter that they began with"
)

NO_SLOTS_FOR_EXPERTS = (
    "adapters on experts need a sampler of the job's own, and this model is sampled by a fleet (REGRAFT_SAMPLERS), "
    "which has no slots for them: leave experts out of lora.targets"
)


PLAIN_K1 = (
    "kl.estimator 'k1_plain' pulls towards the reference only by chance: the mean of its gradient is zero. Use 'k1', "
    "'k2' or 'k3'."
)


def _without_nulls(sent: Any) -> Any:
    """A null is the default, in a group and for a whole group, as for OpenAI's own hyperparameters."""
    if not isinstance(sent, Mapping):
        return sent
    return {
        name: {key: value for key, value in group.items() if value is not None}
        if isinstance(group, Mapping)
        else group
        for name, group in sent.items()
        if group is not None
    }


def _with_importance_of_the_loss(sent: Any) -> Any:
    """Fill in the importance of a loss whose ratio is to the sampler: its default is `none`."""
    loss = sent.get("loss") if isinstance(sent, Mapping) else None
    kind = loss.get("type") if isinstance(loss, Mapping) else getattr(loss, "type", None)
    return {"importance": NoImportance(), **sent} if kind in RATIO_TO_SAMPLER else sent


class Advanced(Value):
    """Hyperparameters beyond OpenAI's, in groups."""

    # The weights to train: those of a LoRA adapter, or all of a model with at most 8B parameters.
    train: Train = "lora"
    loss: LossGroup = Dapo()
    # Null or absent: no penalty.
    kl: Kl | None = None
    # Correction of the mismatch between the probabilities of sampler and trainer.
    importance: ImportanceGroup = Truncate()
    # Truncated answers: scored as usual, excluded from the loss, or penalized as they approach the limit.
    overlong: OverlongGroup = ScoreOverlong()
    # Null or absent: the length of an answer does not count.
    length: Length | None = None
    schedule: ScheduleGroup = OnPolicy()
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    stopping: Stopping = Stopping()
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="wrap")
    @classmethod
    def _errors_at_their_paths(cls, sent: Any, handler: ModelWrapValidatorHandler["Advanced"]) -> "Advanced":
        try:
            return handler(_with_importance_of_the_loss(_without_nulls(sent)))
        except ValidationError as invalid:
            errors = [as_sent(error) for error in invalid.errors(include_url=False)]
            raise ValidationError.from_exception_data(invalid.title, errors) from None

    @model_validator(mode="after")
    def _groups_that_fit(self) -> "Advanced":
        is_uncorrected = self.importance.type == "none" and self.loss.type not in RATIO_TO_SAMPLER
        if self.schedule.type == "off_policy" and is_uncorrected:
            raise ValueError("schedule.steps needs importance 'truncate' or 'mask'")
        if (
            self.schedule.type == "off_policy"
            and self.schedule.steps > 1
            and self.schedule.continue_in_flight
        ):
            raise ValueError("schedule.continue_in_flight needs schedule.steps 1")
        if self.schedule.type == "on_policy" and self.schedule.overlap and self.kl is not None:
            raise ValueError(
                "schedule.overlap cannot be combined with kl: the reference of the penalty is the model without its "
                "adapter, which is busy sampling"
            )
        if self.schedule.type == "on_policy" and self.schedule.overlap and self.optimizer.mini_batches > 1:
            raise ValueError(
                "schedule.overlap needs optimizer.mini_batches 1: they are drawn from the whole step"
            )
        if self.schedule.type == "on_policy" and self.schedule.overlap:
            self._has_a_penalty_of_known_weight()
        refuse_unused_lora(self.train, self.lora)
        if self.train == "full" and self.schedule.type == "off_policy":
            raise ValueError(
                "schedule.steps cannot be combined with train 'full': answers would be sampled with "
                "earlier weights, and only earlier adapters are kept"
            )
        if isinstance(self.loss, TokenRewardLoss):
            self._fits_token_rewards()
        if self.supervision == "process" and self.overlong.type == "soft":
            raise ValueError("overlong 'soft' needs supervision 'outcome': use 'mask' with 'process'")
        if self.overlong.type == "soft" and self.overlong.buffer != "auto":
            most = self.sampling.max_completion_tokens
            if most == "auto" or self.overlong.buffer > most:
                raise ValueError(
                    "overlong.buffer needs a sampling.max_completion_tokens that is at least as large"
                )
        return self

    @model_validator(mode="after")
    def _corrections_that_fit(self) -> "Advanced":
        importance, optimizer = self.importance, self.optimizer
        if self.loss.type in RATIO_TO_SAMPLER and importance.type != "none":
            raise ValueError(
                f"importance '{importance.type}' cannot be combined with loss '{self.loss.type}', whose ratio is to "
                "the sampler: leave importance out"
            )
        is_off_policy = self.schedule.type == "off_policy"
        moves = is_off_policy or optimizer.updates_per_batch > 1 or optimizer.mini_batches > 1
        if importance.off_policy_threshold and not moves:
            raise ValueError(
                "importance.off_policy_threshold needs schedule 'off_policy', or optimizer.updates_per_batch or "
                "mini_batches above 1: otherwise each answer is from the policy that it updates"
            )
        if not is_off_policy or not isinstance(importance, Correction):
            return self
        if (importance.level, importance.cap) == ("answer", "auto"):
            raise ValueError(
                "importance.level 'answer' needs importance.cap with schedule 'off_policy': the automatic bound is for "
                "answers of the current policy"
            )
        if importance.reject == "geometric" and "auto" in (importance.reject_low, importance.reject_high):
            raise ValueError(
                "importance.reject 'geometric' needs reject_low and reject_high with schedule 'off_policy': the "
                "automatic bounds are for answers of the current policy"
            )
        return self

    @model_validator(mode="after")
    def _rewards_that_fit(self) -> "Advanced":
        if self.length is not None and self.supervision == "process":
            raise ValueError("length needs supervision 'outcome': steps have no pass rate")
        scale = self.loss.advantage_scale
        if scale not in ("mean", "each"):
            return self
        others = {
            "supervision 'process'": self.supervision == "process",
            "overlong 'soft'": self.overlong.type == "soft",
            "length": self.length is not None,
        }
        for name, is_chosen in others.items():
            if is_chosen:
                raise ValueError(
                    f"advantage_scale '{scale}' cannot be combined with {name}: it is of the scores that the grader "
                    "gives an answer"
                )
        return self

    def _has_a_penalty_of_known_weight(self) -> None:
        """Raises ValueError: the gradient is divided by a std of the step that is not known when it is computed."""
        loss = self.loss
        if isinstance(loss, Dppo) and loss.log_ratio_penalty and loss.advantage_scale in ("batch", "each"):
            raise ValueError(
                f"schedule.overlap cannot be combined with loss.log_ratio_penalty and advantage_scale "
                f"'{loss.advantage_scale}', whose std is known at the end of the step: set log_ratio_penalty to 0, or "
                "choose the scale 'none', 'group' or 'mean'"
            )

    def _fits_token_rewards(self) -> None:
        loss = f"loss '{self.loss.type}'"
        if self.schedule.type == "off_policy":
            raise ValueError(
                f"schedule.steps cannot be combined with {loss}: its rewards have the KL of the "
                "policy that sampled, which is not known any more"
            )
        if self.schedule.overlap:
            raise ValueError(
                f"schedule.overlap cannot be combined with {loss}: its advantages are normalized over the whole "
                "step"
            )
        zero_variance = {
            "schedule.resample_prompts": self.schedule.resample_prompts,
            "stopping.after_silent_steps": self.stopping.after_silent_steps,
            "stopping.fail_below_signal": self.stopping.fail_below_signal,
        }
        for name, value in zero_variance.items():
            if value:
                raise ValueError(
                    f"{name} cannot be combined with {loss}: it has no baseline of the group, so it learns from "
                    "zero-variance groups as well"
                )
        if self.kl is not None and self.kl.estimator not in ("auto", "k1"):
            raise ValueError(
                f"kl.estimator '{self.kl.estimator}' cannot be combined with {loss}: its KL is part of "
                "the reward, where the estimator is 'k1'"
            )

    @property
    def supervision(self) -> Supervision:
        return self.loss.supervision if isinstance(self.loss, TokenLoss) else "outcome"


class Hyperparameters(SampledHyperparameters):
    """method.reinforcement.hyperparameters, with OpenAI's names and bounds."""

    reasoning_effort: Literal["default", "low", "medium", "high"] = "default"
    compute_multiplier: Auto | Annotated[float, Field(gt=0.00001, le=10)] = "auto"
    advanced: Advanced = Advanced()

    @model_validator(mode="after")
    def combinations_that_work(self) -> "Hyperparameters":
        samples, advanced = self.eval_samples, self.advanced
        if advanced.evaluation.temperature == 0 and samples != "auto" and samples > 1:
            raise ValueError(
                "eval_samples above 1 needs evaluation.temperature above 0: greedy answers are identical"
            )
        if self.batch_size != "auto" and advanced.optimizer.mini_batches > self.batch_size:
            raise ValueError("optimizer.mini_batches cannot be more than batch_size")
        if advanced.optimizer.learning_rate != "auto" and self.learning_rate_multiplier not in ("auto", 1):
            raise ValueError(
                "learning_rate_multiplier scales the automatic learning rate: give only one of it and "
                "optimizer.learning_rate"
            )
        if advanced.sampling.group_size != "auto" and self.compute_multiplier not in ("auto", 1):
            raise ValueError(
                "compute_multiplier scales the automatic group size: give only one of it and "
                "sampling.group_size"
            )
        return self

    @property
    def warnings(self) -> list[str]:
        """One sentence for each accepted value without effect, or with one that is not meant."""
        kl = self.advanced.kl
        plain = [PLAIN_K1] if kl is not None and kl.estimator == "k1_plain" else []
        if self.reasoning_effort == "default":
            return plain
        return [
            *plain,
            f"reasoning_effort '{self.reasoning_effort}' has no effect on a model that does not reason. A model that "
            "does uses its chat template's own switch, or else limits its thoughts: see "
            "hyperparameters.advanced.sampling.thinking_budget.",
        ]


class Resolved(Value):
    """Hyperparameters with every "auto" resolved, as the run uses them. None: not used.

    Flat, unlike the request: the loop reads single numbers, and the rows of jobs, the exporters and the model card have
    these names (docs/adr/0024-resolved-values.md).
    """

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
    on_alarm: OnAlarm
    fail_below_signal: float
    require_improvement: bool
    clip_low: float | None
    clip_high: float | None
    cispo_cap: float | None
    ratio_max: float | None
    divergence: Divergence | None
    log_ratio_penalty: float
    importance: Importance
    importance_cap: float | None
    importance_floor: float | None
    importance_level: ImportanceLevel
    importance_reject: Rejection | None
    reject_low: float | None
    reject_high: float | None
    off_policy_threshold: float
    length_weight: float
    kl: float
    kl_estimator: KlEstimator | None
    reference_refresh_steps: int
    max_grad_norm: float
    warmup_steps: int
    step_kl: float
    rollback: bool
    chat_template: chat_templates.Name | None
    chat_template_kwargs: dict[str, bool | int | float | str]
    thinking_budget: int | None
    lora_targets: LoraTargets
    learning_rate_schedule: LearningRateSchedule
    eval_pass_score: float
    mini_batches: int
    prompt_order: PromptOrder
    train: Train
    continue_in_flight: bool
    gae_lambda: float | None
    gamma: float | None
    value_clip: float | None
    value_weight: float | None
    value_learning_rate: float | None
    value_warmup_steps: int | None
    kl_warmup_steps: int
    # The most tokens of an episode of several calls, which follows from the job's tools. None: answers are one call.
    max_episode_tokens: int | None = None
    # The weight of each part of a multi grader in its score, which follows from its formula, and the score of a part
    # that failed. None: not used, or such an answer is not graded.
    part_weights: dict[str, float] | None = None
    part_invalid_grade: float | None = None

    @property
    def validations(self) -> int:
        """The validations after that of step 0."""
        return math.ceil(self.total_steps / self.eval_interval)

    @property
    def longest_answer(self) -> int:
        """The most tokens that are sampled for an answer, in all its calls."""
        return self.max_episode_tokens or self.max_completion_tokens

    @property
    def has_token_rewards(self) -> bool:
        """Whether the KL is a part of each token's reward, and advantages are normalized over all tokens of a step."""
        return self.loss in get_args(TokenRewards)

    @property
    def has_reference(self) -> bool:
        """Whether the job compares its policy with the model that it started from."""
        return self.kl > 0 or self.stop_above_kl > 0

    @property
    def couples_importance(self) -> bool:
        """Whether what corrects for the sampler is of whole answers, and not of single tokens."""
        return (
            self.importance_level == "answer"
            or self.importance_reject is not None
            or self.off_policy_threshold > 0
        )

    @property
    def has_values(self) -> bool:
        """Whether a value head learns beside the policy."""
        return self.value_weight is not None

    @property
    def waits(self) -> int:
        """The steps before the first of the policy, in which only a value head learns."""
        return self.value_warmup_steps or 0

    @property
    def reference_copies(self) -> int:
        """Copies of all weights that are kept to compare with, if all weights are trained."""
        if self.train == "lora" or not self.has_reference:
            return 0
        return 2 if self.reference_refresh_steps else 1

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The lower and upper clip bounds of the ratio between the new and the old policy."""
        if self.cispo_cap is not None:
            return 0.0, self.cispo_cap
        assert self.clip_low is not None and self.clip_high is not None
        return 1.0 - self.clip_low, 1.0 + self.clip_high


# Names of the same hyperparameters in TRL, verl and OpenRLHF, for hints in error messages: those of every method, and
# those of reinforcement.
COMMON_NAMES = {
    "lr": "learning_rate",
    "epochs": "n_epochs",
    "num_epochs": "n_epochs",
    "num_train_epochs": "n_epochs",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "finetuning_type": "train",
}
ELSEWHERE = COMMON_NAMES | {
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
    "adv_estimator": "loss",
    "use_kl_loss": "kl",
    "lr_scheduler_type": "learning_rate_schedule",
    "ppo_mini_batch_size": "mini_batches",
    "scale_rewards": "advantage_scale",
    "max_completion_length": "max_completion_tokens",
    "max_tokens": "max_completion_tokens",
    "max_new_tokens": "max_completion_tokens",
    "max_response_length": "max_completion_tokens",
    "num_iterations": "updates_per_batch",
    "ppo_epochs": "updates_per_batch",
    "num_mini_batches": "mini_batches",
    "shuffle": "prompt_order",
    "shuffle_dataset": "prompt_order",
    "lam": "gae_lambda",
    "lambd": "gae_lambda",
    "cliprange": "clip_low",
    "cliprange_value": "value_clip",
    "vf_coef": "value_weight",
    "critic_learning_rate": "value_learning_rate",
    "mask_truncated_completions": "overlong",
    "ref_model_sync_steps": "reference_refresh_steps",
    "vllm_importance_sampling_correction": "importance",
    "vllm_importance_sampling_cap": "importance_cap",
    "vllm_importance_sampling_clip_max": "importance_cap",
    "vllm_importance_sampling_clip_min": "importance_floor",
    "off_policy_mask_threshold": "off_policy_threshold",
    "delta": "ratio_max",
    "clip_ratio_c": "ratio_max",
    "kl_tau": "log_ratio_penalty",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "target_modules": "lora_targets",
    "lora_target_modules": "lora_targets",
    "eval_steps": "eval_interval",
}


def similar_hyperparameter(param: str) -> str | None:
    """The hyperparameter that an unknown dotted path probably means; None without a similar one.

    A name of `Resolved`, such as `lora_rank`, and a name of another trainer mean a field of a group.
    """
    _, found, below = f".{param}".partition(".hyperparameters.")
    *path, name = below.removeprefix("advanced.").split(".")
    if not found or len(path) > 1 or not {*path} <= {*GROUPS}:
        return None
    fields = {name: f"hyperparameters.advanced.{place}" for name, place in PLACES.items()}
    groups = {name: f"hyperparameters.advanced.{name}" for name in ("train", *GROUPS)}
    places = groups | fields if path else fields | groups
    own = {place.field: fields[name] for name, place in PLACES.items() if path == [place.group]}
    places |= own  # `warmup_steps` in `kl` is not the learning rate's
    places |= {name: f"hyperparameters.{name}" for name in Hyperparameters.model_fields}
    name = ELSEWHERE.get(name, name)
    close = [name] if name in places else difflib.get_close_matches(name, places, n=1, cutoff=0.75)
    return places[close[0]] if close and not f".{param}".endswith(f".{places[close[0]]}") else None


# Of the learning rate for LoRA, that for all weights. "LoRA Without Regret" (Schulman et al., 2025) measured ten times
# as much for LoRA, in supervised and in reinforcement learning.
FULL_LEARNING_RATE = 0.1


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


def resolve(
    hyperparameters: Hyperparameters, *, rows: int, parameters: int, context: int, reasons: bool = False
) -> Resolved:
    """Resolve every "auto". `rows` of training data, `parameters` of the base model, `context` in tokens.

    `reasons`: the model is known to write thoughts, which need room.
    """
    advanced = hyperparameters.advanced
    batch_size = min(_or(hyperparameters.batch_size, 8), rows)
    # A policy hardly changes in fewer than twenty steps, so small files are repeated.
    n_epochs = _or(hyperparameters.n_epochs, max(1, min(10, math.ceil(20 * batch_size / rows))))
    total_steps = math.ceil(rows * n_epochs / batch_size)
    eval_samples = _or(hyperparameters.eval_samples, 1)
    room = max(2048, context // 4) if reasons else 512
    max_completion_tokens = _or(advanced.sampling.max_completion_tokens, min(room, context // 2))
    learning_rate = _or(
        advanced.optimizer.learning_rate,
        base_learning_rate(parameters)
        * (FULL_LEARNING_RATE if advanced.train == "full" else 1.0)
        * _or(hyperparameters.learning_rate_multiplier, 1.0),
    )
    # Steps before the first of the policy.
    waits = min(PLACES["value_warmup_steps"].value_in(advanced) or 0, total_steps - 1)
    automatic = {
        "kl_estimator": "k1" if isinstance(advanced.loss, TokenRewardLoss) else "k3",
        "std": None if advanced.loss.advantage_scale in WITHOUT_STD else "population",
        **_automatic_bounds(advanced),
        "group_size": max(2, round(8 * _or(hyperparameters.compute_multiplier, 1.0))),
        "learning_rate": learning_rate,
        "value_learning_rate": learning_rate,
        "warmup_steps": automatic_warmup(advanced.optimizer.step_kl, total_steps - waits),
        "max_completion_tokens": max_completion_tokens,
        "overlong_buffer": max(1, round(0.2 * max_completion_tokens)),
        "chat_template": None,
        "thinking_budget": None,
        "lora_targets": "all-linear",
        "eval_temperature": 0.0 if eval_samples == 1 else advanced.sampling.temperature,
    }
    requested = {name: place.value_in(advanced) for name, place in PLACES.items()}
    return Resolved(
        batch_size=batch_size,
        n_epochs=n_epochs,
        total_steps=total_steps,
        eval_interval=_or(hyperparameters.eval_interval, max(1, math.ceil(total_steps / 10))),
        eval_samples=eval_samples,
        train=advanced.train,
        **{name: automatic[name] if value == "auto" else value for name, value in requested.items()},
    )


def _automatic_bounds(advanced: Advanced) -> dict[str, float | None]:
    """Return the bounds of a loss and of its importance weights that the request leaves to their defaults."""
    loss, importance = advanced.loss, advanced.importance
    # prime-rl's and verl's; the classes of the other losses have theirs.
    clip = {"tv": 0.2, "kl": 0.05}[loss.divergence] if isinstance(loss, Dppo) else None
    is_geometric = isinstance(importance, Correction) and importance.reject == "geometric"
    cap, floor = _weight_bounds(importance) if isinstance(importance, Correction) else (None, None)
    return {
        "clip_low": clip,
        "clip_high": clip,
        "importance_cap": cap,
        "importance_floor": floor,
        # SkyRL's, for the mean over an answer.
        "reject_low": 0.99 if is_geometric else None,
        "reject_high": 1.01 if is_geometric else None,
    }


def _weight_bounds(importance: Correction) -> tuple[float, float]:
    """Return the automatic bounds of the weights: for answers TRL's, whose weights are products over their tokens."""
    if importance.level == "answer":
        return 3.0, 0.0
    cap = _or(importance.cap, 2.0)
    return cap, 1.0 / cap


def with_first_values(resolved: Resolved, first: Mapping[str, Any] | None) -> Resolved:
    """The hyperparameters of a job that started with `first`; None for a job that starts now.

    The job keeps them even if this version would resolve "auto" differently: the shape of its adapter and the number of
    its steps depend on them. A hyperparameter that is newer than `first` has the value in `resolved`.
    """
    if first is None:
        return resolved
    known = {name: value for name, value in first.items() if name in Resolved.model_fields}
    return Resolved.model_validate(resolved.model_dump() | known)


def _or(value: Any, automatic: Any) -> Any:
    return automatic if value == "auto" else value
