"""What the server sends beyond OpenAI's types. Keys that are not named here are kept, and are attributes as well."""

from typing import Any, Literal

from openai import BaseModel
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent


class StepMetrics(BaseModel):
    """One step of a run; step 0 is the validation of the base model."""

    step: int
    total_steps: int
    train_mean_reward: float | None = None
    full_valid_mean_reward: float | None = None  # None: no validation in this step
    full_valid_stderr: float | None = None  # over the rows; None: fewer than two
    full_valid_difference: float | None = None  # to the base model, paired by row, with its 95 % interval
    full_valid_difference_low: float | None = None
    full_valid_difference_high: float | None = None
    completion_tokens_mean: float | None = None
    groups_mixed_share: float | None = None  # of all groups, those with different rewards
    timing: dict[str, Any] | None = None


class Verdict(BaseModel):
    """The delivered model against its base on the same validation rows, paired by row."""

    outcome: Literal["improved", "no_difference", "worse"]
    base_reward: float
    tuned_reward: float
    difference: float
    ci_low: float | None = None  # the 95 % interval of the difference; None: too few rows for one
    ci_high: float | None = None
    wins: int
    losses: int
    ties: int
    rows: int
    ungraded: int  # rows left out because one of the two has no graded answer
    step: int  # of the delivered checkpoint
    ground: str | None = None  # the damage for which it is worse; None: the interval alone decides

    def __str__(self) -> str:
        """`worse than the base model: 0.59 -> 0.00 (difference -0.59, 95 % interval ...)`."""
        start = {
            "improved": "better than the base model",
            "worse": "worse than the base model",
            "no_difference": "no difference to the base model"
            if self.difference >= 0
            else "not significantly different from the base model",
        }[self.outcome]
        if self.ground is not None:
            start = f"{start}, damaged ({self.ground.replace('_', ' ')})"
        interval = ""
        if self.ci_low is None or self.ci_high is None:
            if self.outcome != "worse":
                start = "too few rows to compare with the base model"
        else:
            interval = f", 95 % interval {self.ci_low:.2f} to {self.ci_high:.2f}"
        left_out = f", {self.ungraded} ungraded" if self.ungraded else ""
        return (
            f"{start}: {self.base_reward:.2f} -> {self.tuned_reward:.2f} "
            f"(difference {self.difference:+.2f}{interval}; "
            f"{_counted(self.wins, 'win', 'wins')}, {_counted(self.losses, 'loss', 'losses')}, "
            f"{_counted(self.ties, 'tie', 'ties')} in {_counted(self.rows, 'row', 'rows')}{left_out})"
        )


def _counted(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def verdict_of(job: FineTuningJob) -> Verdict | None:
    """The verdict of a job; None before its end, where nothing could be compared, and from an older server."""
    stored = getattr(job, "verdict", None)
    return None if stored is None else Verdict.construct(**stored)


class JobEvent(FineTuningJobEvent):
    """A line of a job's log, or the metrics of a step."""

    @property
    def metrics(self) -> StepMetrics | None:
        """The metrics of a step, of events of type "metrics"."""
        if self.type != "metrics" or not isinstance(self.data, dict):
            return None
        return StepMetrics.construct(**self.data)


class RolloutStep(BaseModel):
    """A step of an answer that was judged step by step; it ends before the character `end`."""

    end: int
    score: float | None = None
    advantage: float | None = None


class Rollout(BaseModel):
    """One answer and its grade. The dicts are by the parts of a multi grader, and None or empty for others."""

    id: str
    step: int
    split: str  # train | valid
    group: int  # of the step, from 0: the answers to one prompt
    member: int  # of its group
    line: int  # of the file
    messages: list[dict[str, Any]]
    item: dict[str, Any] | None = None  # what else the row of the dataset has
    output_text: str
    finish_reason: str
    prompt_tokens: int | None = None  # None: a version that did not count them wrote it
    completion_tokens: int
    score: float | None = None  # None: it could not be graded, and `reason` says why
    reason: str | None = None
    error: str | None = None  # the kind of error that kept it from being graded
    output: str | None = None  # what a python grader printed
    sub_scores: dict[str, float | None] | None = None
    sub_reasons: dict[str, str] | None = None
    sub_errors: dict[str, str] | None = None
    sub_outputs: dict[str, str] | None = None
    centred_reward: float | None = None  # the score less the mean of its group
    advantage: float | None = None  # as training took it; None: nothing was learned from this answer
    trained: bool | None = None
    replacement: bool | None = None  # drawn because another prompt of the step had no signal
    steps: list[RolloutStep] | None = None


class Estimate(BaseModel):
    """What a job would take. `estimate` is None where nothing is known yet, and `reason` says why."""

    model: str
    training_rows: int
    validation_rows: int
    total_steps: int
    n_epochs: int
    batch_size: int
    group_size: int
    estimate: dict[str, Any] | None = None
    reason: str | None = None
    warnings: list[str] = []  # what the server accepts and has no effect


class Share(BaseModel):
    """From 0 to 1, and between what it plausibly is, with 95 % confidence."""

    low: float
    expected: float
    high: float


class Signal(BaseModel):
    """The share of groups of one size whose rewards would differ, so that something is learned from them."""

    group_size: int
    share: Share
    at_least: bool  # there were fewer samples than that, so it may be more


class Spread(BaseModel):
    """Of tokens or seconds."""

    mean: float
    p90: float
    max: float


class Grading(BaseModel):
    """How the grader did; seconds are of one answer, tokens those of judges."""

    failed: int
    reasons: list[str]
    seconds: Spread
    tokens: int


class Sampling(BaseModel):
    """How fast the inference server answered."""

    seconds: float
    tokens_per_second: float


class PreviewedPrompt(BaseModel):
    """A row that was tried; a reward is None where the answer could not be graded."""

    line: int  # of the file
    tokens: int
    rewards: list[float | None]
    answer: str  # the first one


class Preview(Estimate):
    """What the base model made of a few rows of a job, beside what the job would take."""

    prompts: list[PreviewedPrompt]
    answers: int
    passed: int
    pass_threshold: float
    pass_rate: Share | None = None  # of the graded answers; None: there is none
    mean_reward: float | None = None
    signal: list[Signal]
    prompt_tokens: Spread
    completion_tokens: Spread
    cut_off: int  # answers that were as long as they may be
    grading: Grading
    sampling: Sampling
    verdict: str  # "good", "too_hard", ...: docs/preview.md has all of them
    recommendation: str


class GraderTest(BaseModel):
    """One row of a grader's test."""

    line: int
    reward: float
    expect: float | None = None
    passed: bool  # no error, and as expected where something was
    reason: str = ""  # of a python grader that raised: the whole traceback, the exception last
    errors: list[str] = []  # the flags that are up, such as "sample_parse_error"
    error_details: dict[str, str] = {}  # by flag, where the server explains it
    output: str = ""  # what python graders printed
    execution_time: float | None = None  # seconds
    sub_rewards: dict[str, float] = {}
