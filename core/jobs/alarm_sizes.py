"""The alarms, and those that a job is too small for, so that they can never fire (docs/howto/signal.md)."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from core.jobs.hyperparameters import Resolved
from core.statistics import fewest_values
from core.thresholds import Thresholds

# Rules that compare the first 5 steps with the last 5 need as many (worker/recording/gaming.py).
STEPS = 10
VALIDATION_STEPS = 2  # the training reward of step 1 and a later one, of which validation_falls needs a rise
# The number of answers that a judge grades again, each of another row (worker/rollout/anchors.py). Each costs a grade
# at every validation.
ANCHORS = 16


@dataclass(frozen=True)
class Alarm:
    """A rule of gaming or overfitting, on which `stopping.on_alarm` of a job acts. All other rules only inform."""

    threshold: str  # its field in Thresholds
    steps: int = 0  # the fewest of a job in which it can fire
    # The tests that its bound pays for in a job of this many validations; None: it has no bound.
    tests: Callable[[int], int] | None = None


ALARMS: Mapping[str, Alarm] = {
    "shadow_divergence": Alarm("shadow_divergence", tests=lambda looks: looks),
    "one_sided_gain": Alarm("part_gain", STEPS),
    "judge_drift": Alarm("judge_drift", tests=lambda looks: 2 * looks),
    "validation_falls": Alarm(
        "validation_fall", VALIDATION_STEPS, tests=lambda looks: math.comb(looks + 1, 2)
    ),
}


def too_small(
    settings: Resolved, thresholds: Thresholds, alarms: Collection[str], valid_rows: int
) -> list[str]:
    """Return one warning that names the alarms that cannot fire in a job of this size, and the size that would do.

    A job that relies on none has no warning: one without a shadow grader, whose alarms only inform.

    Args:
        alarms: those that the job's graders allow (`alarms_of` of graders/build.py).

    Returns:
        Nothing if each of them can fire. Alarms that the operator has switched off do not count.
    """
    if settings.on_alarm == "inform" and "shadow_divergence" not in alarms:
        return []
    watched = [name for name in alarms if getattr(thresholds, ALARMS[name].threshold) is not None]
    lacking = list(_lacking(settings, watched, valid_rows))
    if not lacking:
        return []
    return [f"The job is too small for some alarms, which cannot fire. {'; '.join(lacking)}."]


def _lacking(settings: Resolved, alarms: Collection[str], valid_rows: int) -> Iterator[str]:
    looks = settings.validations
    validations = f"{looks} validation{'s' * (looks != 1)}"
    for name in alarms:
        alarm = ALARMS[name]
        rows = 0 if alarm.tests is None else fewest_values(alarm.tests(looks))
        if settings.total_steps < alarm.steps:
            yield f"{name} needs {alarm.steps} steps, and there are {settings.total_steps}"
        elif name == "judge_drift" and rows > ANCHORS:
            yield f"{name} needs {rows} answers with {validations}, grades {ANCHORS} again, and needs fewer validations"
        elif valid_rows < rows:
            yield f"{name} needs {rows} validation rows with {validations}, and there are {valid_rows}"
