"""Metrics of recorded steps that rules read, cached for one attempt.

It is read from the database once for each attempt and then kept up to date in memory, so that no step reads the
metrics of the steps before it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from core.step_metrics import StepMetrics
from worker.types import RowScores

Steps = Sequence[StepMetrics]
"""The metrics of steps 0, 1, ... in order. Those by grader: only the scores, and only of the first and last steps."""

# A rule reads the scores by grader of steps up to this one (Thresholds.inert_steps).
FIRST_STEPS = 10
RECENT = 5  # and of as many last steps


@dataclass
class History:
    """The steps so far. `base_scores` are the row scores of step 0, None before it or if they were not recorded;
    `base_shadow_scores` those by the shadow grader, None without one; `best_scores` those of the best validation.
    """

    steps: list[StepMetrics] = field(default_factory=list)
    base_scores: RowScores | None = None
    warned: set[str] = field(default_factory=set)  # the rules that have warned in this job
    base_shadow_scores: RowScores | None = None
    best_scores: RowScores | None = None

    @classmethod
    def of(
        cls,
        recorded: Iterable[StepMetrics],
        base_scores: RowScores | None = None,
        warned: Iterable[str] = (),
        base_shadow_scores: RowScores | None = None,
        best_scores: RowScores | None = None,
    ) -> "History":
        """What an attempt starts with."""
        history = cls(
            base_scores=base_scores,
            warned=set(warned),
            base_shadow_scores=base_shadow_scores,
            best_scores=best_scores,
        )
        for step in recorded:
            history.add(step)
        return history

    def add(self, step: StepMetrics, warned: Iterable[str] = ()) -> None:
        """One more recorded step, and the rules that warned in it."""
        self.steps.append(_with_scores(step))
        if len(self.steps) > RECENT and (old := self.steps[-RECENT - 1]).step > FIRST_STEPS:
            self.steps[-RECENT - 1] = old.without_sections()
        self.warned.update(warned)

    def keep_scores(self, step: int, valid_scores: RowScores | None, shadow_scores: RowScores | None) -> None:
        """Keep the row scores of the newest step, if it is step 0 or has the best validation."""
        if step == 0:
            self.base_scores, self.base_shadow_scores = valid_scores, shadow_scores
        if valid_scores is not None and best_validation(self.steps) == step:
            self.best_scores = valid_scores

    def with_newest(self, step: StepMetrics) -> list[StepMetrics]:
        """The steps so far and this one, as rules read them."""
        return [*self.steps, _with_scores(step)]


def _with_scores(step: StepMetrics) -> StepMetrics:
    return step.without_sections().model_copy(update={"scores": step.scores})


def first(steps: Steps, name: str) -> tuple[int, float] | None:
    """The first measurement of a metric, with its step."""
    return next(((step.step, value) for step in steps if (value := getattr(step, name)) is not None), None)


def last(steps: Steps, name: str, count: int) -> list[float]:
    """The newest `count` measurements of a metric, newest first."""
    return list(
        islice((value for step in reversed(steps) if (value := getattr(step, name)) is not None), count)
    )


def best_validation(steps: Steps) -> int | None:
    """The step with the highest validation reward, the first of equal ones; None: there is no validation."""
    validated = [
        (one.full_valid_mean_reward, -one.step) for one in steps if one.full_valid_mean_reward is not None
    ]
    return -max(validated)[1] if validated else None


def reward_unit(steps: Steps) -> float:
    """The unit of falls of the training reward: its mean at the start.

    Scores of reward models have no bounds, and a mean near 0 is no unit. Scores from 0 to 1 have a variance of at most
    mean (1 - mean) (Bhatia and Davis 2000); for those with more, the unit is at least their standard deviation.
    """
    mean, std = first(steps, "train_mean_reward"), first(steps, "train_reward_std")
    if mean is None:
        return 0.0
    unbounded = std is not None and std[1] ** 2 > mean[1] * (1 - mean[1]) + 1e-9
    return max(abs(mean[1]), std[1]) if std is not None and unbounded else abs(mean[1])
