"""Thresholds of the warnings of a run, which the operator sets (REGRAFT_WARNINGS); worker/monitors.py has the rules."""

from pydantic import BaseModel, ConfigDict, Field


class Thresholds(BaseModel):
    """One for each warning (docs/training.md, "Warnings"). None switches the warning off."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Collapse: the entropy of the sampled answers falls below this share of what it was in step 1.
    entropy_share: float | None = Field(default=0.1, ge=0, le=1)
    # Below base: the whole 95 % interval of validation less base is below minus this.
    below_base: float | None = Field(default=0.0, ge=0)
    # Overfitting: training less validation reward is above this, by more than the standard error explains.
    overfitting: float | None = Field(default=0.1, ge=0)
    # KL jump: in two steps in a row `kl` is above the median of the five before by more than this, in nats a token, and
    # the training reward is lower than in those five.
    kl_jump: float | None = Field(default=1.0, ge=0)
    # Truncation: in five steps in a row more than this share of the answers is cut off at max_completion_tokens.
    truncated_share: float | None = Field(default=0.2, ge=0, le=1)
    # Length inflation: answers are more than this many times as long as in step 1.
    length_factor: float | None = Field(default=3.0, ge=1)
