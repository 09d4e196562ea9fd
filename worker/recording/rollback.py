"""Return a collapsed job to its last healthy checkpoint, once, with a lower learning rate. Pure functions."""

from collections.abc import Callable, Iterable

from core.jobs.hyperparameters import Resolved
from core.thresholds import Thresholds
from worker.history import History, Steps
from worker.recording import monitors
from worker.types import Rollback

RULE = "rollback"  # in the event, which is never superseded: a job has at most one
RATE = 1 / 3  # of the learning rate that collapsed


def rollback(
    history: History, saved: Callable[[], Iterable[int]], settings: Resolved, thresholds: Thresholds
) -> Rollback | None:
    """Return how the job continues after its newest step, if its model has certainly collapsed in it.

    A checkpoint is healthy if the metrics have no evidence of damage to its model, or if its validation is above that
    of step 0 by more than chance.

    Args:
        saved: returns the steps of the checkpoints; called only after a collapse.

    Returns:
        None: the model has not collapsed, the job was rolled back before or has `rollback` off, or no step is left.
    """
    steps = history.steps
    now = steps[-1].step
    if not settings.rollback or RULE in history.warned or now >= settings.total_steps:
        return None
    found = {finding.rule: finding for finding in monitors.check(steps, thresholds)}
    if "collapse" not in found or not monitors.is_lost(steps):
        return None
    healthy = (step for step in sorted(saved(), reverse=True) if step < now)
    target = next((step for step in healthy if _is_healthy(steps, step, thresholds)), 0)
    learning_rates = {"learning_rate": settings.learning_rate * RATE}
    if settings.value_learning_rate is not None:
        learning_rates["value_learning_rate"] = settings.value_learning_rate * RATE
    collapse = found["collapse"]
    return Rollback(
        target, now, learning_rates, collapse.message.removesuffix(" Lower the learning rate."), collapse.data
    )


def _is_healthy(steps: Steps, step: int, thresholds: Thresholds) -> bool:
    return monitors.is_improved(steps, step) or monitors.damage(steps, step, thresholds) is None
