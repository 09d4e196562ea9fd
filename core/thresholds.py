"""Thresholds of the warnings of a run (REGRAFT_WARNINGS); worker/recording/monitors.py has the rules."""

from pydantic import BaseModel, ConfigDict, Field


class Thresholds(BaseModel):
    """One threshold per warning (docs/howto/signal.md). None disables the warning."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Collapse: the entropy of the sampled answers falls below this fraction of its value in step 1.
    entropy_share: float | None = Field(default=0.1, ge=0, le=1)
    # Below base: the whole 95 % interval of the difference to the base is below the negative of this.
    below_base: float | None = Field(default=0.0, ge=0)
    # Overfitting: training minus validation reward exceeds this, and the standard error does not explain it.
    overfitting: float | None = Field(default=0.1, ge=0)
    # KL jump: in two consecutive steps `kl` exceeds the median of the five before by this, in nats per token, and the
    # training reward is lower than in those five.
    kl_jump: float | None = Field(default=1.0, ge=0)
    # Truncation: in five consecutive steps more than this share of the answers is cut off at max_completion_tokens.
    truncated_share: float | None = Field(default=0.2, ge=0, le=1)
    # Length inflation: answers are longer than in step 1 by this factor.
    length_factor: float | None = Field(default=3.0, ge=1)
    # Shadow divergence: validation has risen by the training grader, and fallen by more than this by the shadow grader.
    shadow_divergence: float | None = Field(default=0.05, ge=0)
    # Shadow unshared: the shadow grader's gain is below half of the training grader's by more than this.
    shadow_unshared: float | None = Field(default=0.05, ge=0)
    # Shadow ungraded: more than this share of the validation answers has no shadow score.
    shadow_ungraded: float | None = Field(default=0.5, ge=0, le=1)
    # Judge drift: the same answers have other scores than at the start, by more than this.
    judge_drift: float | None = Field(default=0.05, ge=0)
    # One-sided gain: a part of the grader has gained by this, and another has lost.
    part_gain: float | None = Field(default=0.1, ge=0)
    # Length is rewarded: answers are 1.5 times as long as in step 1, and this is exceeded by the correlation of length
    # and score.
    length_reward: float | None = Field(default=0.5, ge=0, le=1)
    # Copied prompts: the share of answers that are copies of their prompt has risen by this.
    copied_prompt: float | None = Field(default=0.3, ge=0, le=1)
    # Repetition: the share of repeated runs of tokens has risen by this.
    repetition: float | None = Field(default=0.3, ge=0, le=1)
    # Template collapse: the share of pairs of answers to different prompts that are the same has risen by this.
    template_collapse: float | None = Field(default=0.8, ge=0, le=1)
    # Language mix: the share of answers with scripts that are not expected has risen by this.
    language_mix: float | None = Field(default=0.3, ge=0, le=1)
    # Validation falls: it is lower than its best by this, by more than chance, while training reward has risen.
    validation_fall: float | None = Field(default=0.0, ge=0)
    # Inert part: a part of the grader gave all answers of this many first steps the same score.
    inert_steps: int | None = Field(default=3, ge=1, le=10)
