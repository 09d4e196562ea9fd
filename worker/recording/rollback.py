"""Return a job to its last healthy checkpoint, once, with a lower learning rate. Pure functions.

After a collapse every job is returned, and after an alarm those with `on_alarm` "rollback".
"""

from collections.abc import Callable, Iterable

from core.jobs.alarm_sizes import ALARMS
from core.jobs.hyperparameters import Resolved
from core.thresholds import Thresholds
from worker.history import History, Steps
from worker.recording import monitors
from worker.types import Rollback

RULE = "rollback"  # after a collapse, in the event, which is never superseded: a job has at most one
ALARM_RULE = "alarm_rollback"  # after an alarm, so that a collapse can still be rolled back
# A judge that drifts is no fault of the model, and an earlier checkpoint does not mend it.
ROLLS_BACK = tuple(rule for rule in ALARMS if rule != "judge_drift")
RATE = 1 / 3  # of the learning rate that collapsed
ALARM_RATE = 1 / 2  # of the one at which an alarm fired


def rollback(
    history: History, saved: Callable[[], Iterable[int]], settings: Resolved, thresholds: Thresholds
) -> Rollback | None:
    """Return how the job continues after its newest step, if its model has certainly collapsed in it, or by an alarm.

    After a collapse, a checkpoint is healthy if the metrics have no evidence of damage to its model, or if its
    validation is above that of step 0 by more than chance. After an alarm, no alarm holds at the step of a healthy one.

    Args:
        saved: returns the steps of the checkpoints; called only if the job is returned.

    Returns:
        None: there is no reason, the job was rolled back before, or no step is left.
    """
    steps = history.steps
    now = steps[-1].step
    is_alarming = settings.on_alarm == "rollback" and ALARM_RULE not in history.warned
    is_collapsing = settings.rollback and RULE not in history.warned
    if now >= settings.total_steps or not (is_alarming or is_collapsing):
        return None
    rules = monitors.only("collapse", *ROLLS_BACK)
    found = {finding.rule: finding for finding in monitors.check(steps, thresholds, rules=rules)}

    def newest(is_healthy: Callable[[Steps, int, Thresholds], bool]) -> int:
        before = (step for step in sorted(saved(), reverse=True) if step < now)
        return next((step for step in before if is_healthy(steps, step, thresholds)), 0)

    if is_collapsing and "collapse" in found and monitors.is_lost(steps, settings.batch_size):
        collapse = found["collapse"]
        evidence = collapse.message.removesuffix(" Lower the learning rate.")
        number = collapse.data.get
        data = {
            "collapsed_at_step": now,
            "train_mean_reward": number("train_mean_reward"),
            "first_train_mean_reward": number("first_train_mean_reward"),
            "sampling_entropy": number("sampling_entropy"),
            "first_sampling_entropy": number("first_sampling_entropy"),
        }
        return Rollback(newest(_is_healthy), "a third", _rates(settings, RATE), evidence, data, RULE)
    alarm = next((one for rule, one in found.items() if rule in ROLLS_BACK), None)
    if alarm is None or not is_alarming:
        return None
    data = {"alarm": alarm.rule, "alarm_at_step": now}
    return Rollback(
        newest(_has_no_alarm), "half", _rates(settings, ALARM_RATE), alarm.message, data, ALARM_RULE
    )


def _rates(settings: Resolved, share: float) -> dict[str, float]:
    rates = {"learning_rate": settings.learning_rate * share}
    if settings.value_learning_rate is not None:
        rates["value_learning_rate"] = settings.value_learning_rate * share
    return rates


def _has_no_alarm(steps: Steps, step: int, thresholds: Thresholds) -> bool:
    until = [one for one in steps if one.step <= step]
    return not monitors.check(until, thresholds, rules=monitors.only(*ROLLS_BACK))


def _is_healthy(steps: Steps, step: int, thresholds: Thresholds) -> bool:
    if monitors.is_improved(steps, step):
        return True
    return not monitors.has_lost_signal(steps, step) and monitors.damage(steps, step, thresholds) is None
