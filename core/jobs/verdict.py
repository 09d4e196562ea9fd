"""The verdict on a finished job: whether the delivered model is better than its base, with the numbers.

worker/recording/verdict.py computes it; it is stored in Job.verdict as JSON.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

# Of a job whose two files are one, which OpenAI accepts as well.
NOT_HELD_OUT = "The validation file is the training file, so validation proves nothing about new prompts."
Outcome = Literal["improved", "no_difference", "worse", "too_few"]


@dataclass(frozen=True)
class Verdict:
    """The delivered checkpoint against the model that the job started from, on the same validation rows, paired by row.

    `improved` means that the whole 95 % interval of the mean difference is above 0, `worse` that it is below 0,
    `no_difference` that it includes 0, and `too_few` that there are too few rows for one. A model with a clearly lower
    mean and damage in the run is also `worse`, on that `ground`. The rewards are means over the compared rows.
    """

    outcome: Outcome
    base_reward: float
    tuned_reward: float
    difference: float  # tuned minus base
    ci_low: float | None  # None: too few rows for an interval (worker/recording/verdict.py, MIN_ROWS)
    ci_high: float | None
    wins: int  # rows on which the delivered model scored higher
    losses: int
    ties: int
    rows: int  # compared rows: wins + losses + ties
    ungraded: int  # rows excluded because one of the two has no graded answer
    step: int  # of the delivered checkpoint
    # The damage (worker/recording/monitors.py) that makes it `worse`; None: decided by the interval alone.
    ground: str | None = None
    # The tuned model that the job trained further and that is compared here; None: the base model.
    start: str | None = None
    # Whether the validation rows are not those that the job trains on.
    held_out: bool = True
    # The same difference by the shadow grader, with its interval; None: there is none, or too few rows.
    shadow_difference: float | None = None
    shadow_ci_low: float | None = None
    shadow_ci_high: float | None = None

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> "Verdict":
        """Read the value of Job.verdict."""
        return cls(**stored)

    def to_row(self) -> dict[str, Any]:
        """The value of Job.verdict, which the API returns as it is."""
        return asdict(self)

    @property
    def below_base(self) -> bool:
        """Whether the delivered model's mean reward is lower than at the start by any amount."""
        return self.difference < 0

    def sentence(self) -> str:
        """The numbers as one sentence, for the job's event and the model card."""
        if self.ci_low is None or self.ci_high is None:
            interval = "too few rows for a 95 % interval"
        else:
            interval = f"95 % interval {self.ci_low:.2f} to {self.ci_high:.2f}"
        left_out = f" ({self.ungraded} more could not be graded)" if self.ungraded else ""
        return (
            f"Compared with {self.start or 'the base model'} on {counted(self.rows, 'validation row')}{left_out}: "
            f"{self.base_reward:.2f} -> {self.tuned_reward:.2f}, difference {self.difference:+.2f} ({interval}), "
            f"{counted(self.wins, 'win')}, {counted(self.losses, 'loss', 'losses')}, "
            f"{counted(self.ties, 'tie')}: {self._conclusion()}.{'' if self.held_out else f' {NOT_HELD_OUT}'}"
            f"{self._by_shadow()}"
        )

    def _by_shadow(self) -> str:
        if self.shadow_difference is None:
            return ""
        if self.shadow_ci_low is None or self.shadow_ci_high is None:
            return f" By the shadow grader the difference is {self.shadow_difference:+.2f}."
        seen = ""
        if self.outcome == "improved":
            seen = ", which confirms it" if self.shadow_ci_low > 0 else ", which does not confirm it"
        return (
            f" By the shadow grader the difference is {self.shadow_difference:+.2f} "
            f"(95 % interval {self.shadow_ci_low:.2f} to {self.shadow_ci_high:.2f}){seen}."
        )

    def _conclusion(self) -> str:
        if self.ground is not None:
            return f"worse, for it is lower and the run shows damage ({self.ground.replace('_', ' ')})"
        if self.outcome == "too_few":
            return "too few rows to tell"
        if self.outcome == "no_difference" and self.below_base:
            return "not significantly different"
        return self.outcome.replace("_", " ")


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """counted(1, "row") is "1 row", counted(2, "row") is "2 rows"."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
