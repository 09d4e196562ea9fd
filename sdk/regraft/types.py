"""Types of the server beyond OpenAI's. Unknown keys are kept as attributes."""

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
    groups_mixed_share: float | None = None  # share of groups with signal
    timing: dict[str, Any] | None = None


NOT_HELD_OUT = "; the validation file is the training file, so this proves nothing about new prompts"


class Verdict(BaseModel):
    """The delivered model against its base on the same validation rows, paired by row."""

    outcome: Literal["improved", "no_difference", "worse", "too_few"]
    base_reward: float
    tuned_reward: float
    difference: float
    ci_low: float | None = None  # 95 % interval of the difference; None: too few rows
    ci_high: float | None = None
    wins: int
    losses: int
    ties: int
    rows: int
    ungraded: int  # rows excluded because one of the two has no graded answer
    step: int  # of the delivered checkpoint
    ground: str | None = None  # the damage that makes it worse; None: decided by the interval alone
    start: str | None = None  # the tuned model that the job trained further; None: the base model
    held_out: bool = True  # False: the validation file is the training file

    def __str__(self) -> str:
        """`worse than the base model: 0.59 -> 0.00 (difference -0.59, 95 % interval ...)`."""
        base = self.start or "the base model"
        finding = {
            "improved": f"better than {base}",
            "worse": f"worse than {base}",
            "no_difference": f"no difference to {base}"
            if self.difference >= 0
            else f"not significantly different from {base}",
            "too_few": f"too few rows to compare with {base}",
        }[self.outcome]
        if self.ground is not None:
            finding = f"{finding}, damaged ({self.ground.replace('_', ' ')})"
        interval = ""
        if self.ci_low is not None and self.ci_high is not None:
            interval = f", 95 % interval {self.ci_low:.2f} to {self.ci_high:.2f}"
        left_out = f", {self.ungraded} ungraded" if self.ungraded else ""
        return (
            f"{finding}: {self.base_reward:.2f} -> {self.tuned_reward:.2f} "
            f"(difference {self.difference:+.2f}{interval}; "
            f"{_counted(self.wins, 'win', 'wins')}, {_counted(self.losses, 'loss', 'losses')}, "
            f"{_counted(self.ties, 'tie', 'ties')} in {_counted(self.rows, 'row', 'rows')}{left_out})"
            f"{'' if self.held_out else NOT_HELD_OUT}"
        )


def _counted(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def verdict_of(job: FineTuningJob) -> Verdict | None:
    """The verdict of a job; None before its end, without a comparison, and from an older server."""
    stored = getattr(job, "verdict", None)
    return None if stored is None else Verdict.construct(**stored)


class JobResult(BaseModel):
    """The validation of the delivered checkpoint, beside that of the model that the job started from."""

    step: int  # of the delivered checkpoint
    metric: Literal["full_valid_mean_reward", "full_valid_loss"]
    start: float | None = None  # None: the model that the job started from was not validated
    value: float

    def __str__(self) -> str:
        """`0.40 -> 0.94 at step 18`."""
        loss = "loss " if self.metric == "full_valid_loss" else ""
        start = "" if self.start is None else f"{self.start:.2f} -> "
        return f"{loss}{start}{self.value:.2f} at step {self.step}"


def result_of(job: FineTuningJob) -> JobResult | None:
    """The result of a job; None before its end, without a validation, and from an older server."""
    stored = getattr(job, "result", None)
    return None if stored is None else JobResult.construct(**stored)


class JobEvent(FineTuningJobEvent):
    """A line of a job's log, or the metrics of a step."""

    @property
    def metrics(self) -> StepMetrics | None:
        """The metrics of a step, of events of type "metrics"."""
        if self.type != "metrics" or not isinstance(self.data, dict):
            return None
        return StepMetrics.construct(**self.data)


class RolloutStep(BaseModel):
    """A step of an answer that was judged by steps; it ends before the character `end`."""

    end: int
    score: float | None = None
    advantage: float | None = None


class Rollout(BaseModel):
    """One answer and its grade. The dicts are by part of a multi grader, and None or empty for others."""

    id: str
    step: int
    split: str  # train | valid
    group: int  # index of the prompt in the step, from 0
    member: int  # index of the answer in its group
    line: int  # line of the file
    messages: list[dict[str, Any]]
    item: dict[str, Any] | None = None  # the other fields of the dataset row
    output_text: str  # the final answer
    output_reasoning: str | None = None  # what a reasoning model wrote before it
    finish_reason: str
    prompt_tokens: int | None = None  # None: written by a version that did not count them
    completion_tokens: int
    reasoning_tokens: int | None = None  # of these; None: written by a version that did not count them
    grammar_start: int | None = None  # index of the final answer's first token
    policy_step: int | None = None  # the steps that the policy had learned from which sampled it
    score: float | None = None  # None: could not be graded; see `reason`
    reason: str | None = None
    error: str | None = None  # kind of the grading error
    output: str | None = None  # printed by a python grader
    sub_scores: dict[str, float | None] | None = None
    sub_reasons: dict[str, str] | None = None
    sub_errors: dict[str, str] | None = None
    sub_outputs: dict[str, str] | None = None
    centered_reward: float | None = None  # the score minus the mean of its group
    advantage: float | None = None  # as used in training; None: the answer was not trained on
    trained: bool | None = None
    replacement: bool | None = None  # resampled in place of a prompt without signal
    has_tokens: bool | None = None  # whether client.rollouts.tokens has the values of its tokens
    steps: list[RolloutStep] | None = None


class RolloutToken(BaseModel):
    """The values of a token, with three decimal digits."""

    text: str  # empty for all but the last token of a character
    logprob: float | None = None  # of the sampler; None: the token was not sampled
    advantage: float | None = None  # as used in training; None: not trained on
    gap: float | None = None  # log p of the trainer less that of the sampler; None: not computed


class RolloutTokens(BaseModel):
    """The tokens of an answer, its thought and stop token included."""

    rollout_id: str
    tokens: list[RolloutToken]


class Rewards(BaseModel):
    """The rewards by one formula or grader."""

    graded: int
    mean: float | None = None
    passed: int  # answers with a score of at least `pass_threshold`
    groups_with_signal: int  # groups with answers of different scores


class ComparedScores(BaseModel):
    """The stored scores of a job's answers beside others."""

    answers: int
    groups: int  # with at least two answers
    before: Rewards
    after: Rewards
    higher: int
    lower: int
    same: int
    gained: int  # answers that have a score only now
    lost: int
    now_passed: int
    now_failed: int
    changed_signs: int  # of the reward minus the mean of its group
    rank_correlation: float | None = None


class AdvantageSizes(BaseModel):
    """The absolute advantages of the graded answers."""

    mean: float | None = None
    largest: float | None = None


class WhatIf(ComparedScores):
    """Another formula over the stored scores of a multi grader's parts."""

    formula: str
    pass_threshold: float
    advantage_scale: Literal["none", "group", "batch"]
    advantages_before: AdvantageSizes
    advantages_after: AdvantageSizes


class Regrade(BaseModel):
    """Stored answers of a job scored by another grader."""

    id: str
    job_id: str
    name: str
    created_at: int
    started_at: int | None = None
    finished_at: int | None = None
    status: str  # queued | in_progress | completed | failed | canceled
    error: dict[str, Any] | None = None
    grader: dict[str, Any]
    split: str | None = None  # None: both
    step_from: int
    step_to: int
    answers: int
    graded: int  # so far, with or without a score
    usage: list[dict[str, Any]]  # tokens of judges by model
    budget: dict[str, int] | None = None
    pass_threshold: float
    comparison: ComparedScores | None = None  # once it is completed


class RegradedAnswer(BaseModel):
    """A stored answer with the job's score and the new one; `id` is that of the rollout."""

    id: str
    step: int
    split: str
    group: int
    line: int
    output_text: str
    before: float | None = None
    after: float | None = None
    changes: list[str]  # flipped, higher, lower, same, gained, lost
    reason: str | None = None
    error: str | None = None
    output: str | None = None  # printed by the new grader


class PromptHistory(BaseModel):
    """The rewards of one prompt over the steps of a job."""

    id: str  # prompt_3
    line: int  # line of the file
    text: str | None = None  # the first characters of the last message
    # By the steps whose mean reward reaches `pass_threshold`: learned (the last one, not the first), kept (both),
    # forgotten (an earlier one, not the last), stuck (none), ungraded (no answer has a score).
    outcome: Literal["learned", "kept", "forgotten", "stuck", "ungraded"]
    first_mean: float | None = None
    last_mean: float | None = None
    change: float | None = None  # last_mean - first_mean
    steps: list[int]  # steps with answers to this prompt
    mean_rewards: list[float | None]  # by step; None: all ungraded
    samples: list[int]  # the number of answers by step


class Estimate(BaseModel):
    """The estimate of a job. `estimate` is None if unknown, with the `reason`."""

    model: str
    training_rows: int
    validation_rows: int
    total_steps: int
    n_epochs: int
    batch_size: int
    group_size: int | None = None  # None: the job samples no answers
    estimate: dict[str, Any] | None = None
    reason: str | None = None
    warnings: list[str] = []  # accepted parameters without effect


class LengthBin(BaseModel):
    """Rows of at least `low` and less than `high`."""

    low: int
    high: int
    rows: int


class Lengths(BaseModel):
    """The distribution of a length over the rows of a file."""

    rows: int
    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int
    bins: list[LengthBin]


class SomeLines(BaseModel):
    """A number of rows, and the first 20 lines of them."""

    rows: int
    lines: list[int]


class TokenLengths(Lengths):
    """Tokens of the prompts; for other methods than reinforcement with the answers."""

    room: int  # the most that a row may have
    too_long: SomeLines
    not_rendered: SomeLines  # rejected by the chat template
    special_texts: SomeLines  # with the text of a special token, which is read as text


class DatasetField(BaseModel):
    """A key of the rows."""

    name: str
    rows: int
    missing: int
    types: dict[str, int]
    distinct: int | None = None  # None: more than 1000 different values
    example: str


class GraderPath(BaseModel):
    """A path that the grader reads, and the rows that lack it."""

    path: str
    missing: SomeLines


class RowDoubt(BaseModel):
    """A reason why the grader cannot tell the answers to some rows apart, as the end of a sentence "This row ..."."""

    message: str
    found: SomeLines


class GraderReads(BaseModel):
    paths: list[GraderPath]
    not_listed: bool  # a python grader or an endpoint may read other fields as well
    no_grader: SomeLines | None = None  # rows for which a select grader has no grader
    no_word: SomeLines  # rows in whose reference a text_similarity finds no word, which a job rejects
    doubts: list[RowDoubt]  # a job accepts these rows, and warns of them


class Duplicates(BaseModel):
    """Rows whose prompt occurs in an earlier row."""

    rows: int
    identical: int  # of these, rows that equal an earlier row in every field
    prompts: int
    lines: list[list[int]]


class Overlap(BaseModel):
    """Rows of the validation file whose prompt is also in the training file."""

    file: str
    rows: int
    shared: int
    lines: list[list[int]]  # pairs: a line of the validation file, and one of the training file


class DatasetProblem(BaseModel):
    line: int  # the first one
    path: str
    message: str
    more_lines: int = 0  # further lines with the same problem


class FileProfile(BaseModel):
    """Lengths, duplicates, overlap and fields of a dataset file."""

    file_id: str
    model: str | None = None
    method: str
    rows: int
    is_whole: bool  # false: only the first million rows were read
    invalid: int
    problems: list[DatasetProblem]
    foreign_format: str | None = None  # names the format of a file that no job reads, and says what to do
    characters: Lengths | None = None  # of the text of a prompt
    tokens: TokenLengths | None = None
    tokens_reason: str | None = None  # why the tokens are not counted
    duplicates: Duplicates
    overlap: Overlap | None = None
    fields: list[DatasetField]
    grader: GraderReads | None = None


class Share(BaseModel):
    """A share from 0 to 1 with its 95 % confidence interval."""

    low: float
    expected: float
    high: float


class Signal(BaseModel):
    """The share of groups of one size with different rewards, from which training can learn."""

    group_size: int
    share: Share
    at_least: bool  # the group size exceeds the number of samples, so this is a lower bound


class Spread(BaseModel):
    """A distribution of tokens or seconds."""

    mean: float
    p90: float
    max: float


class Grading(BaseModel):
    """Statistics of the grader; seconds are per answer, tokens are those of judges."""

    failed: int
    reasons: list[str]
    seconds: Spread
    tokens: int


class Sampling(BaseModel):
    """Throughput of the inference server."""

    seconds: float
    tokens_per_second: float


class PreviewedPrompt(BaseModel):
    """A sampled row; a reward is None if the answer could not be graded."""

    line: int  # line of the file
    tokens: int
    rewards: list[float | None]
    answer: str  # the first one


class PreviewProgress(BaseModel):
    """How far a preview is: of all answers, those that are sampled and graded."""

    phase: str  # loading | sampling | grading
    of: int
    sampled: int
    graded: int


class PreviewReport(Estimate):
    """The results of a job's model on a few rows, and the job's estimate."""

    prompts: list[PreviewedPrompt]
    answers: int
    passed: int
    pass_threshold: float
    pass_rate: Share | None = None  # of the graded answers; None without any
    mean_reward: float | None = None
    signal: list[Signal]
    prompt_tokens: Spread
    completion_tokens: Spread
    cut_off: int  # answers that reached the token limit
    cut_thoughts: int = 0  # of these, within the thought of a reasoning model
    grading: Grading
    sampling: Sampling
    verdict: str  # "good", "too_hard", ...; see docs/howto/preview.md
    recommendation: str


class PreviewError(BaseModel):
    """The error that ended a preview, and the status that a response with it would have."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    status: int


class Preview(BaseModel):
    """Answers of a job's model to a few rows, graded as in the job."""

    id: str
    created_at: int
    finished_at: int | None = None
    status: Literal["in_progress", "completed", "failed", "canceled"]
    request: dict[str, Any]
    answers_of: str | None = (
        None  # the earlier preview whose answers this one grades; None: it sampled its own
    )
    progress: PreviewProgress
    report: PreviewReport | None = None  # once it is completed
    error: PreviewError | None = None


class PreviewAnswer(BaseModel):
    """An answer of a preview and its grade."""

    id: str
    line: int  # line of the training file
    member: int
    output_text: str
    output_reasoning: str | None = None
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    score: float | None = None  # None: could not be graded; see `reason`
    reason: str
    sub_scores: dict[str, float | None] | None = None
    output: str | None = None  # printed by the grader
    item: dict[str, Any]  # the dataset row


class GraderTest(BaseModel):
    """The result of one test case of a grader."""

    line: int
    reward: float
    expect: float | None = None
    passed: bool  # no error, and the expected reward if given
    reason: str = ""  # for a python grader that raised: the whole traceback, the exception last
    errors: list[str] = []  # the set flags, such as "sample_parse_error"
    error_details: dict[str, str] = {}  # by flag, if the server explains it
    output: str = ""  # printed by python graders
    execution_time: float | None = None  # seconds
    sub_rewards: dict[str, float] = {}


class Alias(BaseModel):
    """A name that a project gives to a model."""

    id: str
    name: str
    model: str  # which answers
    previous_model: str | None = None  # which a rollback restores
    created_at: int
    updated_at: int  # when it was last pointed at another model
    hidden: bool = False  # whether a model of the registry has the name, and answers in its place


class AliasChange(BaseModel):
    """A change of an alias."""

    id: str
    name: str
    previous_model: str | None = None  # None: the alias was created
    model: str | None = None  # which answered from then on; None: the alias was deleted
    changed_at: int
    changed_by: str  # the id of an API key or a login, or "operator"


class StoredGrader(BaseModel):
    """A named grader with its current version."""

    id: str
    name: str
    created_at: int
    updated_at: int
    version: str  # SHA-256 of the specification
    versions: int
    cases: int  # golden cases
    grader: dict[str, Any]  # header values are masked


class GraderVersion(BaseModel):
    """A version of a stored grader. `id` is its hash."""

    id: str
    name: str
    version: str
    created_at: int
    is_current: bool
    note: str
    grader: dict[str, Any]


class ScoreRange(BaseModel):
    """The scores that pass, both bounds included; None: no bound."""

    min: float | None = None
    max: float | None = None

    def __str__(self) -> str:
        if self.min == self.max:
            return f"{self.min:g}"
        if self.max is None:
            return f"from {self.min:g}"
        return f"to {self.max:g}" if self.min is None else f"{self.min:g} to {self.max:g}"


class GoldenCase(BaseModel):
    """An answer and its row, with the scores that all versions of a grader must give it."""

    id: str
    created_at: int
    sample: dict[str, Any]
    item: dict[str, Any]
    expect: ScoreRange
    note: str
    rollout_id: str | None = None


class CheckedCase(BaseModel):
    """A golden case and its score; None: it could not be graded, which fails the case."""

    case_id: str
    passed: bool
    score: float | None = None
    expect: ScoreRange
    reason: str
    errors: list[str]
    output: str  # printed by the grader
    scores: dict[str, float | None]  # of the parts of a multi grader
    execution_time: float


class GraderCheck(BaseModel):
    """The golden cases of a stored grader, run with one of its versions or with another specification."""

    name: str
    version: str  # of what was run, saved or not
    passed: int
    failed: int
    results: list[CheckedCase]


class EvalDifference(BaseModel):
    """The second run minus the first, over the rows that both graded, with a 95 % interval."""

    compared: int
    ungraded: int
    first: float | None = None
    second: float | None = None
    difference: float | None = None
    standard_error: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    wins: int
    losses: int
    ties: int


class EvalComparison(BaseModel):
    """Two runs of an eval: the pass rate, and the mean score of each criterion."""

    eval_id: str
    runs: list[str]
    rows: int
    unpaired: int
    passed: EvalDifference
    criteria: dict[str, EvalDifference]


class Money(BaseModel):
    amount: float
    currency: str


class ComparedJob(BaseModel):
    """A job of a comparison: the step of the validation that counts; None: it has stored none."""

    job_id: str
    model: str  # the delivered one; the base model before there is one
    step: int | None = None
    gpu_seconds: float
    cost: Money | None = None  # None: the service has no price


class ComparedPair(BaseModel):
    """The validated rewards of a job minus those of the first, on the prompts that both have."""

    job_id: str
    prompts: int
    unpaired: int  # prompts that only one of the two jobs has
    reward: EvalDifference | None = None  # of the mean reward of a prompt; None: a job has no validation
    same_grader: bool  # if not, the rewards are not on one scale


class ChangedField(BaseModel):
    """A field of the requests that differs between jobs, by its dotted name, with the value of each job."""

    field: str
    values: list[Any]


class JobComparison(BaseModel):
    """The first job beside the others."""

    jobs: list[ComparedJob]
    pairs: list[ComparedPair]  # each of the other jobs with the first
    config: list[ChangedField]


class Curve(BaseModel):
    """The validations of a job in order, thinned; the first is that of the model that it started from."""

    job_id: str
    metric: str | None = None  # full_valid_mean_reward, else full_valid_loss; None: no validation yet
    steps: list[int]
    values: list[float]
    step: int | None = None  # the last one
    total_steps: int | None = None


class UsageRow(BaseModel):
    """The sums of a group of a usage report; a field that is not grouped by is None."""

    day: str | None = None
    model: str | None = None  # None also: recorded by a version that kept no model
    project_id: str | None = None
    project_name: str | None = None
    gpu_seconds: float  # of training, steps that were repeated included
    sampled_tokens: int
    trained_tokens: int
    grader_tokens: int
    cost: Money | None = None  # at today's price; None: the service has no price


class UsageReport(BaseModel):
    first_day: str
    last_day: str
    by: list[str]
    data: list[UsageRow]


class WorkerGpu(BaseModel):
    """A GPU by nvidia-smi; None: the driver does not say."""

    index: str
    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization: float | None = None


class WorkerTask(BaseModel):
    """A job or an eval run that a worker works on."""

    kind: Literal["run", "validation", "eval_run"]
    id: str
    project_id: str
    model: str | None = None
    progress: dict[str, Any] | None = None  # of a run


class Worker(BaseModel):
    """A worker of the service, as it last reported itself."""

    name: str  # host/pid, as attempts have it
    host: str
    gpu_class: str
    version: str
    machines: int  # that share its runs
    ranks: int  # on each of them
    status: Literal["idle", "busy", "draining", "silent"]
    started_at: int
    last_seen_at: int
    silent_seconds: float
    gpus: list[WorkerGpu]
    memory_used_bytes: int | None = None  # of the host, or of the container
    memory_total_bytes: int | None = None
    tasks: list[WorkerTask]


class Queue(BaseModel):
    """A queue of the service."""

    kind: Literal["jobs", "validations", "eval_runs"]
    gpu_class: str | None = None  # None: workers of every class take from it
    length: int  # what a free worker would start
    oldest_seconds: float
    held_back: int  # whose project runs as many as it may
    backing_off: int
    running: int
    workers: int
    reason: str | None = None  # None: nothing waits


class StageError(BaseModel):
    code: str
    message: str


class PipelineStage(BaseModel):
    """A stage of a pipeline. Its result is `model` or `file`, once it has succeeded."""

    name: str
    kind: Literal["job", "sample", "select", "mix"]
    status: Literal["waiting", "running", "succeeded", "failed", "cancelled"]
    needs: list[str]
    job_id: str | None = None
    job_status: str | None = None
    eval_id: str | None = None
    run_id: str | None = None
    progress: dict[str, int] | None = None  # of a sample stage: finished, total
    model: str | None = None
    file: str | None = None
    rows: int | None = None
    error: StageError | None = None
    note: str | None = None  # why the stage cannot start yet


class Pipeline(BaseModel):
    """Named stages, each a job or a file made from the results of others."""

    id: str
    created_at: int
    finished_at: int | None = None
    name: str | None = None
    status: Literal["running", "paused", "succeeded", "failed", "cancelled"]
    metadata: dict[str, str] | None = None
    cloned_from: str | None = None
    stages: list[PipelineStage]
