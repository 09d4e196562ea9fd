"""The sums that each rank of a run computes and rank 0 adds up."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Totals:
    """Sums over the tokens of a step (and one maximum), added up micro-batch by micro-batch."""

    loss: float = 0.0
    value_loss: float = 0.0
    tokens: int = 0
    clipped: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    gap_k1: float = 0.0
    gap_k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    # Of given answers (worker/learn/offline.py).
    sequences: int = 0
    pairs: int = 0
    correct: float = (
        0.0  # tokens that the model thinks likeliest, or pairs whose preferred answer has more reward
    )
    chosen: float = 0.0  # reward of the preferred answers
    rejected: float = 0.0
    answers: int = 0  # of the loss kto
    desirable: int = 0

    @property
    def counted(self) -> int:
        """The number that a loss of given answers is divided by."""
        return self.answers or self.pairs or self.tokens

    @property
    def effective_sample_size(self) -> float:
        """Return (sum of weights)^2 / (n x sum of squares): 1 if all are equal, 1 / n if one dominates."""
        if self.ratio_squared == 0.0:  # underflow in float64
            return 0.0
        return self.ratio * (self.ratio / self.ratio_squared) / self.tokens

    def __add__(self, other: "Totals") -> "Totals":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Totals(**sums | {"gap_max": max(self.gap_max, other.gap_max)})
