"""Responses of the server beyond OpenAI's. Unknown keys are kept as attributes.

Written by .ci/client_types.py from the OpenAPI document; do not edit.
"""

from typing import Any, Literal

from openai import BaseModel

from regraft.texts import JobResultText, ScoreRangeText, VerdictText


class AliasChange(BaseModel):
    """A change of an alias."""

    id: str
    object: Literal["regraft.alias.change"] = "regraft.alias.change"
    name: str
    previous_model: str | None = None
    """None: the alias was created."""
    model: str | None = None
    """The model that answered from then on. None: it was deleted."""
    changed_at: int
    changed_by: str
    """The id of an API key or a login, or `operator`."""


class Alias(BaseModel):
    """A name of the project's own for a model."""

    id: str
    object: Literal["regraft.alias"] = "regraft.alias"
    name: str
    model: str
    """The model that answers."""
    previous_model: str | None = None
    """The model that a rollback restores."""
    created_at: int
    updated_at: int
    """When it was last pointed at another model."""
    hidden: bool
    """Whether a model of the registry has the name, and answers in its place."""


class GroupShare(BaseModel):
    """A group of answers to one prompt."""

    step: int
    group: int
    """Index of the prompt in its step."""
    line: int | None = None
    """Of the dataset file, from 1."""
    text: str | None = None
    """First characters of the prompt's last message."""
    share: float
    """Of the updates of the selected steps; all groups sum to 1."""
    answers: int
    with_advantage: int
    """Trained answers with an advantage other than 0."""
    mean_reward: float | None = None


class PartShare(BaseModel):
    """A part of a multi grader."""

    name: str
    share: float
    """Negative: the updates lower this part for the sake of others. They sum to 1."""


class Attribution(BaseModel):
    """The sources of the updates of the selected steps. docs/howto/rollouts.md#attribution has the
    formulas.
    """

    object: Literal["regraft.attribution"] = "regraft.attribution"
    weight: Literal["answer", "token"]
    """Whether the job's loss weighs answers or tokens alike."""
    answers: int
    with_advantage: int
    """Trained answers with an advantage other than 0."""
    groups: int
    groups_of_half: int
    """The smallest number of groups that have half of the updates; 0 without any."""
    largest: list[GroupShare]
    """The groups with the largest shares."""
    parts: list[PartShare] | None = None
    """None without a multi grader; where the advantages follow something else than its score; and for a
    formula that is no weighted sum, with many parts or answers.
    """


class EvalDifference(BaseModel):
    """The second run minus the first, over the rows that both graded; the interval is that of Student's t."""

    compared: int
    ungraded: int
    """Paired rows that one of the runs could not grade."""
    first: float | None = None
    second: float | None = None
    difference: float | None = None
    standard_error: float | None = None
    ci_low: float | None = None
    """Lower end of the 95 % interval; None: fewer than two rows."""
    ci_high: float | None = None
    wins: int
    """Rows on which the second run is better."""
    losses: int
    ties: int


class EvalComparison(BaseModel):
    """Two runs of an eval: the pass rate, and the mean score of each criterion."""

    object: Literal["regraft.eval.comparison"] = "regraft.eval.comparison"
    eval_id: str
    runs: list[str]
    rows: int
    unpaired: int
    """Items whose row is not in the other run."""
    passed: EvalDifference
    """Of the pass rate over all criteria."""
    criteria: dict[str, EvalDifference]
    """Of the mean score, by criterion."""


class Curve(BaseModel):
    """The validations of a job in order, thinned."""

    object: Literal["regraft.curve"] = "regraft.curve"
    job_id: str
    metric: str | None = None
    """`full_valid_mean_reward`, or `full_valid_loss` of jobs without rewards; None: no validation."""
    steps: list[int]
    """Of the validations, at most 60 of them."""
    values: list[float]
    """The first is that of the model that the job started from."""
    step: int | None = None
    """The last one; None: none has been recorded."""
    total_steps: int | None = None


class Previewed(BaseModel):
    """The results of the preview of the same request (docs/howto/preview.md)."""

    id: str
    created_at: int
    answers: int
    passed: int
    mean_reward: float | None = None
    signal: float
    """The expected share of groups with signal at the job's group size."""
    verdict: str


class Estimate(BaseModel):
    """The estimate of a job. Jobs that sample no answers have no `group_size` and no
    `max_completion_tokens`.
    """

    model: str
    gpu_class: str
    training_rows: int
    validation_rows: int
    n_epochs: int
    batch_size: int
    total_steps: int
    estimate: dict[str, Any] | None = None
    """In the shape of a job's estimate."""
    reason: str | None = None
    """Reason for a missing estimate."""
    warnings: list[str]
    """Accepted parameters without effect, and alarms that cannot fire in a job of this size, as in the
    job's events.
    """
    object: Literal["regraft.estimate"] = "regraft.estimate"
    preview: Previewed | None = None
    """The newest preview of this request."""
    group_size: int | None = None
    max_completion_tokens: int | None = None


class ScoreRange(ScoreRangeText, BaseModel):
    """The scores that pass, both bounds included."""

    min: float | None = None
    """None: no lower bound."""
    max: float | None = None
    """None: no upper bound."""


class GoldenCase(BaseModel):
    """An answer and its row, with the scores that all versions of a grader must give it."""

    id: str
    object: Literal["regraft.grader.case"] = "regraft.grader.case"
    created_at: int
    sample: dict[str, Any]
    item: dict[str, Any]
    expect: ScoreRange
    note: str
    rollout_id: str | None = None


class GraderAuditProgress(BaseModel):
    """How far an audit is, in grades."""

    of: int
    graded: int


class Share(BaseModel):
    """A share from 0 to 1 with its 95 % confidence interval."""

    low: float
    expected: float
    high: float


class ErrorRate(BaseModel):
    """Wrong answers that pass, or right ones that do not, among the graded ones. None: none was graded."""

    wrong: int
    answers: int
    share: Share | None = None


class ExampleOfError(BaseModel):
    """A wrong answer that passes, or a right one that does not; its text is cut at 500 characters."""

    kind: str
    expect: Literal["high", "low", "either"]
    line: int
    text: str
    score: float
    reason: str


class KindOfProbe(BaseModel):
    """The scores of one kind of probe. `expect`: low, high, or either, which counts as no error."""

    kind: str
    expect: Literal["high", "low", "either"]
    knows: bool
    """Its answers have the right values in them."""
    answers: int
    failed: int
    """Could not be graded."""
    passed: int
    share: Share | None = None
    """That pass, of the graded answers."""
    mean_score: float | None = None
    mean_earned: float | None = None
    """Mean share of the reward of a right answer to the same row, above that of an empty one."""


class Sensitivity(BaseModel):
    """Whether the score moves with the quality of planted right, half right and wrong answers."""

    correlation: float | None = None
    """Spearman's; None: no right answer is known."""
    answers: int


class JudgeNoise(BaseModel):
    """The scores of equal answers, each graded `repeats` times with other seeds and with its labels
    reversed. They are scores of the whole grader, so the noise of several judges counts together.
    """

    answers: int
    repeats: int
    standard_deviation: float
    """Of the scores of one answer."""
    flip_rate: float
    """Probability that two grades of an answer pass and fail it."""
    rows_hiding_gain: int
    """Validation rows up to which this noise hides a gain of 5 % of a right answer's reward."""


class PartOfGrader(BaseModel):
    """The scores of one part of a multi grader over all probes."""

    name: str
    graded: int
    failed: int
    mean: float | None = None
    standard_deviation: float | None = None
    correlation: float | None = None
    """With the whole score; None: one of both is constant."""
    inert: bool
    """95 % of the answers have the same score."""
    correlations: dict[str, float | None]
    """With the parts after it."""
    redundant_with: list[str]


class Spread(BaseModel):
    """A distribution, such as of tokens or seconds."""

    mean: float
    p90: float
    max: float


class Grading(BaseModel):
    """Statistics of the grader. Seconds are of one grade among concurrent ones, as in a job."""

    failed: int
    reasons: list[str]
    """Most frequent first, at most three, each cut at 500 characters."""
    seconds: Spread
    tokens: int
    """Read and generated by judges."""


class AuditCoverage(BaseModel):
    """The rows behind the report. `never_graded`: rows of which no probe could be graded."""

    rows: int
    of_rows: int
    """In the file."""
    with_right_answer: int
    never_graded: int
    most_frequent: int
    """Rows with the same right answer: what a constant earns."""
    is_complete: bool
    """false: the budget was used up before all were graded."""


class GraderAuditReport(BaseModel):
    """The results of a grader audit. Shares are from 0 to 1, with 95 % confidence intervals."""

    verdict: Literal["go", "caution", "unknown", "stop"]
    sentence: str
    advice: list[str]
    notes: list[str]
    """Kinds that pass, which may be right or wrong."""
    pass_threshold: float
    answers: int
    false_positives: ErrorRate
    """Of the wrong answers that need no knowledge of the right one."""
    mentions: ErrorRate
    """Of the wrong answers that mention the right one."""
    false_negatives: ErrorRate
    """Of the right answers."""
    worst: list[ExampleOfError]
    kinds: list[KindOfProbe]
    sensitivity: Sensitivity
    noise: JudgeNoise | None = None
    """None: no judge, or no answer was graded twice."""
    parts: list[PartOfGrader]
    grading: Grading
    coverage: AuditCoverage


class RunError(BaseModel):
    """The error that ended a preview or an audit, and the status that a response with it would have."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    status: int


class GraderAudit(BaseModel):
    """An audit of a grader. `request` is the body that created it; values of grader headers are masked."""

    id: str
    object: Literal["regraft.grader_audit"] = "regraft.grader_audit"
    created_at: int
    finished_at: int | None = None
    status: str
    """in_progress, completed, failed or canceled."""
    request: dict[str, Any]
    version: str
    """SHA-256 of the specification."""
    progress: GraderAuditProgress
    verdict: Literal["go", "caution", "unknown", "stop"] | None = None
    """Of the report, once it is completed; lists have it, too."""
    report: GraderAuditReport | None = None
    """Once it is completed; lists leave it out."""
    error: RunError | None = None


class CheckedCase(BaseModel):
    """A golden case and its score. None: it could not be graded, which fails the case."""

    case_id: str
    passed: bool
    score: float | None = None
    expect: ScoreRange
    reason: str
    errors: list[str]
    output: str
    """Printed by the grader."""
    scores: dict[str, float | None]
    """Of the parts of a multi grader."""
    execution_time: float


class GraderCheck(BaseModel):
    """The golden cases of a stored grader, run with one of its versions or with another specification."""

    object: Literal["regraft.grader.check"] = "regraft.grader.check"
    name: str
    version: str
    """The version of what was run, saved or not."""
    passed: int
    failed: int
    """Cases out of their range, or without a score."""
    results: list[CheckedCase]


class Audited(BaseModel):
    """The main results of an audit (docs/howto/grader-audits.md)."""

    id: str
    created_at: int
    verdict: Literal["go", "caution", "unknown", "stop"]
    sentence: str
    false_positives: ErrorRate
    mentions: ErrorRate
    false_negatives: ErrorRate
    correlation: float | None = None


class GraderVersion(BaseModel):
    """A version of a stored grader. `id` is its hash."""

    id: str
    object: Literal["regraft.grader.version"] = "regraft.grader.version"
    name: str
    version: str
    created_at: int
    is_current: bool
    note: str
    grader: dict[str, Any]
    audit: Audited | None = None
    """Its newest audit; None: it has none."""


class Money(BaseModel):
    """An amount of money."""

    amount: float
    currency: str
    """ISO 4217."""


class LedgerBucket(BaseModel):
    """The tokens and the GPU time with one use."""

    bucket: str
    """Such as `learned` or `zero_variance` (docs/howto/ledger.md)."""
    title: str
    tokens: int
    """Sampled ones; of a job that learns from the rows of its file, the trained ones."""
    tokens_percent: float
    """With one digit; these of all buckets add up to 100."""
    gpu_seconds: float
    time_percent: float
    """With one digit; these of all buckets add up to 100."""
    cost: Money | None = None
    """Of the GPU-seconds; None: the service has no price."""


class ComparedJob(BaseModel):
    """A job of a comparison."""

    job_id: str
    model: str
    """The delivered model; the base model before there is one."""
    step: int | None = None
    """Of the validation that counts; None: the job has stored none."""
    gpu_seconds: float
    """Of its recorded steps."""
    cost: Money | None = None
    """Of these GPU-seconds; None: the service has no price."""
    ledger: list[LedgerBucket]
    """What its tokens and its GPU time taught."""


class ComparedPair(BaseModel):
    """A job minus the first one, over the validation prompts that both have."""

    job_id: str
    prompts: int
    unpaired: int
    """Prompts that only one of the two jobs has."""
    reward: EvalDifference | None = None
    """Of the mean reward of a prompt; `first` is the first job."""
    same_grader: bool
    """If not, the rewards are not on one scale."""


class ChangedField(BaseModel):
    """A field that the requests do not all have with the same value, by its dotted name."""

    field: str
    values: list[Any]
    """In the order of the jobs; None: the request lacks it."""


class JobComparison(BaseModel):
    """The first job beside the others. Each interval is that of its pair alone."""

    object: Literal["regraft.job.comparison"] = "regraft.job.comparison"
    jobs: list[ComparedJob]
    pairs: list[ComparedPair]
    """One for each of the other jobs."""
    config: list[ChangedField]


class StepUse(BaseModel):
    """The ledger of one step. Buckets without an amount are absent."""

    step: int
    tokens: dict[str, int]
    gpu_seconds: dict[str, float]


class JobLedger(BaseModel):
    """The tokens and the GPU time of the recorded steps of a job, by what they taught."""

    object: Literal["regraft.job.ledger"] = "regraft.job.ledger"
    job_id: str
    tokens: int
    """The sum of the buckets."""
    gpu_seconds: float
    """The sum of the buckets."""
    cost: Money | None = None
    """Of these GPU-seconds; None: the service has no price."""
    waiting_seconds: float
    """Of waiting for other jobs on the same device: in no bucket, as in `gpu_seconds`."""
    buckets: list[LedgerBucket]
    steps: list[StepUse]


class SweptJob(BaseModel):
    """A job of a sweep."""

    settings: dict[str, Any]
    job_id: str
    job_status: str | None = None
    stopped: str | None = None
    """The reason for which the sweep has stopped it."""
    reward: float | None = None
    """At the end: its mean over the rows that are graded in all jobs that succeeded."""
    difference: float | None = None
    """Of the best job minus this one; None of the best one."""
    low: float | None = None
    """Lower 95 % bound of the difference, for all pairs of jobs at once."""


class StageError(BaseModel):
    """The error that ended a stage."""

    code: str
    message: str


class PipelineStage(BaseModel):
    """A stage. Its results are `model` or `file`, once it has succeeded."""

    name: str
    kind: str
    """job, sweep, sample, select or mix."""
    status: str
    """waiting, running, succeeded, failed or cancelled."""
    needs: list[str]
    """The stages that must succeed before this one starts."""
    spec: dict[str, Any] | None = None
    """The request, without secrets; None in lists."""
    job_id: str | None = None
    job_status: str | None = None
    jobs: list[SweptJob] = []
    """Of a sweep."""
    conclusion: str | None = None
    """Of a sweep that has ended, in one sentence."""
    eval_id: str | None = None
    run_id: str | None = None
    progress: dict[str, int] | None = None
    """Of a sample stage: finished, total."""
    model: str | None = None
    file: str | None = None
    rows: int | None = None
    """Of the file."""
    error: StageError | None = None
    note: str | None = None
    """The reason why the stage cannot start yet."""
    started_at: int | None = None
    finished_at: int | None = None
    reused_from: str | None = None
    """The pipeline that made the result of a clone."""
    earlier: list[str] = []
    """The jobs of failed attempts."""


class Pipeline(BaseModel):
    """Named stages, each a job or a file made from the results of others."""

    id: str
    object: str = "regraft.pipeline"
    created_at: int
    finished_at: int | None = None
    name: str | None = None
    status: str
    """running, paused, succeeded, failed or cancelled."""
    metadata: dict[str, str] | None = None
    cloned_from: str | None = None
    stages: list[PipelineStage]


class PreviewAnswer(BaseModel):
    """An answer and its grade."""

    id: str
    line: int
    """Line of the training file."""
    member: int
    """Index of the answer among those of its row."""
    output_text: str
    output_reasoning: str | None = None
    output_tools: list[dict[str, Any]]
    """The calls of functions in the answer."""
    conversation: list[dict[str, Any]] | None = None
    """The messages after the prompt of an episode; None: the answer is of one call."""
    stop: Literal["final", "max_steps", "tokens", "context", "time", "discarded"] | None = None
    """The reason for the end of the episode."""
    trace_id: str | None = None
    """The id of the episode for its tools and the grader."""
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    score: float | None = None
    """None: could not be graded; see `reason`."""
    reason: str
    sub_scores: dict[str, float | None] | None = None
    output: str | None = None
    """Printed by the grader."""
    item: dict[str, Any]
    """The dataset row as graders see it."""


class PreviewProgress(BaseModel):
    """How far a preview is; of all answers, those that are sampled, and those that are graded."""

    phase: Literal["loading", "sampling", "grading"]
    of: int
    sampled: int
    graded: int
    waiting_for: str | None = None
    """The unavailable part, such as the inference server, if the preview waits for one."""


class ShownPrompt(BaseModel):
    """A row in the report: the rewards (None: not graded), and the first answer, cut at 500 characters."""

    line: int
    tokens: int
    rewards: list[float | None]
    answer: str


class Signal(BaseModel):
    """The share of groups of one size whose rewards would not all be equal. `at_least`: the group size
    exceeds the number of samples, so the share is that of the largest possible groups.
    """

    group_size: int
    share: Share
    at_least: bool


class PreviewSampling(BaseModel):
    """Throughput of the inference server, without loading the model."""

    seconds: float
    tokens_per_second: float


class PreviewReport(BaseModel):
    """The job's size and estimate as in /v1/regraft/estimate, with the measured answer lengths, and the
    results of the preview. docs/howto/preview.md documents each number.
    """

    model: str
    gpu_class: str
    training_rows: int
    validation_rows: int
    n_epochs: int
    batch_size: int
    total_steps: int
    estimate: dict[str, Any] | None = None
    """In the shape of a job's estimate."""
    reason: str | None = None
    """Reason for a missing estimate."""
    warnings: list[str]
    """Accepted parameters without effect, and alarms that cannot fire in a job of this size, as in the
    job's events.
    """
    group_size: int
    max_completion_tokens: int
    prompts: list[ShownPrompt]
    answers: int
    passed: int
    pass_threshold: float
    pass_rate: Share | None = None
    """Of the graded answers; None without any."""
    mean_reward: float | None = None
    signal: list[Signal]
    prompt_tokens: Spread
    completion_tokens: Spread
    cut_off: int
    """Answers that reached the token limit."""
    cut_thoughts: int
    """Of these, within the thought of a reasoning model."""
    grading: Grading
    sampling: PreviewSampling
    verdict: Literal[
        "good", "little_signal", "too_hard", "too_easy", "uneven", "cut_off", "grader_fails", "does_not_fit"
    ]
    recommendation: str


class Preview(BaseModel):
    """A preview. `request` is the body that created it; values of grader headers are masked."""

    id: str
    object: Literal["regraft.preview"] = "regraft.preview"
    created_at: int
    finished_at: int | None = None
    status: str
    """in_progress, completed, failed or canceled."""
    request: dict[str, Any]
    answers_of: str | None = None
    """The earlier preview whose answers this one grades; None: it sampled its own."""
    progress: PreviewProgress
    report: PreviewReport | None = None
    """Once it is completed."""
    error: RunError | None = None


class RowProblem(BaseModel):
    """A problem of a row, and the number of other lines that have it."""

    line: int
    """The first one."""
    path: str
    message: str
    more_lines: int
    """Further lines with the same problem."""


class LengthBin(BaseModel):
    """Rows of at least `low` and less than `high`."""

    low: int
    high: int
    rows: int


class Lengths(BaseModel):
    """The distribution of a length over rows."""

    rows: int
    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int
    bins: list[LengthBin]


class SomeLines(BaseModel):
    """A number of rows, and the first lines of them."""

    rows: int
    lines: list[int]


class TokenLengths(BaseModel):
    """Tokens as the chat template of the model renders a row: of its prompt, or with its answers for other
    methods. `rows` is smaller than the rows of the file if it has more than 50,000: then a uniform
    sample is counted.
    """

    rows: int
    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int
    bins: list[LengthBin]
    room: int
    """The most that a row may have."""
    too_long: SomeLines
    """Of the counted rows: those with more tokens than `room`."""
    not_rendered: SomeLines
    """Of the counted rows: those that the chat template rejects."""
    special_texts: SomeLines
    """Of the counted rows: those whose content has the text of a special token, which is read and learned
    as text.
    """


class Duplicates(BaseModel):
    """Rows whose prompt occurs in an earlier row."""

    rows: int
    identical: int
    """Of these, rows that equal an earlier row in every field."""
    prompts: int
    """Different prompts that occur more than once."""
    lines: list[list[int]]
    """The first lines of the first such prompts."""


class Overlap(BaseModel):
    """Rows of the validation file whose prompt is also in this file."""

    file: str
    rows: int
    """Valid rows of the validation file."""
    shared: int
    lines: list[list[int]]
    """Pairs: a line of the validation file, and one of this file."""


class ProfiledField(BaseModel):
    """A key of the rows, which graders read as `item.<name>`."""

    name: str
    rows: int
    missing: int
    types: dict[str, int]
    distinct: int | None = None
    """Different values; None: more than 1000."""
    example: str
    """The first value, at most 120 characters of its JSON."""


class GraderPath(BaseModel):
    """A path that the grader reads, and the rows that lack it."""

    path: str
    missing: SomeLines


class RowDoubt(BaseModel):
    """A reason why the grader cannot tell the answers to some rows apart, as the end of a sentence "This
    row ...".
    """

    message: str
    found: SomeLines


class GraderReads(BaseModel):
    """The fields that the templates of a grader read, and the rows that it can learn nothing from."""

    paths: list[GraderPath]
    not_listed: bool
    """A python grader or an endpoint may read other fields as well."""
    no_grader: SomeLines | None = None
    """Rows for which a select grader has no grader; None: it is not one."""
    no_word: SomeLines
    """Rows in whose reference a text_similarity finds no word, which a job rejects."""
    doubts: list[RowDoubt]
    """A job accepts these rows, and warns of them."""


class FileProfile(BaseModel):
    """The profile of a file. core/storage/profiles.py documents each number."""

    object: Literal["regraft.file_profile"] = "regraft.file_profile"
    file_id: str
    model: str | None = None
    method: Literal["reinforcement", "supervised", "dpo", "reward_model"]
    rows: int
    """Valid rows."""
    is_whole: bool
    """False: only the first million rows were read."""
    invalid: int
    """Lines with problems, which a job would reject."""
    problems: list[RowProblem]
    """The first 20 different ones."""
    foreign_format: str | None = None
    """Names the format of a file that no job reads, and says what to do; None: it has none."""
    characters: Lengths | None = None
    """Of the text of a prompt."""
    tokens: TokenLengths | None = None
    tokens_reason: str | None = None
    """The reason if tokens are not counted."""
    duplicates: Duplicates
    overlap: Overlap | None = None
    fields: list[ProfiledField]
    grader: GraderReads | None = None


class PromptHistory(BaseModel):
    """The rewards of one prompt over the steps."""

    id: str
    line: int
    """Line of the file."""
    text: str | None = None
    """The first characters of the last message."""
    outcome: Literal["learned", "kept", "forgotten", "stuck", "ungraded"]
    """By the steps whose mean reward reaches `pass_threshold`. learned: the last one, not the first; kept:
    both; forgotten: an earlier one, not the last; stuck: none; ungraded: no sample has a score.
    """
    reason: Literal["cut", "no_signal", "rising"] | None = None
    """The reason for stuck or forgotten, as far as its samples say. cut: half of the last ones ended at
    the token limit; no_signal: the samples of a step never had different scores; rising: it is stuck,
    and the mean rises.
    """
    first_mean: float | None = None
    """Mean reward of the first step with a graded sample."""
    last_mean: float | None = None
    change: float | None = None
    """`last_mean` minus `first_mean`."""
    steps: list[int]
    """Steps with samples of this prompt, ascending."""
    mean_rewards: list[float | None]
    """By step; None where no sample has a score."""
    samples: list[int]
    """The number of stored samples by step."""


class Rewards(BaseModel):
    """The rewards of one formula."""

    graded: int
    mean: float | None = None
    passed: int
    """Answers with a score of at least `pass_threshold`."""
    groups_with_signal: int
    """Groups with answers of different scores."""
    signal_by_group_size: dict[str, float]
    """Expected share of groups with signal, by a number of answers up to the stored ones."""


class ComparedScores(BaseModel):
    """The stored scores of a job's answers beside others, of all selected answers."""

    answers: int
    groups: int
    """Groups with at least two answers."""
    before: Rewards
    after: Rewards
    higher: int
    lower: int
    same: int
    gained: int
    """Answers that have a score only in the new ones."""
    lost: int
    """Answers that have none in the new ones."""
    now_passed: int
    now_failed: int
    changed_signs: int
    """Answers whose reward, minus the mean of their group, has the opposite sign."""
    centered_cosine: float | None = None
    """Of the rewards minus the means of their groups, before and after: 1 teaches the same, -1 the
    opposite.
    """
    rank_correlation: float | None = None
    """Spearman's, of the stored and the new scores."""


class Regrade(BaseModel):
    """Stored answers of a job scored by another grader."""

    id: str
    object: Literal["regraft.regrade"] = "regraft.regrade"
    job_id: str
    name: str
    created_at: int
    started_at: int | None = None
    finished_at: int | None = None
    status: str
    """queued, in_progress, completed, failed or canceled."""
    error: dict[str, Any] | None = None
    grader: dict[str, Any]
    split: Literal["train", "valid"] | None = None
    """None: both."""
    step_from: int
    step_to: int
    answers: int
    graded: int
    """Finished answers so far, with or without a score."""
    usage: list[dict[str, Any]]
    """Tokens of judges by model."""
    budget: dict[str, int] | None = None
    pass_threshold: float
    comparison: ComparedScores | None = None
    """Once it is completed."""


class RegradedAnswer(BaseModel):
    """An answer with both scores. `id` is that of the rollout."""

    id: str
    step: int
    split: Literal["train", "valid"]
    group: int
    line: int
    output_text: str
    before: float | None = None
    after: float | None = None
    changes: list[Literal["flipped", "higher", "lower", "same", "gained", "lost"]]
    reason: str | None = None
    error: str | None = None
    output: str | None = None
    """Printed by the new grader."""


class JobResult(JobResultText, BaseModel):
    """The validation of the delivered checkpoint. Lists, pages and commands show these numbers as the
    job's result.
    """

    step: int
    """Of the delivered checkpoint."""
    metric: Literal["full_valid_mean_reward", "full_valid_loss"]
    start: float | None = None
    """Of the model that the job started from; None: it was not validated."""
    value: float


class RolloutStep(BaseModel):
    """A step of an answer that was judged by steps."""

    end: int
    """Index of the character after the step."""
    score: float | None = None
    advantage: float | None = None


class Rollout(BaseModel):
    """A stored sample and its grade. The objects are by part of a multi grader, and empty or None for
    others.
    """

    id: str
    step: int
    split: Literal["train", "valid"]
    group: int
    """Index of the prompt in the step, from 0."""
    member: int
    """Index of the answer in its group."""
    line: int
    """Line of the file."""
    messages: list[dict[str, Any]]
    item: dict[str, Any] | None = None
    """The other fields of the dataset row."""
    output_text: str
    """The final answer, without its calls of functions."""
    output_tools: list[dict[str, Any]] | None = None
    """The calls of functions in the answer; None: the row has no tools."""
    output_tools_error: str | None = None
    """The reason why the calls in the answer could not be read; they are in its text."""
    conversation: list[dict[str, Any]] | None = None
    """The messages after the prompt of an episode; None: the answer is of one call."""
    stop: Literal["final", "max_steps", "tokens", "context", "time", "discarded"] | None = None
    """The reason for the end of the episode."""
    trace_id: str | None = None
    """The id of the episode for its tools and the grader."""
    output_reasoning: str | None = None
    """The thought of a reasoning model."""
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    """Of the completion tokens."""
    grammar_start: int | None = None
    """Index of the first token of the final answer."""
    policy_step: int | None = None
    """Steps that the policy had learned from when it sampled the answer."""
    score: float | None = None
    """None: could not be graded; see `reason`."""
    reason: str | None = None
    error: str | None = None
    """Kind of the grading error."""
    output: str | None = None
    """Printed by a python grader."""
    sub_scores: dict[str, float | None] | None = None
    sub_reasons: dict[str, str] | None = None
    sub_errors: dict[str, str] | None = None
    sub_outputs: dict[str, str] | None = None
    centered_reward: float | None = None
    """The score minus the mean of its group."""
    advantage: float | None = None
    """As used in training; None: the answer was not trained on."""
    trained: bool | None = None
    replacement: bool | None = None
    """Resampled in place of a prompt without signal."""
    has_tokens: bool | None = None
    """Whether the values of its tokens are stored."""
    steps: list[RolloutStep] | None = None
    """Of an answer that was judged by steps."""


class RolloutToken(BaseModel):
    """The values of a token, with three decimal digits."""

    text: str
    """Empty for all but the last token of a character."""
    logprob: float | None = None
    """Of the sampler; None if the token was not sampled."""
    advantage: float | None = None
    """As used in training; None if it was not trained on."""
    gap: float | None = None
    """Log-probability of the trainer less that of the sampler; None if not computed."""


class RolloutTokens(BaseModel):
    """The values of each token of a sample, its thought and stop token included, with three decimal
    digits.
    """

    object: Literal["regraft.rollout_tokens"] = "regraft.rollout_tokens"
    rollout_id: str
    tokens: list[RolloutToken]


class Scores(BaseModel):
    graders: list[dict[str, Any]] = []
    train_reward_mean: float | None = None
    valid_reward_mean: float | None = None


class ByGrader(BaseModel):
    graders: list[dict[str, Any]] = []


class PhaseSeconds(BaseModel):
    sampling: float = 0.0
    """Seconds of the phase sampling."""
    grading: float = 0.0
    """Seconds of the phase grading, beyond sampling."""
    training: float = 0.0
    """Seconds of the phase training."""
    eval: float = 0.0
    """Seconds of the validation."""
    waiting: float = 0.0
    """Seconds of waiting for other jobs on the same device."""
    full_iteration: float = 0.0
    """Seconds of the whole step."""


class Timing(BaseModel):
    graders: list[dict[str, Any]] = []
    step: PhaseSeconds


class StepMetrics(BaseModel):
    """The metrics of one step. A metric that the step did not measure is None here, and absent or None in
    its event.
    """

    step: int
    """Number of the step. Step 0 is the validation of the base model."""
    total_steps: int = 0
    """Number of steps of the job."""
    gpus: int | None = None
    """GPUs of the run, if more than one."""
    sampling_gpus: int | None = None
    """Those of them that sample, if others learn."""
    learning_gpus: int | None = None
    """Those of them that learn, if others sample."""
    train_loss: float | None = None
    """Supervised: mean -log p of the learned tokens. dpo and reward_model: mean loss of the pairs or of
    the scored answers. Before the update.
    """
    train_accuracy: float | None = None
    """The accuracy of the next two, by OpenAI's second name."""
    valid_loss: float | None = None
    """The same loss on a part of the validation file."""
    valid_mean_token_accuracy: float | None = None
    """The token accuracy there."""
    full_valid_loss: float | None = None
    """The loss on the whole validation file."""
    full_valid_mean_token_accuracy: float | None = None
    """The token accuracy there."""
    train_mean_token_accuracy: float | None = None
    """Supervised: share of the learned tokens that the model thinks likeliest."""
    train_mean_reward_accuracy: float | None = None
    """dpo and reward_model: share of the pairs in which the preferred answer has the higher reward. That
    of dpo is beta times the log-probability ratio to the reference.
    """
    train_mean_reward_margin: float | None = None
    """dpo and reward_model: reward of the preferred less the other answer."""
    train_mean_chosen_reward: float | None = None
    """dpo and reward_model: reward of the preferred answers."""
    train_mean_rejected_reward: float | None = None
    """dpo and reward_model: reward of the other answers."""
    valid_mean_reward_accuracy: float | None = None
    """On a part of the validation file."""
    valid_mean_reward_margin: float | None = None
    """On a part of the validation file."""
    full_valid_mean_reward_accuracy: float | None = None
    """On the whole validation file."""
    full_valid_mean_reward_margin: float | None = None
    """On the whole validation file."""
    full_valid_mean_chosen_reward: float | None = None
    """On the whole validation file."""
    full_valid_mean_rejected_reward: float | None = None
    """On the whole validation file."""
    train_mean_reward: float | None = None
    """Mean reward of the graded answers."""
    train_reward_mean: float | None = None
    """The same, by OpenAI's second name."""
    train_reward_std: float | None = None
    """Standard deviation of the rewards over all answers."""
    full_valid_mean_reward: float | None = None
    """Mean reward of the graded validation answers."""
    valid_reward_mean: float | None = None
    """The same, by OpenAI's second name."""
    full_valid_stderr: float | None = None
    """Standard error of the validation reward over rows."""
    full_valid_difference: float | None = None
    """Validation reward less the base model's, paired by row."""
    full_valid_difference_low: float | None = None
    """Lower end of its 95 % interval."""
    full_valid_difference_high: float | None = None
    """Upper end of its 95 % interval."""
    full_valid_pass_at_1: float | None = None
    """With `eval_samples` above 1: share of the validation answers whose score is at least `pass_score`."""
    full_valid_pass_at_k: float | None = None
    """Then, too: share of the rows in which at least one of the k = `eval_samples` answers passes."""
    full_valid_maj_at_k: float | None = None
    """Then, too: share of the rows in which the commonest of the k final answers passes."""
    full_valid_mean_parse_error: float | None = None
    """Share of the validation answers that could not be parsed."""
    full_valid_teacher_kl: float | None = None
    """distillation: reverse KL to the teacher per token of the validation answers, estimated from what was
    sampled.
    """
    full_valid_shadow_mean_reward: float | None = None
    """With a shadow grader: mean score that it gives the validation answers."""
    full_valid_shadow_unresponsive: float | None = None
    """Share of the validation answers that the shadow grader could not grade."""
    full_valid_shadow_difference: float | None = None
    """Score by the shadow grader less the base model's, paired by row."""
    full_valid_shadow_difference_low: float | None = None
    """Lower end of its 95 % interval."""
    full_valid_shadow_difference_high: float | None = None
    """Upper end of its 95 % interval."""
    full_valid_shadow_shortfall: float | None = None
    """Half of the gain of the training grader less the gain of the shadow grader, mean over rows."""
    full_valid_shadow_shortfall_low: float | None = None
    """Its lower bound, which holds at all validations of the job together with 95 %
    (docs/howto/signal.md).
    """
    full_valid_shadow_fall_low: float | None = None
    """Lower bound of the fall of the score by the shadow grader since step 0, of the same kind."""
    full_valid_fall: float | None = None
    """Reward of the best earlier validation less this one's, paired by row."""
    full_valid_fall_low: float | None = None
    """Its lower bound, which holds for all pairs of validations of the job together with 95 %."""
    judge_drift: float | None = None
    """With a judge: mean change of the score of up to 16 answers of the attempt's first validation, which
    are graded again at each validation, as a share of what the judges can move.
    """
    judge_drift_low: float | None = None
    """Its lower bound, which holds at all validations of the job together with 95 %."""
    judge_drift_high: float | None = None
    """Its upper bound."""
    valid_completion_tokens_mean: float | None = None
    """Mean length of the validation answers."""
    valid_truncated_share: float | None = None
    """Share of the validation answers that reached the token limit."""
    valid_unresponsive_rewards: float | None = None
    """Share of the validation answers that could not be graded."""
    completion_tokens_mean: float | None = None
    """Mean length of the answers."""
    completion_tokens_max: int | None = None
    """Length of the longest answer."""
    mean_unresponsive_rewards: float | None = None
    """Share of the answers that could not be graded."""
    truncated_share: float | None = None
    """Share of the answers that reached the token limit."""
    reasoning_tokens_mean: float | None = None
    """Mean length of the thoughts, of a reasoning model."""
    answer_tokens_mean: float | None = None
    """Mean length of the final answers, of a reasoning model."""
    cut_thoughts_share: float | None = None
    """Share of the answers that ended within their thought."""
    episode_turns_mean: float | None = None
    """Mean number of calls of the policy in an episode."""
    episode_context_tokens_mean: float | None = None
    """Mean length of what an episode read after its prompt."""
    tool_calls_mean: float | None = None
    """Mean number of calls of tools in an episode."""
    tool_errors_share: float | None = None
    """Share of the calls of tools of which the model read an error."""
    tool_seconds_p50: float | None = None
    """Median time of the calls that were sent to tools."""
    tool_seconds_p95: float | None = None
    """95 % of these calls took at most this time."""
    stop_final_share: float | None = None
    """Share of the episodes that ended with an answer."""
    stop_max_steps_share: float | None = None
    """Share of the episodes that ended at max_episode_steps."""
    stop_tokens_share: float | None = None
    """Share of the episodes that ended with an answer at its token limit."""
    stop_context_share: float | None = None
    """Share of the episodes that ended because the context had no room for another answer."""
    stop_time_share: float | None = None
    """Share of the episodes that ended at their time limit."""
    stop_discarded_share: float | None = None
    """Share of the episodes that were discarded because a tool or the agent failed."""
    groups_mixed_share: float | None = None
    """Share of the groups with signal: their rewards differ."""
    groups_all_zero_share: float | None = None
    """Share of the groups in which all rewards are 0."""
    groups_all_one_share: float | None = None
    """Share of the groups in which all rewards are 1."""
    groups_equal_share: float | None = None
    """Share of the groups in which all rewards are another equal number."""
    length_reward_correlation: float | None = None
    """Correlation of length and reward among the answers to one prompt, over all groups with signal,
    without answers that reached the token limit.
    """
    length_reward_z: float | None = None
    """The same times the root of its degrees of freedom: about normal, with variance 1, without a
    relation.
    """
    copied_prompt_share: float | None = None
    """Share of the answers of at least 6 tokens that have half of their runs of 6 tokens from the prompt,
    and are no field of their row.
    """
    repeated_tokens_share: float | None = None
    """Share of the runs of 4 tokens in an answer that occurred before in it."""
    same_answers_share: float | None = None
    """Share of the pairs of answers to different prompts that are the same, apart from case and spaces;
    None with fewer than 8 different prompts that have answers with text.
    """
    foreign_script_share: float | None = None
    """Share of the answers in which a tenth of the letters, those of the thought included, is of scripts
    that neither the row nor a result of a tool has. Latin letters are expected everywhere.
    """
    groups_ungraded_share: float | None = None
    """Share of the groups with fewer than two graded answers."""
    loss: float | None = None
    """Loss of the update, mean over the trained tokens."""
    kl: float | None = None
    """KL divergence to the reference per token (k3), on one pack a step unless `kl` is set."""
    kl_weight: float | None = None
    """Weight of the KL penalty in the step: `kl.weight`, or less during `kl.warmup_steps`."""
    teacher_kl: float | None = None
    """distillation: reverse KL to the teacher per sampled token, mean of log p_student - log p_teacher
    before the update.
    """
    entropy: float | None = None
    """Mean entropy of the policy per trained token."""
    sampling_entropy: float | None = None
    """Mean of -log p over all sampled tokens, groups without signal included."""
    clip_fraction: float | None = None
    """Share of the trained tokens whose ratio was clipped."""
    masked_fraction: float | None = None
    """Share of the trained tokens that `importance` left out of the loss: the sampler's probabilities
    differ too much from the trainer's.
    """
    value_loss: float | None = None
    """Loss ppo: mean loss of the value head per trained token."""
    explained_variance: float | None = None
    """Loss ppo: share of the variance of the returns that the values of the step explain, before its
    update. 1 at best, 0 for a constant, negative if they are worse than one.
    """
    grad_norm: float | None = None
    """Norm of the gradient before clipping."""
    learning_rate: float | None = None
    """Learning rate of the update: that of the schedule, or less after an update was undone."""
    update_kl: float | None = None
    """KL(before || after) per token of the update, at answers to a few prompts; the largest of several
    that were accepted. Of a reward model: per pair or step.
    """
    update_retries: int | None = None
    """How often an update was undone, because it exceeded twice the target `step_kl`, and repeated with a
    lower rate.
    """
    rejected_updates: int | None = None
    """Updates that were still beyond twice the target after the last try, and changed nothing."""
    unmeasured_updates: int | None = None
    """Updates that were accepted without a KL, because memory ran out while it was measured."""
    logprob_gap: float | None = None
    """Mean |log p of the sampler - log p of the trainer| per token."""
    logprob_gap_max: float | None = None
    """The largest such difference."""
    logprob_gap_k1: float | None = None
    """KL(sampler || trainer) by the estimator k1."""
    logprob_gap_k3: float | None = None
    """KL(sampler || trainer) by the estimator k3."""
    logprob_gap_ess: float | None = None
    """Effective share of the sample under the weights pi_trainer / pi_sampler."""
    staleness: float | None = None
    """With the schedule `off_policy`: mean number of updates between the policy that sampled a token and
    the one that learns from it.
    """
    stale_tokens_share: float | None = None
    """With `continue_in_flight`: share of the sampled tokens that the policy before the newest update
    sampled.
    """
    skipped_updates: int | None = None
    """1 if a gradient was not finite and the step was not taken, else 0."""
    trained_sequences: int | None = None
    """Answers that were trained on."""
    trained_tokens: int | None = None
    """Tokens that were trained on, once for each update."""
    dropped_sequences: int | None = None
    """Answers without signal, which were not computed."""
    resampled_prompts: int | None = None
    """Prompts sampled in addition, for groups without signal."""
    resampled_mixed_share: float | None = None
    """Share of the groups with signal among these prompts."""
    discarded_groups: int | None = None
    """Groups without signal, if prompts were resampled."""
    discarded_tokens: int | None = None
    """Tokens of those groups."""
    discarded_seconds: float | None = None
    """Their part of the sampling time, by tokens."""
    learned_tokens: int | None = None
    """Tokens of the answers that the update learned from. Of a job that learns from the rows of its file:
    those of the rows, once for each update.
    """
    masked_tokens: int | None = None
    """Tokens of such answers that `importance` left out of the loss."""
    not_updated_tokens: int | None = None
    """Tokens of such answers in a step whose update changed nothing."""
    no_advantage_tokens: int | None = None
    """Tokens of the answers in groups with signal whose own advantage is exactly 0."""
    zero_variance_tokens: int | None = None
    """Tokens of the answers to the step's own prompts whose rewards are all equal."""
    resampled_tokens: int | None = None
    """Tokens of the answers to resampled prompts whose rewards are all equal too."""
    truncated_tokens: int | None = None
    """With `overlong` mask: tokens of the answers that were left out because they reached the token limit."""
    ungraded_tokens: int | None = None
    """Tokens of the answers that could not be graded, or that are the only graded one of their group."""
    discarded_episodes_tokens: int | None = None
    """Tokens of the episodes that were discarded because a tool or the agent failed."""
    forced_tokens: int | None = None
    """Tokens that closed a thought at its budget: no policy has sampled them, and none is trained on."""
    sampled_tokens: int | None = None
    """Tokens of all answers of the step, the sum of those by what they taught."""
    sampling_tokens_per_second: float | None = None
    """Sampled tokens per second of the phase sampling, or of `ahead_seconds`."""
    ahead_seconds: float | None = None
    """With the schedule `off_policy`: seconds in which the answers were sampled during earlier steps. The
    phase sampling is the part of it that the trainer waited for.
    """
    weight_sync_seconds: float | None = None
    """The part of the phase sampling in which vLLM engines were started or woken and got the weights, up
    to the first engine that had them; of a fleet, in which the adapter was stored. 0 with the sampler
    `transformers`, and not measured with the schedule `off_policy`, which does it beside learning.
    """
    training_tokens_per_second: float | None = None
    """Trained tokens per second of the phase training."""
    scores: Scores
    """Mean reward by split and grader."""
    errors: ByGrader
    """Number and share of the grades that failed, by category, split and grader."""
    timing: Timing
    """Seconds by phase of the step, and mean seconds per grade by split and grader."""
    model_graders_token_usage: dict[str, dict[str, int]]
    """Tokens read and written by judge models, by model."""
    usage: ByGrader
    """Tokens read and written by judge models, by grader."""


class StoredGrader(BaseModel):
    """A named grader with its current version."""

    id: str
    object: Literal["regraft.grader"] = "regraft.grader"
    name: str
    created_at: int
    updated_at: int
    version: str
    """SHA-256 of the specification."""
    versions: int
    cases: int
    """Golden cases."""
    grader: dict[str, Any]
    """The specification; header values are masked."""


class UsageRow(BaseModel):
    """The sums of a group; a field that is not grouped by is None."""

    day: str | None = None
    """In UTC, as 2026-11-25."""
    model: str | None = None
    """None also: usage without a model, as of a grader run."""
    project_id: str | None = None
    project_name: str | None = None
    gpu_seconds: float
    """Of training, steps that were repeated included."""
    sampled_tokens: int
    unused_tokens: int
    """Of the sampled tokens: no step learned from them, as of a batch sampled ahead."""
    trained_tokens: int
    grader_tokens: int
    """Those that the limit grader_tokens_per_30_days counts."""
    cost: Money | None = None
    """Of the GPU-seconds at today's price; None: no price."""


class UsageReport(BaseModel):
    """Sums of usage by day, model or project."""

    object: Literal["regraft.usage"] = "regraft.usage"
    first_day: str
    last_day: str
    by: list[str]
    data: list[UsageRow]


class Verdict(VerdictText, BaseModel):
    """The delivered model against the start of the job on the validation rows (docs/howto/verdict.md)."""

    outcome: Literal["improved", "no_difference", "worse", "too_few"]
    base_reward: float
    tuned_reward: float
    difference: float
    ci_low: float | None = None
    """Lower end of the 95 % interval of the difference; None: too few rows."""
    ci_high: float | None = None
    """Upper end."""
    wins: int
    losses: int
    ties: int
    rows: int
    ungraded: int
    """Rows that are left out because one of the two has no graded answer."""
    step: int
    """Of the delivered checkpoint."""
    ground: str | None = None
    """The damage that makes it worse; None: decided by the interval alone."""
    start: str | None = None
    """The tuned model that the job trained further; None: the base model."""
    held_out: bool = True
    """False: the validation file is the training file."""
    shadow_difference: float | None = None
    """The difference by the shadow grader; None: the job has none."""
    shadow_ci_low: float | None = None
    """Lower end of its 95 % interval."""
    shadow_ci_high: float | None = None
    """Upper end."""


class AdvantageSizes(BaseModel):
    """The absolute advantages of the graded answers."""

    mean: float | None = None
    largest: float | None = None


class WhatIf(BaseModel):
    """Another formula over the stored scores of a multi grader's parts. The job and its scores do not
    change.
    """

    answers: int
    groups: int
    """Groups with at least two answers."""
    before: Rewards
    after: Rewards
    higher: int
    lower: int
    same: int
    gained: int
    """Answers that have a score only in the new ones."""
    lost: int
    """Answers that have none in the new ones."""
    now_passed: int
    now_failed: int
    changed_signs: int
    """Answers whose reward, minus the mean of their group, has the opposite sign."""
    centered_cosine: float | None = None
    """Of the rewards minus the means of their groups, before and after: 1 teaches the same, -1 the
    opposite.
    """
    rank_correlation: float | None = None
    """Spearman's, of the stored and the new scores."""
    object: Literal["regraft.what_if"] = "regraft.what_if"
    formula: str
    pass_threshold: float
    advantage_scale: Literal["none", "group", "batch"]
    advantages_before: AdvantageSizes
    advantages_after: AdvantageSizes


class Queue(BaseModel):
    """A queue of the service."""

    object: Literal["regraft.queue"] = "regraft.queue"
    kind: Literal["jobs", "validations", "eval_runs"]
    gpu_class: str | None = None
    """None: workers of every class take from it."""
    length: int
    """Jobs or runs that a free worker would start."""
    oldest_seconds: float
    """Waiting time of the longest-waiting of these."""
    held_back: int
    """Whose project runs as many as it may."""
    backing_off: int
    """After an interruption."""
    running: int
    workers: int
    """That take from it and are not silent."""
    reason: str | None = None
    """What they wait for; None: nothing waits."""


class WorkerGpu(BaseModel):
    """A GPU by nvidia-smi. None: the driver does not say, as for a MIG slice."""

    index: str
    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization: float | None = None
    """Of the last sample period, from 0 to 1."""


class Finding(BaseModel):
    """A check of `regraft-server doctor` as it last ended on the worker's machine."""

    check: str
    state: Literal["ok", "warning", "failed", "skipped"]
    text: str
    remedy: str
    """Empty unless it failed or warns."""
    checked_at: int


class WorkerTask(BaseModel):
    """A job or an eval run that a worker works on: it holds the lease."""

    kind: Literal["run", "validation", "eval_run"]
    id: str
    project_id: str
    model: str | None = None
    progress: dict[str, Any] | None = None
    """Of a run, as the job has it; None: not known."""


class Worker(BaseModel):
    """A worker of the service, as it last reported itself."""

    object: Literal["regraft.worker"] = "regraft.worker"
    name: str
    """Host and process id, as attempts have it."""
    host: str
    gpu_class: str
    version: str
    machines: int
    """That share its runs, this one included."""
    ranks: int
    """Processes of a run on each of these machines."""
    status: Literal["idle", "busy", "draining", "silent"]
    """`busy`: it runs a job. `silent`: three reports are missing."""
    started_at: int
    last_seen_at: int
    silent_seconds: float
    """Since the last report, by the database's clock."""
    gpus: list[WorkerGpu]
    memory_used_bytes: int | None = None
    """Of the host, or of the container."""
    memory_total_bytes: int | None = None
    findings: list[Finding]
    """Of `regraft-server doctor`. Empty: it has not run on this machine with this data folder."""
    tasks: list[WorkerTask]
