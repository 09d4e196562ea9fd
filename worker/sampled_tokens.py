"""Count the sampled tokens that no step has learned from: batches sampled ahead, and steps that were not recorded."""

from dataclasses import dataclass


@dataclass
class SampledTokens:
    """Of the answers of one attempt that are for learning. `pending`: of those that no recorded step has had yet."""

    pending: int = 0

    def add(self, tokens: int) -> None:
        """Count an answer when it is sampled."""
        self.pending += tokens

    def take(self, tokens: int) -> None:
        """Count tokens of a recorded step, or those that are recorded as unused."""
        self.pending = max(0, self.pending - tokens)
