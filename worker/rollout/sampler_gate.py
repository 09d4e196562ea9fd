"""Refuse a step if the sampler's probabilities differ too much from the trainer's."""

from dataclasses import dataclass
from typing import Literal

from worker.refusals import SamplerMismatch

# Mean |difference| of log-probabilities in nats a token. Measured on agreeing engines: 0.005 to 0.009 in bfloat16
# with vLLM against this trainer, below 1e-4 in float32. An attention window, a sink or an adapter that one
# of the two leaves out gives 0.2 and more.
BOUNDS = {"bfloat16": 0.05, "float32": 1e-3}


@dataclass(frozen=True)
class SamplerGap:
    """Between the log-probabilities of the sampler and those of the trainer, in nats a token."""

    mean: float  # of |difference|
    largest: float
    tokens: int  # that were compared


@dataclass(frozen=True)
class SamplerGate:
    """Refuses a step whose answers were not sampled by the policy that trains on them."""

    bound: float
    sampler: str  # with its version, for the message
    precision: str

    @staticmethod
    def of(setting: float | Literal["auto"], *, sampler: str, precision: str) -> "SamplerGate | None":
        """Create from REGRAFT_MAX_LOGPROB_GAP; None if it is off."""
        bound = BOUNDS[precision] if setting == "auto" else setting
        return SamplerGate(bound, sampler, precision) if bound else None

    def check(self, gap: SamplerGap) -> None:
        """Check the gap of a step.

        Ignores a NaN mean, which the check for non-finite gradients handles.

        Raises:
            SamplerMismatch: the mean exceeds the bound.
        """
        if gap.mean > self.bound:
            raise SamplerMismatch(
                f"The sampler ({self.sampler}) and the trainer disagree about the same {gap.tokens} sampled tokens: "
                f"their log-probabilities differ by {gap.mean:.3g} nats a token on average and {gap.largest:.3g} at "
                f"most, and {self.bound:g} on average is allowed in {self.precision} (REGRAFT_MAX_LOGPROB_GAP). The "
                "step was not taken. The sampler may compute this architecture differently, or may not have the "
                "same weights."
            )
