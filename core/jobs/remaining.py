"""The steps that a run still has before it, from which its duration is estimated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RemainingSteps:
    """The remaining steps of a run, by kind."""

    plain: int
    validated: int
    next_is_validated: bool

    @property
    def steps(self) -> int:
        return self.plain + self.validated
