"""The groups of `hyperparameters.advanced`: one small class per choice, with only the fields that the choice reads.

A `type` selects the variant of a group, so most combinations without effect cannot be written down. Rules between
groups are in core/jobs/hyperparameters.py; core/jobs/hyperparameter_places.py says where the loop's values come from.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from core import chat_templates

# The bounds apply to the number, not to the field: pydantic would also compare "auto" with them and raise TypeError.
Auto = Literal["auto"]

Loss = Literal[
    "grpo", "dr_grpo", "bnpo", "dapo", "dppo", "cispo", "gspo", "rloo", "reinforce_plus_plus", "ppo"
]
# Losses that weigh answers alike, as means over answers of their means over tokens; the others weigh tokens alike.
MEAN_OF_ANSWERS: frozenset[Loss] = frozenset({"grpo", "gspo"})
# Losses whose ratio is to the sampler, so that no importance corrects them.
RATIO_TO_SAMPLER: frozenset[Loss] = frozenset({"dppo"})
# Losses with a reward for each token (see TokenRewardLoss).
TokenRewards = Literal["reinforce_plus_plus", "ppo"]
PromptOrder = Literal["shuffled", "file", "easiest_first"]
Scale = Literal["group", "batch", "none", "mean", "each"]
Std = Literal["population", "sample"]
Supervision = Literal["outcome", "process"]
KlEstimator = Literal["k1", "k2", "k3", "k1_plain", "k3_plain"]
Importance = Literal["truncate", "mask", "none"]
ImportanceLevel = Literal["token", "answer"]
Rejection = Literal["geometric", "k3"]
Divergence = Literal["tv", "kl"]
Overlong = Literal["score", "mask", "soft"]
Normalize = Literal["papers", "signal"]
LearningRateSchedule = Literal["constant", "linear", "cosine"]
# What an alarm of gaming does (docs/howto/signal.md).
OnAlarm = Literal["inform", "pause", "rollback"]
# The weights to train: those of a LoRA adapter, or all of the model.
Train = Literal["lora", "full"]

ClipLow = Annotated[float, Field(gt=0, lt=1)]
ClipHigh = Annotated[float, Field(gt=0, le=10)]
RatioMax = Annotated[float, Field(gt=1, le=1000)]


class Value(BaseModel):
    # Strict: "8" is not coerced to 8, nor true to 1.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class WithoutNulls(Value):
    # Null is the default: OpenAI's client types serialize unset fields as null.
    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, sent: Any) -> Any:
        return {k: v for k, v in sent.items() if v is not None} if isinstance(sent, dict) else sent


class AnyHyperparameters(WithoutNulls):
    """The hyperparameters of every method, with OpenAI's names and bounds."""

    batch_size: Auto | Annotated[int, Field(ge=1, le=256)] = "auto"  # prompts, or rows of a file, a step
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0)] = "auto"
    n_epochs: Auto | Annotated[int, Field(ge=1, le=50)] = "auto"


class SampledHyperparameters(AnyHyperparameters):
    """Those of the methods that sample answers, also for validation."""

    eval_interval: Auto | Annotated[int, Field(ge=1)] = "auto"
    eval_samples: Auto | Annotated[int, Field(ge=1, le=64)] = "auto"


# Losses. The defaults are those of the papers: DeepSeekMath and Dr. GRPO have one epsilon, DAPO has clip-higher. Losses
# that average over all tokens of a batch use one std for the batch, so that all groups have the same divisor (and easy
# prompts are not amplified).


WITHOUT_STD = ("none", "mean")  # scales


class AnyLoss(Value):
    """The fields that every loss has."""

    type: Loss
    # Divisor of a group's centered rewards: the std of the group, of the batch, or none; their mean (MaxRL, for graders
    # without negative scores); or each: for each part of a multi grader its std in the group (GDPO).
    advantage_scale: Scale
    # Std over n or over n - 1: the choice scales the effective learning rate. Auto: population.
    std: Auto | Std = "auto"
    # The answers over which the loss and the std of the batch average: all graded ones, or those of groups with signal.
    normalize: Normalize = "papers"

    @model_validator(mode="after")
    def _std_is_used(self) -> "AnyLoss":
        if self.std != "auto" and self.advantage_scale in WITHOUT_STD:
            raise ValueError(
                f"std has no effect with advantage_scale '{self.advantage_scale}': leave it out (losses 'dr_grpo' and "
                "'rloo' have the scale 'none')"
            )
        return self


class TokenLoss(AnyLoss):
    """A loss with one ratio per token."""

    # One reward per answer, or one per step that the grader scores.
    supervision: Supervision = "outcome"


class ClippedLoss(TokenLoss):
    """A loss whose ratio has no gradient outside of 1 - clip_low to 1 + clip_high."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    # The largest ratio of a token with a negative advantage, on which clip_high does not act (INTELLECT-2; TRL's
    # delta): beyond it the token has no gradient. Null: no bound.
    ratio_max: RatioMax | None = None

    @model_validator(mode="after")
    def _ratio_max_is_outside_of_the_clip(self) -> "ClippedLoss":
        if self.ratio_max is not None and self.ratio_max <= 1.0 + self.clip_high:
            raise ValueError(
                f"ratio_max must be above 1 + clip_high, which is {1.0 + self.clip_high:g}: it is the bound of "
                "answers with a negative advantage"
            )
        return self


class Grpo(ClippedLoss):
    """Group-relative policy optimization (DeepSeekMath): each answer weighs the same."""

    type: Literal["grpo"] = "grpo"
    advantage_scale: Scale = "group"


class DrGrpo(ClippedLoss):
    """Dr. GRPO: no std, and a constant divisor instead of the answer's length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    advantage_scale: Scale = "none"


class Bnpo(ClippedLoss):
    """TRL's bnpo: each token weighs the same."""

    type: Literal["bnpo"] = "bnpo"
    advantage_scale: Scale = "batch"


class Dapo(ClippedLoss):
    """DAPO: each token weighs the same, and the upper bound is higher than the lower one."""

    type: Literal["dapo"] = "dapo"
    advantage_scale: Scale = "batch"
    clip_high: ClipHigh = 0.28


class Dppo(TokenLoss):
    """DPPO (arXiv 2602.04879): a token is left out if its probability, and not its ratio, has moved too far.

    Both are relative to the sampler, so there is no `importance` beside it.
    """

    type: Literal["dppo"] = "dppo"
    advantage_scale: Scale = "none"
    # How far a token has moved: its probability (tv), or the KL of "this token or another one" (kl).
    divergence: Divergence = "tv"
    # Bounds of the fall of a token with a negative advantage, and of the rise of one with a positive advantage. Auto:
    # 0.2 for tv (prime-rl), 0.05 nats for kl (verl).
    clip_low: Auto | ClipLow = "auto"
    clip_high: Auto | ClipLow = "auto"
    # Of (log pi - log pi_sampler)^2, which acts on each trained token (prime-rl's kl_tau).
    log_ratio_penalty: Annotated[float, Field(ge=0, le=10)] = 1e-3


class Cispo(TokenLoss):
    """CISPO (MiniMax-M1): the ratio is capped, and no token loses its gradient."""

    type: Literal["cispo"] = "cispo"
    advantage_scale: Scale = "batch"
    # Absolute, not 1 + epsilon. Below 1 it would shrink the gradient of a policy that has not changed.
    cap: Annotated[float, Field(ge=1, le=100)] = 5.0


class Gspo(AnyLoss):
    """GSPO: one ratio per answer, so the grader cannot supervise steps."""

    type: Literal["gspo"] = "gspo"
    advantage_scale: Scale = "group"
    # GSPO section 5.1: its ratio is a mean over the answer, with far less variance than that of a token.
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class Rloo(AnyLoss):
    """RLOO: REINFORCE with the mean of an answer's siblings as its baseline. An answer is one action."""

    type: Literal["rloo"] = "rloo"
    # The baseline is the paper's only normalization.
    advantage_scale: Literal["none"] = "none"
    # Bounds of the ratio of an answer, the product of those of its tokens.
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2


class TokenRewardLoss(AnyLoss):
    """A loss with a reward for each token: the KL penalty is a part of it, and not a term of the loss.

    Advantages are normalized over all tokens of the step, so groups without signal are trained on as well.
    """

    advantage_scale: Literal["batch"] = "batch"
    normalize: Literal["papers"] = "papers"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2


class ReinforcePlusPlus(TokenRewardLoss):
    """REINFORCE++: the reward less the KL from each token on, without a baseline of the group."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"


class Ppo(TokenRewardLoss):
    """PPO: a value head, trained beside the adapter, says what each token's reward to go was expected to be."""

    type: Literal["ppo"] = "ppo"
    # Of generalized advantage estimation: 1 is the return less the value, 0 looks one token ahead.
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    # Discount of later rewards, per token.
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    # How far a value may move from that of sampling, in units of the reward.
    value_clip: Annotated[float, Field(gt=0, le=1000)] = 0.2
    # Of the value loss in the adapter's gradient (c1 of PPO's eq. 9). 0: it trains the value head alone.
    value_weight: Annotated[float, Field(ge=0, le=10)] = 0.1
    # Of the value head. Auto: the adapter's learning rate.
    value_learning_rate: Auto | Annotated[float, Field(gt=0, le=1)] = "auto"
    # Steps at the start in which the value head learns alone, before advantages depend on it.
    value_warmup_steps: Annotated[int, Field(ge=0, le=1000)] = 0


LossGroup = Annotated[
    Grpo | DrGrpo | Bnpo | Dapo | Dppo | Cispo | Gspo | Rloo | ReinforcePlusPlus | Ppo,
    Field(discriminator="type"),
]


# Corrections of the mismatch between the probabilities of sampler and trainer.


class AnyImportance(Value):
    """The fields that every correction has."""

    # DeepSeek-V3.2's off-policy mask (arXiv 2512.02556, eq. 9): an answer with a negative advantage is left out once
    # the policy finds its tokens less likely than the sampler by more than this, in nats a token, on average. 0: never.
    off_policy_threshold: float = Field(default=0.0, ge=0, le=20)


class Correction(AnyImportance):
    """Weights pi_old / pi_sampler: of each token, or of an answer, which is the product of those of its tokens."""

    # Auto: 2 for tokens, and 3 for answers, whose weights are products over their tokens.
    cap: Auto | Annotated[float, Field(gt=1, le=100)] = "auto"
    level: ImportanceLevel = "token"
    # Answers to leave out by the mean over their tokens, whatever their length: the geometric mean of the weights, or
    # the mean of the k3 estimate of KL(sampler || trainer). Null: none.
    reject: Rejection | None = None
    # Bounds of the geometric mean. Auto: 0.99 and 1.01. With k3 reject_high is the largest KL, in nats a token.
    reject_low: Auto | Annotated[float, Field(ge=0, lt=1)] = "auto"
    reject_high: Auto | Annotated[float, Field(gt=0, le=100)] = "auto"

    @model_validator(mode="after")
    def _bounds_fit_the_rejection(self) -> "Correction":
        if self.reject is None and (self.reject_low, self.reject_high) != ("auto", "auto"):
            raise ValueError("reject_low and reject_high need reject, 'geometric' or 'k3'")
        if self.reject == "k3" and self.reject_low != "auto":
            raise ValueError("reject_low has no effect with reject 'k3', which is never negative")
        if self.reject == "k3" and self.reject_high == "auto":
            raise ValueError("reject 'k3' needs reject_high, the largest KL of an answer in nats a token")
        if self.reject == "geometric" and self.reject_high != "auto" and self.reject_high <= 1:
            raise ValueError("reject_high must be above 1 with reject 'geometric': equal policies have 1")
        return self


class Truncate(Correction):
    """Weights are cut off at the cap."""

    type: Literal["truncate"] = "truncate"


class Mask(Correction):
    """Tokens, or answers, with a weight outside of floor to cap are left out of the loss."""

    type: Literal["mask"] = "mask"
    # Auto: 1/cap for tokens, 0 for answers. 0: no lower bound.
    floor: Auto | Annotated[float, Field(ge=0, lt=1)] = "auto"


class NoImportance(AnyImportance):
    """No weights: the ratio of the loss is relative to the sampler."""

    type: Literal["none"] = "none"


ImportanceGroup = Annotated[Truncate | Mask | NoImportance, Field(discriminator="type")]


# Truncated answers.


class ScoreOverlong(Value):
    """The grader's score is used unchanged."""

    type: Literal["score"] = "score"


class MaskOverlong(Value):
    """Truncated answers are excluded from the loss."""

    type: Literal["mask"] = "mask"


class SoftOverlong(Value):
    """Answers are penalized as they approach the limit."""

    type: Literal["soft"] = "soft"
    # Tokens before the limit at which the penalty starts. Auto: a fifth of max_completion_tokens.
    buffer: Auto | Annotated[int, Field(ge=1, le=131072)] = "auto"


OverlongGroup = Annotated[ScoreOverlong | MaskOverlong | SoftOverlong, Field(discriminator="type")]


# Order of sampling and updates.


class OnPolicy(Value):
    """Each step is sampled with the policy that it updates."""

    type: Literal["on_policy"] = "on_policy"
    # Whether gradients of groups are computed as soon as they are graded, while others are still sampled. On a CPU both
    # compete for cores: a step takes a third longer (bench/overlap.py). Not measured on a GPU.
    overlap: bool = False
    # Prompts resampled per step in place of those with a zero-variance group (DAPO's dynamic sampling).
    resample_prompts: int = Field(default=0, ge=0, le=1024)


class OffPolicy(Value):
    """Later steps are sampled during the update of this one, with the policy before that update."""

    type: Literal["off_policy"] = "off_policy"
    # Updates between the policy that samples and the one that learns, and steps that are sampled ahead.
    steps: int = Field(default=1, ge=1, le=4)
    # Whether answers in flight continue with the new policy after an update. Their tokens are fresher, but depend on
    # when the update ends, so no other run repeats them. Needs `steps` 1.
    continue_in_flight: bool = False


ScheduleGroup = Annotated[OnPolicy | OffPolicy, Field(discriminator="type")]


# Groups without variants.


WARMUP_STEPS = 3  # automatic, with a step trust region


def automatic_warmup(step_kl: float, total_steps: int) -> int:
    """Return the steps of the learning rate's warm-up, of a job that does not set them."""
    return min(WARMUP_STEPS, total_steps - 1) if step_kl else 0


TemplateArgument = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")]


def _with_valid_clock(arguments: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
    try:
        chat_templates.with_defaults("", arguments)
    except ValueError as cause:
        raise ValueError(
            "'strftime_now', the time that prompts have, must be a date in ISO 8601, such as '2026-11-26'"
        ) from cause
    return arguments


# `strftime_now` is the time that prompts have, if the template shows it. A job without it gets that of its creation.
TemplateArguments = Annotated[
    dict[TemplateArgument, bool | int | float | str], AfterValidator(_with_valid_clock)
]


class TemplateChoice(Value):
    """How messages become tokens."""

    # A name of core/chat_templates.py; auto: that of the registry or the model.
    chat_template: Auto | chat_templates.Name = "auto"
    # Arguments of the chat template, such as {"enable_thinking": false}.
    chat_template_kwargs: TemplateArguments = {}

    @model_validator(mode="after")
    def _reads_its_arguments(self) -> Self:
        if self.chat_template != "auto":
            chat_templates.check_arguments(self.chat_template, self.chat_template_kwargs)
        return self


class Sampling(TemplateChoice):
    """How answers are sampled for training."""

    # Answers to each prompt. Auto: 8 times compute_multiplier. Advantages need at least two.
    group_size: Auto | Annotated[int, Field(ge=2, le=256)] = "auto"
    temperature: float = Field(default=1.0, gt=0, le=2)
    # Auto: 512, or half the context.
    max_completion_tokens: Auto | Annotated[int, Field(ge=1, le=131072)] = "auto"
    # Tokens after which a thought is closed; auto: by reasoning_effort.
    thinking_budget: Auto | Annotated[int, Field(ge=0, le=131072)] = "auto"
    # Of the prompts in each epoch: shuffled anew, as in the file, or by falling `pass_rate` of the rows, which a
    # select stage of a pipeline measures.
    order: PromptOrder = "shuffled"


class Length(Value):
    """A penalty on long answers, scaled by how often their prompt is answered right. Without this group: none."""

    type: Literal["pass_rate"] = "pass_rate"
    # An answer's reward less weight x mean reward of its group x its length / the longest of the group (prime-rl).
    weight: float = Field(default=0.25, gt=0, le=10)


class Kl(Value):
    """A penalty on the KL divergence to a reference model. Without this group its computation is skipped."""

    # Factor of the penalty in the loss, or in the reward of each token with losses 'reinforce_plus_plus' and
    # 'ppo'. Required.
    weight: float = Field(gt=0, le=10)
    # The unbiased estimator k1, or k3, which has less variance and is never negative; k2 (half the squared log-ratio),
    # k1_plain (the log-ratio) and k3_plain (DeepSeekMath's penalty) are without the ratio of the policies. Auto: k3, or
    # k1 where the KL is part of the reward.
    estimator: Auto | KlEstimator = "auto"
    # Steps in which the weight rises in a line; it is reached at this step. 0: from the first step on.
    warmup_steps: int = Field(default=0, ge=0)
    # Steps after which the current policy becomes the reference. 0: the reference stays the base model.
    reference_refresh_steps: int = Field(default=0, ge=0)


class AnyOptimizer(Value):
    """AdamW on the weights that are trained."""

    # Auto: by the size of the model, times learning_rate_multiplier.
    learning_rate: Auto | Annotated[float, Field(gt=0, le=1)] = "auto"
    # After the warm-up: constant, in a line to 0 at the end of the job, or along a cosine to a tenth.
    schedule: LearningRateSchedule
    # Steps in which the learning rate rises in a line; it is reached at this step. Auto: 3 (fewer in a job of at most 3
    # steps), or 0 without `step_kl`.
    warmup_steps: Auto | Annotated[int, Field(ge=0)] = "auto"
    max_grad_norm: float = Field(default=1.0, gt=0)
    # The step trust region, in nats a token: an update that moves the policy by more than twice as much is undone and
    # repeated with a lower rate, and skipped after three repetitions. 0: off.
    step_kl: float = Field(default=0.05, ge=0, le=10)


class Optimizer(AnyOptimizer):
    """AdamW on the weights that are trained."""

    schedule: LearningRateSchedule = "constant"
    # Passes over the same answers, with one optimizer step each, or for each mini-batch.
    updates_per_batch: int = Field(default=1, ge=1, le=16)
    # Parts into which the groups of a step are divided, with an optimizer step for each.
    mini_batches: int = Field(default=1, ge=1, le=64)
    # Whether a job whose model has certainly collapsed continues, once, from its last healthy checkpoint at a third of
    # the learning rate. False: it continues from where it is, with the warning.
    rollback: bool = True


ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,199}$")]
LoraTargets = (
    Literal["all-linear", "attention", "experts"]
    | Annotated[list[ModuleName], Field(min_length=1, max_length=100)]
)


def names_experts(targets: str | Sequence[str]) -> bool:
    """Whether an adapter with these targets (LoraTargets) is on routed experts, in a model that has some."""
    names = [targets] if isinstance(targets, str) else targets
    return any(name.rpartition(".")[2] == "experts" for name in names)


class Lora(Value):
    """The adapter, on linear layers but the head, or on the experts of a mixture."""

    rank: int = Field(default=16, ge=1, le=256)
    alpha: int = Field(default=32, ge=1, le=1024)
    # The layers that get one: "all-linear", "attention" (those that mix tokens), "experts" (the routed experts of a
    # mixture, of the rank divided by the experts of a token), or a list of these two and of names such as "q_proj",
    # each the end of the names of some layers. Auto: "all-linear", which leaves out experts.
    targets: Auto | LoraTargets = "auto"

    @property
    def is_default(self) -> bool:
        """Whether it asks for nothing. "auto" targets are shown as "all-linear" once a job runs."""
        return (self.rank, self.alpha) == (16, 32) and self.targets in ("auto", "all-linear")


def refuse_unused_lora(train: Train, lora: Lora) -> None:
    """Raises ValueError: the job has no adapter whose shape it could choose."""
    if train == "full" and not lora.is_default:
        raise ValueError("lora has no effect with train 'full', which trains all weights: leave lora out")


def _only_adapters(sent: Any) -> Any:
    if sent == "full":
        raise ValueError(
            "train 'full' is for the methods 'supervised', 'dpo' and 'reinforcement': this one trains a LoRA adapter"
        )
    return sent


OnlyLora = Annotated[Literal["lora"], BeforeValidator(_only_adapters)]


class AnyStopping(Value):
    """Criteria for early stopping; 0 is off."""

    # Validations without an improvement: a higher reward, or a lower reverse KL to the teacher.
    after_flat_evals: int = Field(default=0, ge=0)
    above_kl: float = Field(
        default=0.0, ge=0
    )  # to the start of the job, or the refreshed reference; nats per token
    below_entropy: float = Field(default=0.0, ge=0)  # nats per token


class Stopping(AnyStopping):
    """Criteria for early stopping; 0 is off."""

    # Steps in which no group had signal.
    after_silent_steps: int = Field(default=0, ge=0)
    # What an alarm of gaming or of overfitting does beside its event: nothing, pause the job with the top answers, or
    # continue it once from the last checkpoint without the alarm at half the learning rate.
    on_alarm: OnAlarm = "inform"
    # The job fails if the share of groups with signal in its first step is lower.
    fail_below_signal: float = Field(default=0.0, ge=0, le=1)


class AnyEvaluation(Value):
    """What validation decides."""

    # The job fails unless its verdict is `improved` (core/jobs/verdict.py).
    require_improvement: bool = False


class Evaluation(AnyEvaluation):
    """Validation, beside `eval_interval` and `eval_samples`."""

    # Temperature of validation; 0 is greedy. Auto: greedy with one answer per row, else that of sampling.
    temperature: Auto | Annotated[float, Field(ge=0, le=2)] = "auto"
    # With several answers to a row: the least score of one that passes, for pass@k and maj@k.
    pass_score: float = 1.0
