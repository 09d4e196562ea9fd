"""Fail a run whose model or gradients are no longer numbers: no later step repairs the weights."""

import math
from collections.abc import Iterable

from worker.refusals import TrainingDiverged
from worker.types import Rollout

# Consecutive updates without a finite gradient after which the job fails. A single one may be due to its batch.
MAX_SKIPPED = 3

_ADVICE = (
    "No later step repairs that. Lower learning_rate_multiplier, or the scale of the rewards. Earlier checkpoints are "
    "kept."
)


def check_updates(skipped: int, total_steps: int) -> None:
    """Check the number of consecutive updates, up to the newest, that were skipped for a gradient that is not finite.

    Raises:
        TrainingDiverged: there are MAX_SKIPPED, or all of a shorter job.
    """
    if skipped >= min(MAX_SKIPPED, total_steps):
        raise TrainingDiverged(
            f"In {skipped} steps in a row the gradient was not finite, so the weights did not change. {_ADVICE}"
        )


def check_loss(loss: float) -> None:
    """Raise TrainingDiverged unless the loss of the current weights is finite."""
    if not math.isfinite(loss):
        raise TrainingDiverged(f"The loss of the model is {loss}. {_ADVICE}")


def check_answers(rollouts: Iterable[Rollout]) -> None:
    """Raise TrainingDiverged if an answer was sampled by probabilities that are not numbers."""
    if any(math.isnan(logprob) for rollout in rollouts for logprob in rollout.sampled_logprobs):
        raise TrainingDiverged(f"The model's probabilities of its answers are not numbers. {_ADVICE}")
