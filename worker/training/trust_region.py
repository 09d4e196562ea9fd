"""Bound how far one optimizer step moves the policy: a trust region with backtracking.

After a step, KL(before || after) is measured on answers to a few of its prompts (worker/training/loss.py). A step that
went too far is undone, with the optimizer's moments, and taken again along the same gradient with a lower rate. The
idea is the line search of TRPO (arXiv 1502.05477, appendix C): to second order the KL grows with the square of the
rate, so one repetition usually suffices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from worker.training.gradient import Gradient
from worker.training.loss import KlSum, Loss
from worker.training.trainable_weights import TrainedState

TOLERANCE = 2.0  # an update is accepted up to this multiple of the target
RETRIES = 3
GROWTH = 1.25  # of the rate, after each accepted update
LEAST_FACTOR = 0.1  # by which one retry lowers the rate at most
LEAST_RATE = 0.01  # with which a step begins, after updates that were rejected


def is_accepted(kl: float, target: float) -> bool:
    """Whether a step of this KL is within the trust region. One that is not a number is not."""
    return kl <= TOLERANCE * target


def factor(kl: float, target: float) -> float:
    """Return what the rate is multiplied by for a step of KL `target`, after one of `kl`: sqrt(target / kl)."""
    return max(LEAST_FACTOR, math.sqrt(target / kl)) if math.isfinite(kl) else LEAST_FACTOR


def grown(rate: float) -> float:
    """Return the rate after an accepted step: it returns to 1, the learning rate of the schedule."""
    return min(1.0, rate * GROWTH)


@dataclass(frozen=True)
class StepTaken:
    """One update of the weights, or none."""

    norm: float | None  # of the gradient before clipping; None: it is not finite, and nothing changed
    learning_rate: float | None = None  # of the last try
    kl: float | None = None  # KL(before || after) in nats a token; None: not measured, or rejected
    retries: int = 0
    is_rejected: bool = False  # nothing changed
    is_unmeasured: bool = False  # memory ran out in between, so it was accepted as it was


class TrustRegion:
    """Takes the steps of a job. `rate`: the share of the scheduled learning rate with which the next one begins."""

    def __init__(self, target: float) -> None:
        """`target`: the KL of a step, in nats a token. 0: every step is accepted, and none is measured."""
        self.target = target
        self.rate = 1.0

    def step(
        self, trained: TrainedState, divisor: float, steps_taken: int, measure: Callable[[], float | None]
    ) -> StepTaken:
        """Divide the gradient, clip its norm and take a step. Clears the gradient.

        Args:
            measure: returns KL(before || after) of the step that was just taken; None: it is not known.
        """
        norm = trained.prepare(divisor)
        if norm is None:
            return StepTaken(None)
        update = self._tried(trained, norm, steps_taken, measure)
        trained.clear()
        return update

    def measured_step(
        self, gradient: Gradient, trained: TrainedState, divisor: float, steps_taken: int, part: int = 0
    ) -> StepTaken:
        """Take a step along the collected gradient of a mini-batch, and measure it on the packs that it has kept."""
        if self.target:
            gradient.of_micro_batches(Loss.before_step, part)
        return self.step(
            trained, divisor, steps_taken, lambda: KlSum.mean(gradient.of_updated(Loss.update_kl))
        )

    def _tried(
        self, trained: TrainedState, norm: float, steps_taken: int, measure: Callable[[], float | None]
    ) -> StepTaken:
        if not self.target:
            return StepTaken(norm, trained.descend(steps_taken, 1.0))
        trained.keep()
        rate, lowered = self.rate, self.rate
        for retries in range(RETRIES + 1):
            rate = lowered
            learning_rate = trained.descend(steps_taken, rate)
            kl = measure()
            if kl is None:
                return StepTaken(norm, learning_rate, None, retries, is_unmeasured=True)
            if is_accepted(kl, self.target):
                self.rate = grown(rate)
                return StepTaken(norm, learning_rate, kl, retries)
            trained.restore()
            lowered = rate * factor(kl, self.target)
        self.rate = max(rate, LEAST_RATE)
        return StepTaken(norm, learning_rate, None, RETRIES, is_rejected=True)


def step_metrics(updates: Sequence[StepTaken]) -> dict[str, Any]:
    """Return the metrics of the updates of one step; none where the weights took none."""
    steps = [one for one in updates if one.learning_rate is not None]
    if not steps:
        return {}
    return {
        "learning_rate": steps[-1].learning_rate,
        "update_kl": max((one.kl for one in steps if one.kl is not None), default=None),
        "update_retries": sum(one.retries for one in steps),
        "rejected_updates": sum(one.is_rejected for one in steps),
        "unmeasured_updates": sum(one.is_unmeasured for one in steps),
    }


STEP_METRICS = tuple(step_metrics([StepTaken(0.0, 0.0)]))
