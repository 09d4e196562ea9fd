"""The sampled tokens of a step by what they taught. core/results/ledger.py makes the ledger of a job from them."""

from collections.abc import Sequence

from core.jobs.hyperparameters import Resolved
from core.results.ledger import BY_ANSWER
from graders.types import Grade
from worker.training import grpo
from worker.training.contributions import GroupSignal
from worker.training.updates import changed_nothing
from worker.types import AnswerSignal, Group, Rollout, UpdateMetrics


def answer_tokens(
    train_P: Sequence[Group],
    resampled_P: Sequence[Group],
    signals_P: Sequence[GroupSignal],
    update: UpdateMetrics,
    settings: Resolved,
) -> dict[str, int]:
    """Return the metrics `learned_tokens`, `zero_variance_tokens`, ...: their sum is the tokens of all answers.

    All tokens of an answer count in one bucket, but the forced ones, and those that importance correction has masked:
    their share of the tokens with an advantage is taken from the learned ones. A KL penalty trains on tokens without
    an advantage too.

    Args:
        signals_P: of the groups of the step, the resampled ones last.
    """
    groups_P = [*train_P, *resampled_P]
    is_refused = update.trained_sequences == 0  # by the sampler gate
    learned = "not_updated" if is_refused or changed_nothing(update) else "learned"
    tokens = dict.fromkeys(BY_ANSWER, 0)
    for number, (group, group_signal) in enumerate(zip(groups_P, signals_P, strict=True)):
        without_signal = "zero_variance" if number < len(train_P) else "resampled"
        for rollout, grade, signal in zip(
            group.rollouts_G, group.grades_G, group_signal.answers_G, strict=True
        ):
            if _teaches(signal, group, settings):
                bucket = learned
            else:
                bucket = _reason(rollout, grade, group_signal.kind, settings) or without_signal
            tokens[bucket] += rollout.sampled_tokens
            tokens["forced"] += rollout.forced
    tokens["masked"] = round((update.teaching_masked_fraction or 0.0) * tokens["learned"])
    tokens["learned"] -= tokens["masked"]
    return {f"{bucket}_tokens": count for bucket, count in tokens.items()}


def _teaches(signal: AnswerSignal, group: Group, settings: Resolved) -> bool:
    """Whether an answer has a gradient of the objective. A KL penalty alone, which pulls to the reference, is none."""
    if not signal.is_trained:
        return False
    has_own = settings.has_token_rewards or group.has_teacher  # advantages by token
    return has_own or bool(signal.advantage) or any(signal.steps_J)


def _reason(rollout: Rollout, grade: Grade, kind: grpo.Signal, settings: Resolved) -> str | None:
    """Why an answer taught nothing; None: all rewards of its group are equal."""
    if rollout.is_discarded:
        return "discarded_episodes"
    if grade.score is None:
        return "ungraded"
    if not settings.has_token_rewards and kind != "mixed":
        return "ungraded" if kind == "ungraded" else None
    if settings.overlong == "mask" and rollout.is_truncated:
        return "truncated"
    return "no_advantage"
