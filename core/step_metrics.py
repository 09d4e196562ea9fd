"""The metrics of a step: their names, types, units and descriptions, written here only.

The event `metrics` of a step, `GET /v1/regraft/jobs/{id}/metrics`, the schema of both in the OpenAPI document, the
result CSV, the exporters and the reference page are made from `StepMetrics`. Metrics by grader are in sections of the
event (SECTIONS) and in CSV columns such as `scores/graders/string_check/exact/train_reward_mean`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

GraderMetrics = dict[str, Any]
"""One grader's metrics: its `name`, `type` and `model`, and a number by split (`train_...`, `valid_...`)."""


Offline = Literal["supervised", "dpo"]


def metric(
    description: str,
    unit: str = "",
    *,
    csv: bool | str = False,
    offline: bool | Offline = False,
    default: Any = None,
) -> Any:
    """Declare a metric.

    Args:
        csv: whether it has a column in the result file of a reinforcement job, or the name of the column.
        offline: whether it has one in that of a supervised and a dpo job, or of which.
    """
    extra: JsonDict = {"x-unit": unit} if unit else {}
    extra |= {"x-csv": csv} if csv else {}
    extra |= {"x-offline": offline} if offline else {}
    return Field(default, description=description, json_schema_extra=extra)


def _phase(description: str, column: str, *, offline: bool = False) -> Any:
    return metric(description, "s", csv=f"{column}_duration", offline=offline, default=0.0)


class _Part(BaseModel):
    # A row that a later version wrote may have metrics that this one does not know.
    model_config = ConfigDict(frozen=True, extra="ignore")


class PhaseSeconds(_Part):
    sampling: float = _phase("Seconds of the phase sampling.", "sampling")
    grading: float = _phase("Seconds of the phase grading, beyond sampling.", "grading")
    training: float = _phase("Seconds of the phase training.", "training", offline=True)
    eval: float = _phase("Seconds of the validation.", "eval", offline=True)
    waiting: float = metric("Seconds of waiting for other jobs on the same device.", "s", default=0.0)
    full_iteration: float = _phase("Seconds of the whole step.", "total", offline=True)


class ByGrader(_Part):
    graders: list[GraderMetrics] = []


class Scores(ByGrader):
    train_reward_mean: float | None = None
    valid_reward_mean: float | None = None


class Timing(ByGrader):
    step: PhaseSeconds = PhaseSeconds()


def _finite(value: Any) -> Any:
    """The value with None in place of each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value


class StepMetrics(_Part):
    """The metrics of one step. A metric that the step did not measure is None here, and absent or null in its event."""

    # A misspelled metric is an error where a step is measured; `load` leaves out what it does not know.
    model_config = ConfigDict(extra="forbid", json_schema_extra={"additionalProperties": True})

    step: int = metric(
        "Number of the step. Step 0 is the validation of the base model.", csv=True, offline=True, default=...
    )
    total_steps: int = metric("Number of steps of the job.", default=0)
    gpus: int | None = metric("GPUs of the run, if more than one.")
    sampling_gpus: int | None = metric("Those of them that sample, if others learn.")
    learning_gpus: int | None = metric("Those of them that learn, if others sample.")

    train_loss: float | None = metric(
        "Supervised: mean -log p of the learned tokens. dpo and reward_model: mean loss of the pairs or of the scored "
        "answers. Before the update.",
        offline=True,
    )
    train_accuracy: float | None = metric(
        "The accuracy of the next two, by OpenAI's second name.", offline="supervised"
    )
    valid_loss: float | None = metric("The same loss on a part of the validation file.", offline=True)
    valid_mean_token_accuracy: float | None = metric("The token accuracy there.", offline="supervised")
    full_valid_loss: float | None = metric("The loss on the whole validation file.", offline=True)
    full_valid_mean_token_accuracy: float | None = metric("The token accuracy there.", offline="supervised")
    train_mean_token_accuracy: float | None = metric(
        "Supervised: share of the learned tokens that the model thinks likeliest.", offline="supervised"
    )
    train_mean_reward_accuracy: float | None = metric(
        "dpo and reward_model: share of the pairs in which the preferred answer has the higher reward. That of dpo is "
        "beta times the log-probability ratio to the reference.",
        offline="dpo",
    )
    train_mean_reward_margin: float | None = metric(
        "dpo and reward_model: reward of the preferred less the other answer.", offline="dpo"
    )
    train_mean_chosen_reward: float | None = metric(
        "dpo and reward_model: reward of the preferred answers.", offline="dpo"
    )
    train_mean_rejected_reward: float | None = metric(
        "dpo and reward_model: reward of the other answers.", offline="dpo"
    )
    valid_mean_reward_accuracy: float | None = metric("On a part of the validation file.", offline="dpo")
    valid_mean_reward_margin: float | None = metric("On a part of the validation file.", offline="dpo")
    full_valid_mean_reward_accuracy: float | None = metric("On the whole validation file.", offline="dpo")
    full_valid_mean_reward_margin: float | None = metric("On the whole validation file.", offline="dpo")
    full_valid_mean_chosen_reward: float | None = metric("On the whole validation file.", offline="dpo")
    full_valid_mean_rejected_reward: float | None = metric("On the whole validation file.", offline="dpo")

    train_mean_reward: float | None = metric("Mean reward of the graded answers.", csv=True)
    train_reward_mean: float | None = metric("The same, by OpenAI's second name.")
    train_reward_std: float | None = metric("Standard deviation of the rewards over all answers.")

    full_valid_mean_reward: float | None = metric("Mean reward of the graded validation answers.", csv=True)
    valid_reward_mean: float | None = metric("The same, by OpenAI's second name.")
    full_valid_stderr: float | None = metric("Standard error of the validation reward over rows.", csv=True)
    full_valid_difference: float | None = metric(
        "Validation reward less the base model's, paired by row.", csv=True
    )
    full_valid_difference_low: float | None = metric("Lower end of its 95 % interval.", csv=True)
    full_valid_difference_high: float | None = metric("Upper end of its 95 % interval.", csv=True)
    full_valid_pass_at_1: float | None = metric(
        "With `eval_samples` above 1: share of the validation answers whose score is at least `pass_score`.",
        csv=True,
    )
    full_valid_pass_at_k: float | None = metric(
        "Then, too: share of the rows in which at least one of the k = `eval_samples` answers passes.",
        csv=True,
    )
    full_valid_maj_at_k: float | None = metric(
        "Then, too: share of the rows in which the commonest of the k final answers passes.", csv=True
    )
    full_valid_mean_parse_error: float | None = metric(
        "Share of the validation answers that could not be parsed.", csv=True
    )
    full_valid_teacher_kl: float | None = metric(
        "distillation: reverse KL to the teacher per token of the validation answers, estimated from what was sampled.",
        "nats",
        csv=True,
    )
    full_valid_shadow_mean_reward: float | None = metric(
        "With a shadow grader: mean score that it gives the validation answers.", csv=True
    )
    full_valid_shadow_unresponsive: float | None = metric(
        "Share of the validation answers that the shadow grader could not grade."
    )
    full_valid_shadow_difference: float | None = metric(
        "Score by the shadow grader less the base model's, paired by row.", csv=True
    )
    full_valid_shadow_difference_low: float | None = metric("Lower end of its 95 % interval.", csv=True)
    full_valid_shadow_difference_high: float | None = metric("Upper end of its 95 % interval.", csv=True)
    full_valid_shadow_shortfall: float | None = metric(
        "Half of the gain of the training grader less the gain of the shadow grader, mean over rows.",
        csv=True,
    )
    full_valid_shadow_shortfall_low: float | None = metric(
        "Its lower bound, which holds at all validations of the job together with 95 % (docs/howto/signal.md)."
    )
    full_valid_shadow_fall_low: float | None = metric(
        "Lower bound of the fall of the score by the shadow grader since step 0, of the same kind."
    )
    full_valid_fall: float | None = metric(
        "Reward of the best earlier validation less this one's, paired by row.", csv=True
    )
    full_valid_fall_low: float | None = metric(
        "Its lower bound, which holds for all pairs of validations of the job together with 95 %."
    )
    judge_drift: float | None = metric(
        "With a judge: mean change of the score of up to 16 answers of the attempt's first validation, which are "
        "graded again at each validation, as a share of what the judges can move.",
        csv=True,
    )
    judge_drift_low: float | None = metric(
        "Its lower bound, which holds at all validations of the job together with 95 %."
    )
    judge_drift_high: float | None = metric("Its upper bound.")
    valid_completion_tokens_mean: float | None = metric("Mean length of the validation answers.", "tokens")
    valid_truncated_share: float | None = metric(
        "Share of the validation answers that reached the token limit."
    )
    valid_unresponsive_rewards: float | None = metric(
        "Share of the validation answers that could not be graded."
    )

    completion_tokens_mean: float | None = metric("Mean length of the answers.", "tokens", csv=True)
    completion_tokens_max: int | None = metric("Length of the longest answer.", "tokens")
    mean_unresponsive_rewards: float | None = metric(
        "Share of the answers that could not be graded.", csv=True
    )
    truncated_share: float | None = metric("Share of the answers that reached the token limit.", csv=True)
    reasoning_tokens_mean: float | None = metric(
        "Mean length of the thoughts, of a reasoning model.", "tokens", csv=True
    )
    answer_tokens_mean: float | None = metric(
        "Mean length of the final answers, of a reasoning model.", "tokens", csv=True
    )
    cut_thoughts_share: float | None = metric(
        "Share of the answers that ended within their thought.", csv=True
    )

    episode_turns_mean: float | None = metric("Mean number of calls of the policy in an episode.", csv=True)
    episode_context_tokens_mean: float | None = metric(
        "Mean length of what an episode read after its prompt.", "tokens"
    )
    tool_calls_mean: float | None = metric("Mean number of calls of tools in an episode.", csv=True)
    tool_errors_share: float | None = metric(
        "Share of the calls of tools of which the model read an error.", csv=True
    )
    tool_seconds_p50: float | None = metric("Median time of the calls that were sent to tools.", "s")
    tool_seconds_p95: float | None = metric("95 % of these calls took at most this time.", "s")
    stop_final_share: float | None = metric("Share of the episodes that ended with an answer.")
    stop_max_steps_share: float | None = metric("Share of the episodes that ended at max_episode_steps.")
    stop_tokens_share: float | None = metric(
        "Share of the episodes that ended with an answer at its token limit."
    )
    stop_context_share: float | None = metric(
        "Share of the episodes that ended because the context had no room for another answer."
    )
    stop_time_share: float | None = metric("Share of the episodes that ended at their time limit.")
    stop_discarded_share: float | None = metric(
        "Share of the episodes that were discarded because a tool or the agent failed."
    )

    groups_mixed_share: float | None = metric(
        "Share of the groups with signal: their rewards differ.", csv=True
    )
    groups_all_zero_share: float | None = metric("Share of the groups in which all rewards are 0.", csv=True)
    groups_all_one_share: float | None = metric("Share of the groups in which all rewards are 1.", csv=True)
    groups_equal_share: float | None = metric(
        "Share of the groups in which all rewards are another equal number."
    )
    length_reward_correlation: float | None = metric(
        "Correlation of length and reward among the answers to one prompt, over all groups with signal, without "
        "answers that reached the token limit.",
        csv=True,
    )
    length_reward_z: float | None = metric(
        "The same times the root of its degrees of freedom: about normal, with variance 1, without a relation."
    )
    copied_prompt_share: float | None = metric(
        "Share of the answers of at least 6 tokens that have half of their runs of 6 tokens from the prompt, and are "
        "no field of their row.",
        csv=True,
    )
    repeated_tokens_share: float | None = metric(
        "Share of the runs of 4 tokens in an answer that occurred before in it.", csv=True
    )
    same_answers_share: float | None = metric(
        "Share of the pairs of answers to different prompts that are the same, apart from case and spaces; null with "
        "fewer than 8 different prompts that have answers with text.",
        csv=True,
    )
    foreign_script_share: float | None = metric(
        "Share of the answers in which a tenth of the letters, those of the thought included, is of scripts that "
        "neither the row nor a result of a tool has. Latin letters are expected everywhere.",
        csv=True,
    )
    groups_ungraded_share: float | None = metric("Share of the groups with fewer than two graded answers.")

    loss: float | None = metric("Loss of the update, mean over the trained tokens.", csv=True)
    kl: float | None = metric(
        "KL divergence to the reference per token (k3), on one pack a step unless `kl` is set.",
        "nats",
        csv=True,
    )
    kl_weight: float | None = metric(
        "Weight of the KL penalty in the step: `kl.weight`, or less during `kl.warmup_steps`.", csv=True
    )
    teacher_kl: float | None = metric(
        "distillation: reverse KL to the teacher per sampled token, mean of log p_student - log p_teacher before the "
        "update.",
        "nats",
        csv=True,
    )
    entropy: float | None = metric("Mean entropy of the policy per trained token.", "nats", csv=True)
    sampling_entropy: float | None = metric(
        "Mean of -log p over all sampled tokens, groups without signal included.", "nats", csv=True
    )
    clip_fraction: float | None = metric("Share of the trained tokens whose ratio was clipped.", csv=True)
    masked_fraction: float | None = metric(
        "Share of the trained tokens that `importance` left out of the loss: the sampler's probabilities differ too "
        "much from the trainer's."
    )
    value_loss: float | None = metric("Loss ppo: mean loss of the value head per trained token.", csv=True)
    explained_variance: float | None = metric(
        "Loss ppo: share of the variance of the returns that the values of the step explain, before its update. 1 at "
        "best, 0 for a constant, negative if they are worse than one.",
        csv=True,
    )
    grad_norm: float | None = metric("Norm of the gradient before clipping.", csv=True, offline=True)
    learning_rate: float | None = metric(
        "Learning rate of the update: that of the schedule, or less after an update was undone.",
        csv=True,
        offline=True,
    )
    update_kl: float | None = metric(
        "KL(before || after) per token of the update, at answers to a few prompts; the largest of several that were "
        "accepted. Of a reward model: per pair or step.",
        "nats",
        csv=True,
        offline=True,
    )
    update_retries: int | None = metric(
        "How often an update was undone, because it exceeded twice the target `step_kl`, and repeated with a lower "
        "rate.",
        offline=True,
    )
    rejected_updates: int | None = metric(
        "Updates that were still beyond twice the target after the last try, and changed nothing.",
        offline=True,
    )
    unmeasured_updates: int | None = metric(
        "Updates that were accepted without a KL, because memory ran out while it was measured.",
        offline=True,
    )
    logprob_gap: float | None = metric(
        "Mean |log p of the sampler - log p of the trainer| per token.", "nats", csv=True
    )
    logprob_gap_max: float | None = metric("The largest such difference.", "nats", csv=True)
    logprob_gap_k1: float | None = metric("KL(sampler || trainer) by the estimator k1.", "nats", csv=True)
    logprob_gap_k3: float | None = metric("KL(sampler || trainer) by the estimator k3.", "nats", csv=True)
    logprob_gap_ess: float | None = metric(
        "Effective share of the sample under the weights pi_trainer / pi_sampler.", csv=True
    )
    staleness: float | None = metric(
        "With the schedule `off_policy`: mean number of updates between the policy that sampled a token and the one "
        "that learns from it.",
        "updates",
    )
    stale_tokens_share: float | None = metric(
        "With `continue_in_flight`: share of the sampled tokens that the policy before the newest update sampled."
    )
    skipped_updates: int | None = metric("1 if a gradient was not finite and the step was not taken, else 0.")
    trained_sequences: int | None = metric("Answers that were trained on.")
    trained_tokens: int | None = metric(
        "Tokens that were trained on, once for each update.", "tokens", offline=True
    )
    dropped_sequences: int | None = metric("Answers without signal, which were not computed.")

    resampled_prompts: int | None = metric("Prompts sampled in addition, for groups without signal.")
    resampled_mixed_share: float | None = metric("Share of the groups with signal among these prompts.")
    discarded_groups: int | None = metric("Groups without signal, if prompts were resampled.")
    discarded_tokens: int | None = metric("Tokens of those groups.", "tokens")
    discarded_seconds: float | None = metric("Their part of the sampling time, by tokens.", "s")

    learned_tokens: int | None = metric(
        "Tokens of the answers that the update learned from. Of a job that learns from the rows of its file: those of "
        "the rows, once for each update.",
        "tokens",
    )
    masked_tokens: int | None = metric(
        "Tokens of such answers that `importance` left out of the loss.",
        "tokens",
    )
    not_updated_tokens: int | None = metric(
        "Tokens of such answers in a step whose update changed nothing.", "tokens"
    )
    no_advantage_tokens: int | None = metric(
        "Tokens of the answers in groups with signal whose own advantage is exactly 0.", "tokens"
    )
    zero_variance_tokens: int | None = metric(
        "Tokens of the answers to the step's own prompts whose rewards are all equal.", "tokens"
    )
    resampled_tokens: int | None = metric(
        "Tokens of the answers to resampled prompts whose rewards are all equal too.", "tokens"
    )
    truncated_tokens: int | None = metric(
        "With `overlong` mask: tokens of the answers that were left out because they reached the token limit.",
        "tokens",
    )
    ungraded_tokens: int | None = metric(
        "Tokens of the answers that could not be graded, or that are the only graded one of their group.",
        "tokens",
    )
    discarded_episodes_tokens: int | None = metric(
        "Tokens of the episodes that were discarded because a tool or the agent failed.", "tokens"
    )
    forced_tokens: int | None = metric(
        "Tokens that closed a thought at its budget: no policy has sampled them, and none is trained on.",
        "tokens",
    )

    sampled_tokens: int | None = metric(
        "Tokens of all answers of the step, the sum of those by what they taught.", "tokens"
    )
    sampling_tokens_per_second: float | None = metric(
        "Sampled tokens per second of the phase sampling, or of `ahead_seconds`.", "tokens/s"
    )
    ahead_seconds: float | None = metric(
        "With the schedule `off_policy`: seconds in which the answers were sampled during earlier steps. The phase "
        "sampling is the part of it that the trainer waited for.",
        "s",
    )
    weight_sync_seconds: float | None = metric(
        "The part of the phase sampling in which vLLM engines were started or woken and got the weights, up to the "
        "first engine that had them; of a fleet, in which the adapter was stored. 0 with the sampler `transformers`, "
        "and not measured with the schedule `off_policy`, which does it beside learning.",
        "s",
    )
    training_tokens_per_second: float | None = metric(
        "Trained tokens per second of the phase training.", "tokens/s"
    )

    scores: Scores = Field(default=Scores(), description="Mean reward by split and grader.")
    errors: ByGrader = Field(
        default=ByGrader(),
        description="Number and share of the grades that failed, by category, split and grader.",
    )
    timing: Timing = Field(
        default=Timing(),
        description="Seconds by phase of the step, and mean seconds per grade by split and grader.",
    )
    model_graders_token_usage: dict[str, dict[str, int]] = Field(
        default={}, description="Tokens read and written by judge models, by model."
    )
    usage: ByGrader = Field(
        default=ByGrader(), description="Tokens read and written by judge models, by grader."
    )

    @model_validator(mode="before")
    @classmethod
    def _with_finite_numbers(cls, data: Any) -> Any:
        """A number that is not finite, such as the loss of a skipped update, becomes None: JSON and PostgreSQL refuse
        it, and the step must read the same in this run and in one that resumes from its record.
        """
        return _finite(data)

    @classmethod
    def load(cls, data: Mapping[str, Any], *, step: int = 0) -> Self:
        """The metrics of a recorded step, by any version of the service. `step` is for a record without its number."""
        known = {name: value for name, value in data.items() if name in cls.model_fields}
        return cls.model_validate({"step": step} | known)

    def to_data(self) -> dict[str, Any]:
        """The `data` of the step's event: what was measured. A metric without a number in this step is null."""
        return self.model_dump(exclude_unset=True)

    def without_sections(self) -> Self:
        """The metrics of the step without those by grader, which are several kilobytes."""
        return self.model_copy(update={name: type(self).model_fields[name].default for name in SECTIONS})

    @property
    def is_validated(self) -> bool:
        """Whether the step had a validation, even if none of its answers could be graded."""
        return bool({"full_valid_mean_reward", "full_valid_loss"} & self.model_fields_set)

    @property
    def has_signal(self) -> bool | None:
        """Whether a group had signal, a resampled one included. None: the step has no groups with scores."""
        if self.groups_mixed_share is None:
            return None
        return bool(self.groups_mixed_share or self.resampled_mixed_share)

    @property
    def offline(self) -> Offline | None:
        """The method of a job that learns from the answers in its file; None: another one."""
        measured = self.model_fields_set
        if not {"train_loss", "full_valid_loss"} & measured:
            return None
        accuracies = {"train_mean_token_accuracy", "full_valid_mean_token_accuracy"}
        return "supervised" if accuracies & measured else "dpo"

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.timing.step.full_iteration

    @property
    def gpu_count(self) -> int:
        """Number of GPUs of the run. A CPU counts as one."""
        return self.gpus or 1

    @property
    def gpu_seconds(self) -> float:
        """Waiting for other jobs on the same device does not count: a job counts as much as if it ran alone."""
        return self.gpu_count * (self.seconds - self.timing.step.waiting)

    @property
    def gpus_used(self) -> float:
        """GPU-seconds in a second of the step."""
        return self.gpu_seconds / self.seconds if self.seconds else float(self.gpu_count)


@dataclass(frozen=True)
class Metric:
    """A metric by its name in the result file."""

    name: str
    unit: str  # "" for a ratio or a reward
    description: str
    in_csv: bool  # of a reinforcement job
    offline: bool | str  # in the result file of a supervised and a dpo job, or of which
    path: tuple[str, ...]  # of the attributes of StepMetrics; one name, unless the metric is inside a section

    def value(self, step: StepMetrics) -> Any:
        """Return the metric of a step; None if it was not measured."""
        part: Any = step
        for name in self.path:
            part = getattr(part, name) if name in part.model_fields_set else None
            if part is None:
                return None
        return part


def _offline(extra: object) -> bool | str:
    return extra if isinstance(extra, str) else bool(extra)


def _metrics_of(part: type[BaseModel], *path: str) -> Iterator[Metric]:
    for name, field in part.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict):
            column = extra.get("x-csv", False)
            shown = column if isinstance(column, str) else name
            yield Metric(
                shown,
                str(extra.get("x-unit", "")),
                field.description or "",
                bool(column),
                _offline(extra.get("x-offline")),
                (*path, name),
            )


METRICS = (*_metrics_of(StepMetrics), *_metrics_of(PhaseSeconds, "timing", "step"))
COLUMNS = tuple(metric for metric in METRICS if metric.in_csv)
OFFLINE_COLUMNS: Mapping[Offline, tuple[Metric, ...]] = MappingProxyType(
    {
        method: tuple(metric for metric in METRICS if metric.offline in (True, method))
        for method in get_args(Offline)
    }
)
SECTIONS = {
    name: field.description or ""
    for name, field in StepMetrics.model_fields.items()
    if field.json_schema_extra is None
}
