"""Fail a run whose model or gradients are no longer numbers: no later step repairs the weights."""

import math
from collections.abc import Iterable

from worker.history import Steps
from worker.recording import stopping
from worker.refusals import TrainingDiverged
from worker.types import Rollout

# Consecutive steps without an update, for one reason, after which the job fails. A single one may be due to its batch.
MAX_SKIPPED = 3

_ADVICE = (
    "No later step repairs that. Lower learning_rate_multiplier, or the scale of the rewards. Earlier checkpoints are "
    "kept."
)


def check_updates(steps: Steps, total_steps: int) -> None:
    """Check that the newest steps have not all left the weights as they were.

    Raises:
        TrainingDiverged: MAX_SKIPPED in a row, or all of a shorter job, had a gradient that is not finite, or updates
            that the step trust region has rejected.
    """
    most = min(MAX_SKIPPED, total_steps)
    if (rejected := stopping.rejected_updates(steps)) >= most:
        raise TrainingDiverged(
            f"In {rejected} steps in a row every update moved the policy by more than twice step_kl at each of its "
            f"rates, so the weights did not change. {_ADVICE}"
        )
    if (skipped := stopping.skipped_updates(steps)) >= most:
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
