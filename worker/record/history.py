"""Metrics of recorded steps that rules read, cached for one attempt.

It is read from the database once for each attempt and then kept up to date in memory, so that no step reads the
metrics of the steps before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from worker.record.verdict import RowScores

Step = Mapping[str, Any]
Steps = Sequence[Step]
"""The metrics of steps 0, 1, ... in order. What was not measured is absent or None."""

# The metrics that rules read (worker/record/stopping.py, worker/record/monitors.py); the rest of a step is several
# kilobytes.
READ = (
    "step",
    "train_mean_reward",
    "full_valid_mean_reward",
    "full_valid_stderr",
    "full_valid_difference",
    "full_valid_difference_low",
    "full_valid_difference_high",
    "groups_mixed_share",
    "mean_unresponsive_rewards",
    "sampling_entropy",
    "entropy",
    "kl",
    "truncated_share",
    "completion_tokens_mean",
    "valid_truncated_share",
    "valid_completion_tokens_mean",
)


@dataclass
class History:
    """The steps so far. `base_scores` are the row scores of step 0, None before it or if they were not recorded."""

    steps: list[Step] = field(default_factory=list)
    base_scores: RowScores | None = None
    warned: set[str] = field(default_factory=set)  # the rules that have warned in this job

    @classmethod
    def of(
        cls, recorded: Iterable[Step], base_scores: RowScores | None = None, warned: Iterable[str] = ()
    ) -> "History":
        """What an attempt starts with."""
        return cls([reduced(step) for step in recorded], base_scores, set(warned))

    def add(self, step: Step, warned: Iterable[str] = ()) -> None:
        """One more recorded step, and the rules that warned in it."""
        self.steps.append(reduced(step))
        self.warned.update(warned)


def reduced(step: Step) -> Step:
    """The step's numbers that rules read."""
    return {name: step[name] for name in READ if step.get(name) is not None}


def first(steps: Steps, name: str) -> tuple[int, float] | None:
    """The first measurement of a metric, with its step."""
    return next(((step["step"], step[name]) for step in steps if step.get(name) is not None), None)


def last(steps: Steps, name: str, count: int) -> list[float]:
    """The newest `count` measurements of a metric, newest first."""
    return list(islice((step[name] for step in reversed(steps) if step.get(name) is not None), count))
