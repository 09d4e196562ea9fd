"""Early stopping: pure functions of the recorded steps.

They read only the metrics of the steps, so a resumed run decides the same, and users can verify the decision.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

from core.jobs.hyperparameters import Resolved
from core.step_metrics import StepMetrics
from worker.history import Steps, last
from worker.types import Stop


def in_a_row(steps: Steps, holds: Callable[[StepMetrics], bool]) -> int:
    """Return the number of consecutive last steps for which it holds."""
    return sum(1 for _ in takewhile(holds, reversed(steps)))


def skipped_updates(steps: Steps) -> int:
    """Return the number of consecutive last steps whose gradient was not finite."""
    return in_a_row(steps, lambda one: one.skipped_updates == 1)


def rejected_updates(steps: Steps) -> int:
    """Return the number of consecutive last steps all of whose updates the step trust region has rejected."""
    return in_a_row(
        steps, lambda one: bool(one.rejected_updates) and one.update_kl is None and not one.unmeasured_updates
    )


def reason_to_stop(steps: Steps, settings: Resolved) -> Stop | None:
    """Return the first reason to stop after the last of `steps`, or None. A bound of 0 is off."""
    checks: list[tuple[Callable[[Steps, Any], Stop | None], float]] = [
        (_plateau, settings.stop_after_flat_evals),
        (_no_signal, settings.stop_after_silent_steps),
        (_kl, settings.stop_above_kl),
        (_entropy, settings.stop_below_entropy),
    ]
    for check, bound in checks:
        if bound and (stop := check(steps, bound)) is not None:
            return stop
    return None


def _plateau(steps: Steps, evals: int) -> Stop | None:
    """Stop if no validation among the last `evals` improved on the best before them. Reads all validations."""
    if steps[-1].full_valid_mean_reward is None:
        return None
    rewards = [
        (step.step, step.full_valid_mean_reward) for step in steps if step.full_valid_mean_reward is not None
    ]
    if len(rewards) <= evals:
        return None
    best_step, best = max(rewards[:-evals], key=lambda one: one[1])
    if any(reward > best for _, reward in rewards[-evals:]):
        return None
    return Stop(
        f"Stopped early: validation reward has not risen above {best:.3f} (step {best_step}) in {evals} "
        "validations.",
        {"best_step": best_step, "best_reward": best, "since": dict(rewards[-evals:])},
    )


def _no_signal(steps: Steps, most: int) -> Stop | None:
    """Stop if all groups of the last `most` steps were zero-variance groups, resampled ones included."""
    had_signal = last(steps, "has_signal", most)
    if len(had_signal) < most or any(had_signal):
        return None
    return Stop(
        f"Stopped early: no group of the last {most} steps had answers that differed in score, so there is nothing "
        "left to learn from these prompts and this grader.",
        {"steps_without_signal": most, "train_mean_reward": steps[-1].train_mean_reward},
    )


def _kl(steps: Steps, bound: float) -> Stop | None:
    kl = steps[-1].kl
    if kl is None or kl <= bound:
        return None
    return Stop(
        f"Stopped early: the policy is {kl:.3g} nats a token from its reference, beyond the bound of {bound:g}.",
        {"kl": kl, "bound": bound},
    )


def _entropy(steps: Steps, bound: float) -> Stop | None:
    entropy = steps[-1].entropy
    if entropy is None or entropy >= bound:
        return None
    return Stop(
        f"Stopped early: the policy's entropy is {entropy:.3g} nats a token, below the bound of {bound:g}: it "
        "has almost stopped exploring.",
        {"entropy": entropy, "bound": bound},
    )
