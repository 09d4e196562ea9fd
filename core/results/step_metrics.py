"""The metrics of a step: their names, units and descriptions, written here only.

The event `metrics` of a step, `GET /v1/regraft/jobs/{id}/metrics`, the result CSV, the exporters and the reference page
use these names. Metrics by grader are in sections of the event (SECTIONS) and in CSV columns such as
`scores/graders/string_check/exact/train_reward_mean`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTIONS = {
    "scores": "Mean reward by split and grader.",
    "errors": "Number and share of the grades that failed, by category, split and grader.",
    "timing": "Seconds by phase of the step, and mean seconds per grade by split and grader.",
    "model_graders_token_usage": "Tokens read and written by judge models, by model.",
    "usage": "Tokens read and written by judge models, by grader.",
}


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str  # "" for a ratio or a reward
    description: str
    in_csv: bool = False
    path: tuple[str, ...] = ()  # in the event, if the metric is inside a section

    def value(self, data: Mapping[str, Any]) -> Any:
        """Return the metric of a step; None if it was not measured."""
        found: Any = data
        for key in self.path or (self.name,):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


def _phase(name: str, description: str) -> Metric:
    key = "full_iteration" if name == "total" else name
    return Metric(f"{name}_duration", "s", description, in_csv=True, path=("timing", "step", key))


METRICS = (
    Metric("step", "", "Number of the step. Step 0 is the validation of the base model.", in_csv=True),
    Metric("total_steps", "", "Number of steps of the job."),
    Metric("gpus", "", "GPUs of the run, if more than one."),
    Metric("train_mean_reward", "", "Mean reward of the graded answers.", in_csv=True),
    Metric("train_reward_mean", "", "The same, by OpenAI's second name."),
    Metric("train_reward_std", "", "Standard deviation of the rewards over all answers."),
    Metric("full_valid_mean_reward", "", "Mean reward of the graded validation answers.", in_csv=True),
    Metric("valid_reward_mean", "", "The same, by OpenAI's second name."),
    Metric("full_valid_stderr", "", "Standard error of the validation reward over rows.", in_csv=True),
    Metric(
        "full_valid_difference", "", "Validation reward less the base model's, paired by row.", in_csv=True
    ),
    Metric("full_valid_difference_low", "", "Lower end of its 95 % interval.", in_csv=True),
    Metric("full_valid_difference_high", "", "Upper end of its 95 % interval.", in_csv=True),
    Metric(
        "full_valid_mean_parse_error",
        "",
        "Share of the validation answers that could not be parsed.",
        in_csv=True,
    ),
    Metric("valid_completion_tokens_mean", "tokens", "Mean length of the validation answers."),
    Metric("valid_truncated_share", "", "Share of the validation answers that reached the token limit."),
    Metric("valid_unresponsive_rewards", "", "Share of the validation answers that could not be graded."),
    Metric("completion_tokens_mean", "tokens", "Mean length of the answers.", in_csv=True),
    Metric("completion_tokens_max", "tokens", "Length of the longest answer."),
    Metric("mean_unresponsive_rewards", "", "Share of the answers that could not be graded.", in_csv=True),
    Metric("truncated_share", "", "Share of the answers that reached the token limit.", in_csv=True),
    Metric("groups_mixed_share", "", "Share of the groups with signal: their rewards differ.", in_csv=True),
    Metric("groups_all_zero_share", "", "Share of the groups in which all rewards are 0.", in_csv=True),
    Metric("groups_all_one_share", "", "Share of the groups in which all rewards are 1.", in_csv=True),
    Metric("groups_equal_share", "", "Share of the groups in which all rewards are another equal number."),
    Metric("groups_ungraded_share", "", "Share of the groups with fewer than two graded answers."),
    Metric("loss", "", "Loss of the update, mean over the trained tokens.", in_csv=True),
    Metric(
        "kl",
        "nats",
        "KL divergence to the reference per token (k3), on one pack a step unless `kl` is set.",
        in_csv=True,
    ),
    Metric("entropy", "nats", "Mean entropy of the policy per trained token.", in_csv=True),
    Metric(
        "sampling_entropy",
        "nats",
        "Mean of -log p over all sampled tokens, groups without signal included.",
        in_csv=True,
    ),
    Metric("clip_fraction", "", "Share of the trained tokens whose ratio was clipped.", in_csv=True),
    Metric("grad_norm", "", "Norm of the gradient before clipping.", in_csv=True),
    Metric(
        "logprob_gap", "nats", "Mean |log p of the sampler - log p of the trainer| per token.", in_csv=True
    ),
    Metric("logprob_gap_max", "nats", "The largest such difference.", in_csv=True),
    Metric("logprob_gap_k1", "nats", "KL(sampler || trainer) by the estimator k1.", in_csv=True),
    Metric("logprob_gap_k3", "nats", "KL(sampler || trainer) by the estimator k3.", in_csv=True),
    Metric(
        "logprob_gap_ess",
        "",
        "Effective share of the sample under the weights pi_trainer / pi_sampler.",
        in_csv=True,
    ),
    Metric("skipped_updates", "", "1 if a gradient was not finite and the step was not taken, else 0."),
    Metric("trained_sequences", "", "Answers that were trained on."),
    Metric("trained_tokens", "tokens", "Tokens that were trained on, once for each update."),
    Metric("dropped_sequences", "", "Answers without signal, which were not computed."),
    Metric("resampled_prompts", "", "Prompts sampled in addition, for groups without signal."),
    Metric("discarded_groups", "", "Groups without signal, if prompts were resampled."),
    Metric("discarded_tokens", "tokens", "Tokens of those groups."),
    Metric("discarded_seconds", "s", "Their part of the sampling time, by tokens."),
    Metric("sampled_tokens", "tokens", "Tokens of all answers of the step."),
    Metric("sampling_tokens_per_second", "tokens/s", "Sampled tokens per second of the phase sampling."),
    Metric("training_tokens_per_second", "tokens/s", "Trained tokens per second of the phase training."),
    _phase("sampling", "Seconds of the phase sampling."),
    _phase("grading", "Seconds of the phase grading, beyond sampling."),
    _phase("training", "Seconds of the phase training."),
    _phase("eval", "Seconds of the validation."),
    _phase("total", "Seconds of the whole step."),
)
COLUMNS = tuple(metric for metric in METRICS if metric.in_csv)
