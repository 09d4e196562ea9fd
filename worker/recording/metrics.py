"""The metrics of a step: the fields of OpenAI's metrics event, and additional ones. Pure functions."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from core.jobs.hyperparameters import Resolved
from core.statistics import differences, paired, sequential_low
from core.step_metrics import StepMetrics
from graders.tools.episode import NO_RESULT, NOT_EXECUTED, StopReason
from graders.types import ErrorKind, Grade, TokenUsage, summed
from worker.gpu_ratio import GpuSplit
from worker.history import Steps, first
from worker.recording import answer_statistics, ledger, passes, shadow
from worker.recording.verdict import compare, row_scores, standard_error
from worker.training.contributions import GroupSignal
from worker.types import GraderPart, Group, Rollout, RowScores, UpdateMetrics

PHASES = ("sampling", "grading", "training", "eval")

# The categories OpenAI reports, each as train_/valid_ x _mean/_count.
_ERRORS = (
    "sample_parse_error",
    "invalid_variable_error",
    "other_error",
    "python_grader_server_error",
    "python_grader_runtime_error",
    "model_grader_server_error",
)


def mean_reward(groups_P: Sequence[Group]) -> float | None:
    """Mean over the graded answers; None if there is none. Ungraded ones are reported, not counted as 0."""
    return _mean(grade.score for grade in _grades(groups_P) if grade.score is not None)


def of_step(
    *,
    step: int,
    total_steps: int,
    graders: Sequence[GraderPart],
    settings: Resolved,
    train_P: Sequence[Group],
    resampled_P: Sequence[Group],
    signals_P: Sequence[GroupSignal],
    valid_P: Sequence[Group] | None,
    update: UpdateMetrics | None,
    seconds: Mapping[str, float],
    ahead_seconds: float | None = None,
    weight_sync_seconds: float | None = None,
    gpus: int = 1,
    gpu_split: GpuSplit | None = None,
    base_scores: RowScores | None = None,
    base_shadow_scores: RowScores | None = None,
    best_scores: RowScores | None = None,
    judge_drift: Mapping[str, float | None] | None = None,
    pass_score: float = 1.0,
) -> StepMetrics:
    """The metrics of a step. Step 0 is the validation of the base and has no training part.

    `signals_P` are those of `train_P`, then of `resampled_P`.
    The metrics show each of `graders` by name; there are none if a teacher scores the answers.
    `base_scores` are the row scores of step 0, with which a later validation is compared, and `base_shadow_scores`
    those by the shadow grader. `best_scores` are the row scores of the best validation before this step.
    """
    splits = [("train", train_P)] if train_P else []
    if valid_P is not None:
        splits.append(("valid", valid_P))
    data: dict[str, Any] = {"step": step, "total_steps": total_steps} | _of_gpus(gpus, gpu_split)
    for split, groups_P in splits:
        data |= _split(split, groups_P)
    if valid_P is not None:
        scores, looks = row_scores(valid_P), settings.validations
        data["full_valid_stderr"] = standard_error(scores)
        data |= _pass_shares(valid_P, graders, pass_score) | dict(judge_drift or {})
        data |= _against_base(base_scores, scores)
        data |= shadow.of_validation(valid_P, scores, base_scores, base_shadow_scores, looks)
        data |= below_best(best_scores, scores, looks)
    if train_P and graders:
        data |= signal_shares(signals_P[: len(train_P)]) | answer_statistics.of_answers(train_P)
    if update is not None:
        data |= _update(update) | ledger.answer_tokens(train_P, resampled_P, signals_P, update, settings)
    if weight_sync_seconds is not None:
        data["weight_sync_seconds"] = weight_sync_seconds
    data |= _staleness(step, train_P)
    if resampled_P:
        data |= _replaced(train_P, resampled_P, signals_P, seconds)
    data |= _sampling_speed([*train_P, *resampled_P], seconds, ahead_seconds)
    if update is not None and seconds.get("training"):
        data["training_tokens_per_second"] = update.trained_tokens / seconds["training"]
    data |= _of_graders(graders, splits, resampled_P)
    step_seconds = dict.fromkeys(PHASES, 0.0) | dict(seconds) | {"full_iteration": sum(seconds.values())}
    data["timing"] = {"step": step_seconds, "graders": _per_grader(graders, splits, _latency_fields)}
    return StepMetrics(**data)


def _of_gpus(gpus: int, split: GpuSplit | None) -> dict[str, int]:
    """How many GPUs the step had, and if they are divided, how many sampled and how many learned."""
    data = {"gpus": gpus} if gpus > 1 else {}
    return (
        data if split is None else data | {"sampling_gpus": split.sampling, "learning_gpus": split.learning}
    )


def _pass_shares(
    valid_P: Sequence[Group], graders: Sequence[GraderPart], pass_score: float
) -> dict[str, Any]:
    """How often rows pass; empty without graders."""
    if not graders:
        return {}
    numeric = any(part.compares_numbers for part in graders)
    return passes.of_validation(valid_P, pass_score, numeric=numeric)


def _of_graders(
    graders: Sequence[GraderPart],
    splits: Sequence[tuple[str, Sequence[Group]]],
    resampled_P: Sequence[Group],
) -> dict[str, Any]:
    """The scores, errors and tokens of each grader in each split."""
    is_combined = any(part.key is not None for part in graders)
    score_fields = _part_score_fields if is_combined else _score_fields
    means = {f"{split}_reward_mean": mean_reward(groups_P) for split, groups_P in splits}
    data: dict[str, Any] = {
        "scores": {"graders": _weighted(graders, _per_grader(graders, splits, score_fields))} | means,
        "errors": {"graders": _per_grader(graders, splits, _error_fields)},
    }
    # The judges read the resampled answers too; the other numbers by grader are of the step's own prompts.
    judged = [
        (split, [*groups_P, *resampled_P] if split == "train" else groups_P) for split, groups_P in splits
    ]
    used = {split: usage for split, groups_P in judged if (usage := _tokens_used(groups_P))}
    if used:
        data["model_graders_token_usage"] = usage_by_model(used)
        rows = _per_grader(graders, judged, _usage_fields)
        data["usage"] = {"graders": [row for row in rows if "model" in row]}
    return data


def _staleness(step: int, train_P: Sequence[Group]) -> dict[str, float]:
    """How many updates the policy of the answers misses, and the share of tokens of such a policy."""
    data: dict[str, float] = {}
    if lags := [step - 1 - one for rollout in _rollouts(train_P) for one in rollout.known_policy_steps_T]:
        data["staleness"] = sum(lags) / len(lags)
    if policy_steps := [one for rollout in _rollouts(train_P) for one in rollout.policy_steps_T]:
        data["stale_tokens_share"] = sum(one < step - 1 for one in policy_steps) / len(policy_steps)
    return data


def _sampling_speed(
    groups_P: Sequence[Group], seconds: Mapping[str, float], ahead_seconds: float | None
) -> dict[str, float]:
    data: dict[str, float] = {} if ahead_seconds is None else {"ahead_seconds": ahead_seconds}
    sampled = sum(len(rollout.output_ids_T) for rollout in _rollouts(groups_P))
    sampling_seconds = ahead_seconds or seconds.get("sampling")
    if sampled and sampling_seconds:
        data |= {"sampled_tokens": sampled, "sampling_tokens_per_second": sampled / sampling_seconds}
    return data


def message(step: StepMetrics) -> str:
    """The event's text, word for word as OpenAI wrote it (the space before the first comma included).

    A job that learns from a teacher has no grader: its events have the KL to the teacher, which is to fall.
    """
    if step.offline is not None:
        losses = [
            f"{label}={value:.2f}"
            for label, value in (
                ("training loss", step.train_loss),
                ("validation loss", step.valid_loss),
                ("full validation loss", step.full_valid_loss),
            )
            if value is not None
        ]
        return f"Step {step.step}/{step.total_steps}" + (f": {', '.join(losses)}" if losses else "")
    parts = [f"Step {step.step}/{step.total_steps} "]
    measured: list[tuple[str, float | None]] = [
        ("train mean reward", step.train_mean_reward),
        ("full validation mean reward", step.full_valid_mean_reward),
        ("full validation mean parse error", step.full_valid_mean_parse_error),
    ]
    if step.teacher_kl is not None or step.full_valid_teacher_kl is not None:
        measured = [
            ("KL to the teacher", step.teacher_kl),
            ("full validation KL to the teacher", step.full_valid_teacher_kl),
        ]
    return ",".join(parts + [f" {label}={value:.2f}" for label, value in measured if value is not None])


@dataclass(frozen=True)
class Ungraded:
    """The answers of a step that could not be graded."""

    message: str
    share: float  # of all answers
    reasons: list[str]  # the commonest first, a few


def ungraded(groups_P: Sequence[Group]) -> Ungraded | None:
    """None if every answer was graded. Discarded episodes do not count: `discarded` has them."""
    grades = given_to_graders(groups_P)
    counts = Counter(grade.reason for grade in grades if grade.score is None)
    if not counts:
        return None
    reasons = [reason for reason, _ in counts.most_common(5)]
    count = f"{counts.total()} of {len(grades)} samples could not be graded and teach nothing."
    return Ungraded(f"{count} Most often: {reasons[0]}", counts.total() / len(grades), reasons)


def discarded(groups_P: Sequence[Group]) -> Ungraded | None:
    """The episodes that no grader got, because a tool or the agent failed; None: there are none."""
    episodes = [one.episode for one in _rollouts(groups_P) if one.episode is not None and one.is_discarded]
    if not episodes:
        return None
    reasons = [reason for reason, _ in Counter(one.problem for one in episodes).most_common(5)]
    every = len(_rollouts(groups_P))
    count = f"{len(episodes)} of {every} episodes were discarded."
    return Ungraded(f"{count} Most often: {reasons[0]}", len(episodes) / every, reasons)


@dataclass(frozen=True)
class NoSignal:
    """A step from which nothing can be learned. `is_success`: because the model has learned what there was to learn."""

    message: str
    is_success: bool = False


def no_signal(
    groups_P: Sequence[Group],
    signals_P: Sequence[GroupSignal],
    steps: Steps = (),
    *,
    cause_known: bool = False,
) -> NoSignal | None:
    """A sentence about a step from which nothing can be learned; None if some group had signal.

    `steps` are those before it. Where the first of them had a much higher training reward, the model has collapsed, and
    neither the task nor the grader is to blame; a validation has other rows, and greedy answers. Where one of them had
    signal and now most groups have nothing but full scores, the model has learned the task. With `cause_known`, after a
    warning of collapse, the sentence names no cause.
    """
    kinds = Counter(signal.kind for signal in signals_P)
    if kinds["mixed"] or any(group.has_teacher for group in groups_P):
        return None
    what = {
        "all_zero": "all answers scored 0: the task is too hard for the model, or the grader gives no partial credit",
        "all_one": "all answers scored 1: the task is too easy to learn from",
        "equal": "all answers to a prompt scored the same",
        "ungraded": "the answers could not be graded",
    }
    kind, _ = kinds.most_common(1)[0]
    silence = f"No signal: in none of the {len(groups_P)} groups did the answers differ in score."
    if cause_known:
        return NoSignal(silence)
    reward, earlier = mean_reward(groups_P), first(steps, "train_mean_reward")
    if reward is not None and earlier is not None and _has_fallen(reward, steps, len(_grades(groups_P))):
        step, before = earlier
        return NoSignal(
            f"{silence} The model has collapsed: its mean reward is {reward:.2f}, and that of step {step} was "
            f"{before:.2f}. Lower the learning rate."
        )
    if kind == "all_one" and any(step.has_signal for step in steps):
        return NoSignal(
            f"{silence} Mostly all answers scored 1: the model has learned the prompts of this step.",
            is_success=True,
        )
    return NoSignal(f"{silence} Mostly {what[kind]}.")


def _has_fallen(reward: float, steps: Steps, answers: int) -> bool:
    """Whether the reward is less than half of the first step's, by more than two standard errors of that one.

    One right answer of 32 in the first step and none now is no fall.
    """
    earlier, spread = first(steps, "train_mean_reward"), first(steps, "train_reward_std")
    if earlier is None or spread is None:
        return False
    return reward < earlier[1] / 2 and earlier[1] - reward > 2 * spread[1] / math.sqrt(answers)


def _split(split: str, groups_P: Sequence[Group]) -> dict[str, Any]:
    grades, rollouts = _grades(groups_P), _rollouts(groups_P)
    lengths = [len(rollout.output_ids_T) for rollout in rollouts]
    reward, given = mean_reward(groups_P), given_to_graders(groups_P)
    failed = sum(grade.score is None for grade in given) / max(1, len(given))
    truncated = sum(rollout.is_truncated for rollout in rollouts) / len(rollouts)
    parse_errors = sum(grade.error == ErrorKind.sample_parse_error for grade in grades) / len(grades)
    if split == "valid":
        return {
            "full_valid_mean_reward": reward,
            "valid_reward_mean": reward,
            "full_valid_mean_parse_error": parse_errors,
            "valid_completion_tokens_mean": statistics.fmean(lengths),
            "valid_truncated_share": truncated,
            "valid_unresponsive_rewards": failed,
            **_teacher_kl("full_valid_teacher_kl", rollouts),
        }
    scores = [grade.score for grade in grades if grade.score is not None]
    return {
        "train_mean_reward": reward,
        "train_reward_mean": reward,
        "train_reward_std": statistics.pstdev(scores) if scores else None,
        "completion_tokens_mean": statistics.fmean(lengths),
        "completion_tokens_max": max(lengths),
        "sampling_entropy": _sampling_entropy(rollouts),
        "truncated_share": truncated,
        **_reasoning(rollouts),
        **_episodes(rollouts),
        "mean_unresponsive_rewards": failed,
        **_teacher_kl("teacher_kl", rollouts),
    }


def _teacher_kl(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of log p_student - log p_teacher over all sampled tokens; empty without a teacher."""
    pairs = [pair for one in rollouts for pair in zip(one.logprobs_T, one.teacher_T, strict=False)]
    return {name: statistics.fmean(own - teacher for own, teacher in pairs)} if pairs else {}


def _against_base(base_N: RowScores | None, scores_N: RowScores) -> dict[str, float | None]:
    """The mean paired difference to the base model's validation, with its 95 % interval; empty if nothing compares."""
    compared = None if base_N is None else compare(base_N, scores_N)
    if compared is None:
        return {}
    return {
        "full_valid_difference": compared.difference,
        "full_valid_difference_low": compared.low,
        "full_valid_difference_high": compared.high,
    }


def below_best(best_N: RowScores | None, now_N: RowScores, looks: int) -> dict[str, float | None]:
    """The paired fall from the best validation; any two of the validations of the job may be the pair."""
    falls = [] if best_N is None else differences(paired(zip(now_N, best_N, strict=True)))
    if not falls:
        return {}
    return {
        "full_valid_fall": statistics.fmean(falls),
        "full_valid_fall_low": sequential_low(falls, math.comb(looks + 1, 2)),
    }


def _episodes(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The turns, ends and tools of episodes; empty without episodes."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return {}
    uses = [use for episode in episodes for use in episode.uses if use.error not in (NOT_EXECUTED, NO_RESULT)]
    stops = Counter(episode.stop for episode in episodes)
    seconds = sorted(use.seconds for use in uses if use.seconds > 0)
    data = {
        "episode_turns_mean": statistics.fmean(episode.turns for episode in episodes),
        "episode_context_tokens_mean": statistics.fmean(
            sum(len(node.context_ids) for node in rollout.nodes) for rollout in rollouts
        ),
        "tool_calls_mean": len(uses) / len(episodes),
    }
    data |= {f"stop_{stop}_share": stops[stop] / len(episodes) for stop in get_args(StopReason)}
    if uses:
        data["tool_errors_share"] = sum(bool(use.error) for use in uses) / len(uses)
    if seconds:
        data |= {"tool_seconds_p50": _quantile(seconds, 0.5), "tool_seconds_p95": _quantile(seconds, 0.95)}
    return data


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _reasoning(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The lengths of thoughts and final answers; empty if there is no thought."""
    thoughts = [rollout.reasoning_tokens for rollout in rollouts]
    if not any(thoughts):
        return {}
    answers = [len(rollout.output_ids_T) - rollout.reasoning_tokens for rollout in rollouts]
    return {
        "reasoning_tokens_mean": statistics.fmean(thoughts),
        "answer_tokens_mean": statistics.fmean(answers),
        "cut_thoughts_share": sum(rollout.cut_thought for rollout in rollouts) / len(rollouts),
    }


def _sampling_entropy(rollouts: Sequence[Rollout]) -> float | None:
    """Nats a token, estimated as the mean of -log p over all sampled tokens.

    `entropy` is exact and covers only the trained tokens. This one covers every answer, so it is there in the steps
    that matter for a diagnosis: those in which no group had signal and nothing was trained.
    """
    return _mean(-logprob for rollout in rollouts for logprob in rollout.sampled_logprobs)


def signal_shares(signals_P: Sequence[GroupSignal]) -> dict[str, float]:
    """The share of the groups of each kind: see `contributions.signal`."""
    kinds = Counter(signal.kind for signal in signals_P)
    return {
        f"groups_{kind}_share": kinds[kind] / len(signals_P)
        for kind in ("mixed", "all_zero", "all_one", "equal", "ungraded")
    }


def _replaced(
    train_P: Sequence[Group],
    resampled_P: Sequence[Group],
    signals_P: Sequence[GroupSignal],
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """What dynamic sampling drew, and what was thrown away for it. Rewards are of the step's own prompts alone."""
    groups_P = [*train_P, *resampled_P]
    silent_P = [group for group, signal in zip(groups_P, signals_P, strict=True) if not signal.is_mixed]
    mixed = sum(signal.is_mixed for signal in signals_P[len(train_P) :])
    everything = sum(len(rollout.output_ids_T) for rollout in _rollouts(groups_P))
    discarded = sum(len(rollout.output_ids_T) for rollout in _rollouts(silent_P))
    return {
        "resampled_prompts": len(resampled_P),
        "resampled_mixed_share": mixed / len(resampled_P),
        "discarded_groups": len(silent_P),
        "discarded_tokens": discarded,
        # Their share of the time by tokens: answers are sampled concurrently, so single answers have no separate time.
        "discarded_seconds": seconds.get("sampling", 0.0) * discarded / everything,
    }


def _update(update: UpdateMetrics) -> dict[str, Any]:
    # The ledger has the share of masked tokens with an advantage.
    apart = ("tokens", "teaching_masked_fraction")
    measured = {one.name: getattr(update, one.name) for one in fields(update) if one.name not in apart}
    measured["skipped_updates"] = int(measured.pop("skipped"))
    return measured


def _grades(groups_P: Sequence[Group]) -> list[Grade]:
    return [grade for group in groups_P for grade in group.grades_G]


def given_to_graders(groups_P: Sequence[Group]) -> list[Grade]:
    """The grades of all answers but discarded episodes: a tool or the agent failed there, and not the grader."""
    return [
        grade
        for group in groups_P
        for rollout, grade in zip(group.rollouts_G, group.grades_G, strict=True)
        if not rollout.is_discarded
    ]


def _rollouts(groups_P: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups_P for rollout in group.rollouts_G]


def _mean(values: Iterable[float]) -> float | None:
    kept = list(values)
    return statistics.fmean(kept) if kept else None


def _per_grader(
    graders: Sequence[GraderPart], splits: Sequence[tuple[str, Sequence[Group]]], fields: Any
) -> list[dict[str, Any]]:
    """One entry a grader: those of a multi or a select, or the only one. None without a grader."""
    rows = []
    for part in graders:
        row: dict[str, Any] = {"name": part.name, "type": part.type}
        if part.model is not None:
            row["model"] = part.model
        for split, groups_P in splits:
            grades = _grades(groups_P)
            row |= fields(
                split,
                grades
                if part.key is None
                else [g.sub_grades[part.key] for g in grades if part.key in g.sub_grades],
            )
        rows.append(row)
    return rows


def _weighted(graders: Sequence[GraderPart], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the weight of each part of a weighted sum: worker/recording/gaming.py needs its sign."""
    return [
        row if part.weight is None else row | {"weight": part.weight}
        for part, row in zip(graders, rows, strict=True)
    ]


def _score_fields(split: str, grades: Sequence[Grade]) -> dict[str, Any]:
    return {f"{split}_reward_mean": _mean(grade.score for grade in grades if grade.score is not None)}


def _part_score_fields(split: str, grades: Sequence[Grade]) -> dict[str, Any]:
    """Also the standard deviation: worker/recording/monitors.py finds a part by it that scores all answers alike."""
    scores = [grade.score for grade in grades if grade.score is not None]
    return _score_fields(split, grades) | {
        f"{split}_reward_std": statistics.pstdev(scores) if scores else None
    }


def _error_fields(split: str, grades: Sequence[Grade]) -> dict[str, float]:
    fields = {}
    for kind in _ERRORS:
        count = sum(grade.error == kind for grade in grades)
        fields[f"{split}_{kind}_count"] = float(count)
        fields[f"{split}_{kind}_mean"] = count / len(grades) if grades else 0.0
    return fields


def _tokens_used(groups_P: Sequence[Group]) -> dict[str, TokenUsage]:
    return summed(grade.usage for grade in _grades(groups_P))


def usage_by_model(used: Mapping[str, Mapping[str, TokenUsage]]) -> dict[str, dict[str, int]]:
    """Tokens that judges read and wrote, by model. OpenAI says "eval" here where it says "valid" elsewhere."""
    models: dict[str, dict[str, int]] = {}
    for split, usage in used.items():
        label = "eval" if split == "valid" else split
        for model, tokens in usage.items():
            models[model] = models.get(model, {}) | {
                f"{label}_prompt_tokens": tokens.prompt_tokens,
                f"{label}_cached_tokens": tokens.cached_tokens,
                f"{label}_completion_tokens": tokens.completion_tokens,
            }
    return models


def _usage_fields(split: str, grades: Sequence[Grade]) -> dict[str, Any]:
    total = sum(summed(grade.usage for grade in grades).values(), TokenUsage())
    fields: dict[str, Any] = {}
    for kind, count in (("prompt", total.prompt_tokens), ("completion", total.completion_tokens)):
        fields[f"{split}_{kind}_tokens_mean"] = count / len(grades) if grades else 0.0
        fields[f"{split}_{kind}_tokens_count"] = float(count)
    return fields


def _latency_fields(split: str, grades: Sequence[Grade]) -> dict[str, Any]:
    return {f"{split}_execution_latency_mean": _mean(grade.seconds for grade in grades)}
