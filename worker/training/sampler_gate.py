"""Refuse a step if the sampler's probabilities differ too much from the trainer's."""

from dataclasses import dataclass, replace
from typing import Literal

Architecture = Literal["dense", "mixture"]

# Mean |difference| of log-probabilities in nats a token. Measured on agreeing engines with dense models: 0.005 to 0.009
# in bfloat16 with vLLM against this trainer, below 1e-4 in float32. An attention window, a sink or an adapter that one
# of the two leaves out gives 0.2 and more. A mixture of experts has more, because a rounding may choose another expert:
# 0.02 to 0.06 in bfloat16 elsewhere.
BOUNDS: dict[tuple[str, Architecture], float] = {
    ("bfloat16", "dense"): 0.05,
    ("bfloat16", "mixture"): 0.12,
    ("float32", "dense"): 1e-3,
    ("float32", "mixture"): 5e-3,
}
# The bound of a mixture depends on the model. It is this many times the gap of the first step, but not below the bound
# of dense models and not above its own.
TIMES_FIRST = 3.0


@dataclass(frozen=True)
class SamplerGap:
    """Between the log-probabilities of the sampler and those of the trainer, in nats a token."""

    mean: float  # of |difference|
    largest: float
    tokens: int  # that were compared


@dataclass(frozen=True)
class SamplerGate:
    """Finds steps whose answers were not sampled by the policy that trains on them."""

    bound: float
    sampler: str  # with its version, for the message
    precision: str
    architecture: Architecture = "dense"
    quantization: str = ""  # the format of the weights, if the sampler quantizes activations with it
    least: float | None = None  # the first step may lower the bound to this; None: the bound is fixed

    @staticmethod
    def of(
        setting: float | Literal["auto"],
        *,
        sampler: str,
        precision: str,
        architecture: Architecture = "dense",
        quantization: str = "",
    ) -> "SamplerGate | None":
        """Create from REGRAFT_MAX_LOGPROB_GAP; None if it is off."""
        if setting == "auto":
            bound, least = BOUNDS[precision, architecture], BOUNDS[precision, "dense"]
            return SamplerGate(bound, sampler, precision, architecture, quantization, least)
        return SamplerGate(setting, sampler, precision, architecture, quantization) if setting else None

    def measured(self, first: SamplerGap) -> "SamplerGate":
        """The gate for later steps, by the gap of the first one, which it accepts."""
        if self.least is None or not first.mean <= self.bound:
            return self
        return replace(self, bound=min(self.bound, max(self.least, TIMES_FIRST * first.mean)), least=None)

    def described(self, first: SamplerGap) -> str:
        """For the job's owner: the gap of the first step, and the bound from then on."""
        return (
            f"The log-probabilities of the sampler ({self.sampler}) and of the trainer differ by {first.mean:.3g} nats "
            f"a token in the first step. Up to {self.bound:.3g} are allowed ({self.architecture} model, "
            f"{self.precision})."
        )

    def problem(self, gap: SamplerGap) -> str | None:
        """The reason not to take a step with this gap.

        Ignores a NaN mean, which the check for non-finite gradients handles.
        """
        if not gap.mean > self.bound:
            return None
        return (
            f"The sampler ({self.sampler}) and the trainer disagree about the same {gap.tokens} sampled tokens: "
            f"their log-probabilities differ by {gap.mean:.3g} nats a token on average and {gap.largest:.3g} at "
            f"most, and {self.bound:.3g} on average is allowed for a {self.architecture} model in {self.precision} "
            f"(REGRAFT_MAX_LOGPROB_GAP).{self._cause()} The step was not taken."
        )

    def _cause(self) -> str:
        if not self.quantization:
            return ""
        return (
            f" The sampler may quantize activations with the {self.quantization} weights of this model: use the "
            'model\'s files in bfloat16, or `sampler = "transformers"` in its entry.'
        )
