"""/v1/regraft/jobs: extensions of OpenAI's API: all stored samples, and the metrics of every step."""

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any, BinaryIO, Literal, cast

import pyarrow.parquet as pq
from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep
from api.http.json_responses import JSON
from api.http.ranges import NO_RANGES
from api.http.shapes import After, Listing, Measured, SchemaOf
from core.database.tables import RolloutPage
from core.errors import InvalidRequest, NotFound
from core.jobs import events, lifecycle
from core.results import evals, prompt_histories, rollout_order, rollouts, what_if
from core.results.job_results import delivered_steps
from core.results.prompt_histories import Outcome, PromptHistory, Reason, SortKey
from core.results.rollout_filters import Wanted
from core.results.rollout_order import SortColumn
from core.results.rollouts import SamplePosition
from core.results.what_if import AdvantageScale
from core.step_metrics import SECTIONS, StepMetrics
from core.storage.store import CHUNK_BYTES, BlobNotFound, BlobStore
from graders.formula import MAX_LENGTH, Formula, FormulaDomainError, FormulaError
from graders.tools.episode import StopReason

router = APIRouter(prefix="/regraft/jobs", tags=["regraft"])

MAX_CONCURRENT = 1000
AT_ONCE = 100
MAX_SEARCHED = 1000
MAX_RESCORED = 100_000
# Of a formula, over all answers: a few seconds. Evaluating a long one takes milliseconds.
MAX_RESCORED_CHARACTERS = 10_000_000

_PROMPT = "prompt_"

Order = Literal["asc", "desc"]
Step = Annotated[int | None, Query(ge=0, le=999_999_999)]
Line = Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Line of the dataset file, from 1.")]
PassThreshold = Annotated[
    float | None, Query(allow_inf_nan=False, description="Default: as in evals of the job.")
]
Split = Annotated[Literal["train", "valid"] | None, Query(description="With `step`, the default is train.")]


def _wanted(
    line: Line = None,
    group: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="Index of the prompt in its step.")
    ] = None,
    finish_reason: Literal["stop", "length"] | None = None,
    graded: Annotated[bool | None, Query(description="Whether the sample has a score.")] = None,
    error: Annotated[str | None, Query(description="Kind of the grading error.")] = None,
    grader: Annotated[
        str | None, Query(description="Part of a multi grader; score bounds and `graded` apply to its score.")
    ] = None,
    min_score: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_score: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    has_tokens: Annotated[
        bool | None, Query(description="Whether the values of the sample's tokens are stored.")
    ] = None,
    q: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=MAX_SEARCHED,
            description="Text in the prompt, the dataset row, the answer or the grader's output, in any case.",
        ),
    ] = None,
) -> Wanted:
    return Wanted(line, group, finish_reason, graded, error, grader, min_score, max_score, has_tokens, q)


def _pages(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    step: Step = None,
    step_from: Step = None,
    step_to: Step = None,
    split: Split = None,
) -> Sequence[RolloutPage]:
    """The matching pages of the job, which belongs to this project."""
    if step is not None and (step_from is not None or step_to is not None):
        raise InvalidRequest("Give either step, or step_from and step_to.", param="step")
    # A separate session: pages are read from the blob store, which must not keep a connection waiting.
    with service.database.read() as session:
        job = lifecycle.get(session, project.id, job_id)
        first, last = (step_from, step_to) if step is None else (step, step)
        if step is not None and split is None:
            split = "train"
        pages = rollouts.pages(session, job.id, first_step=first, last_step=last, split=split)
    if step is not None and not any(_is_there(service.blobs, page) for page in pages):
        raise NotFound(f"Job {job.id} has no {split} rollouts of step {step}.", param="step")
    return pages


def training_pages(
    job_id: str,
    project: CurrentProject,
    service: Service,
    step: int | None,
    step_from: int | None,
    step_to: int | None,
) -> Sequence[RolloutPage]:
    """The pages of these training steps. Raises as `_pages`."""
    return _pages(job_id, project, service, step, step_from, step_to, "train")


def _is_there(blobs: BlobStore, page: RolloutPage) -> bool:
    try:
        return blobs.size(page.blob_key) >= 0
    except BlobNotFound:  # deleted by retention
        return False


async def _place(project: CurrentProject, service: ServiceDep) -> AsyncIterator[None]:
    """Hold a place among the searches until the response is made."""
    place = await service.admission.searches.enter(project.id)
    try:
        yield
    finally:
        place.leave()


# Dependencies of an endpoint that may read all samples of a job.
SEARCHES = [Depends(_place)]
Pages = Annotated[Sequence[RolloutPage], Depends(_pages)]
Filters = Annotated[Wanted, Depends(_wanted)]


class StepListing(Listing[Measured]):
    pass


# Of an answer.
EpisodeMessages = Annotated[
    list[dict[str, Any]] | None,
    Field(description="The messages after the prompt of an episode; null: the answer is of one call."),
]
EpisodeStop = Annotated[StopReason | None, Field(description="The reason for the end of the episode.")]
EpisodeTrace = Annotated[str | None, Field(description="The id of the episode for its tools and the grader.")]


class RolloutStepOut(BaseModel):
    """A step of an answer that was judged by steps."""

    end: Annotated[int, Field(description="Index of the character after the step.")]
    score: float | None
    advantage: float | None


class RolloutOut(BaseModel):
    """A stored sample and its grade. The objects are by part of a multi grader, and empty or null for others."""

    id: str
    step: int
    split: Literal["train", "valid"]
    group: Annotated[int, Field(description="Index of the prompt in the step, from 0.")]
    member: Annotated[int, Field(description="Index of the answer in its group.")]
    line: Annotated[int, Field(description="Line of the file.")]
    messages: list[dict[str, Any]]
    item: Annotated[dict[str, Any] | None, Field(description="The other fields of the dataset row.")]
    output_text: Annotated[str, Field(description="The final answer, without its calls of functions.")]
    output_tools: Annotated[
        list[dict[str, Any]] | None,
        Field(description="The calls of functions in the answer; null: the row has no tools."),
    ]
    output_tools_error: Annotated[
        str | None,
        Field(description="The reason why the calls in the answer could not be read; they are in its text."),
    ]
    conversation: EpisodeMessages
    stop: EpisodeStop
    trace_id: EpisodeTrace
    output_reasoning: Annotated[str | None, Field(description="The thought of a reasoning model.")]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: Annotated[int, Field(description="Of the completion tokens.")]
    grammar_start: Annotated[int | None, Field(description="Index of the first token of the final answer.")]
    policy_step: Annotated[
        int | None, Field(description="Steps that the policy had learned from when it sampled the answer.")
    ]
    score: Annotated[float | None, Field(description="null: could not be graded; see `reason`.")]
    reason: str | None
    error: Annotated[str | None, Field(description="Kind of the grading error.")]
    output: Annotated[str | None, Field(description="Printed by a python grader.")]
    sub_scores: dict[str, float | None] | None
    sub_reasons: dict[str, str] | None
    sub_errors: dict[str, str] | None
    sub_outputs: dict[str, str] | None
    centered_reward: Annotated[float | None, Field(description="The score minus the mean of its group.")]
    advantage: Annotated[
        float | None, Field(description="As used in training; null: the answer was not trained on.")
    ]
    trained: bool | None
    replacement: Annotated[bool | None, Field(description="Resampled in place of a prompt without signal.")]
    has_tokens: Annotated[bool | None, Field(description="Whether the values of its tokens are stored.")]
    steps: Annotated[list[RolloutStepOut] | None, Field(description="Of an answer that was judged by steps.")]


class RolloutListing(Listing[Annotated[dict[str, Any], SchemaOf(RolloutOut)]]):
    # Over the selected steps, regardless of the filters: the number of samples, and of those stored.
    total: int
    stored: int


@router.get("/{job_id}/rollouts", dependencies=SEARCHES)
def list_rollouts(
    job_id: str,
    service: ServiceDep,
    pages: Pages,
    wanted: Filters,
    step: Step = None,
    after: After = None,
    limit: Annotated[
        int | None, Query(description=f"Maximum number of samples, at most {MAX_CONCURRENT}.")
    ] = None,
    order: Order = "asc",
    sort: Annotated[
        SortColumn | None, Query(description="Default: by position. Samples without the value come last.")
    ] = None,
) -> RolloutListing:
    """List stored samples with their grades, by step. Those of one `step` come in one page unless `limit` is set."""
    place = None
    if after is not None and (place := SamplePosition.parse(after)) is None:
        raise _no_cursor(after)
    if limit is None and (step is None or after is not None):
        limit = AT_ONCE
    most = None if limit is None else max(1, min(limit, MAX_CONCURRENT))
    descending = order == "desc"
    # One more than the limit, to determine has_more.
    if sort is None:
        matches = rollouts.find(service.blobs, pages, wanted, after=place, descending=descending)
        rows = list(matches if most is None else islice(matches, most + 1))
    else:
        try:
            rows = rollout_order.page_of(
                service.blobs,
                pages,
                wanted,
                by=sort,
                descending=descending,
                after=place,
                limit=None if most is None else most + 1,
            )
        except KeyError:
            raise _no_cursor(str(after)) from None
    return RolloutListing(
        data=rows[:most],
        has_more=most is not None and len(rows) > most,
        total=sum(max(page.total, page.samples) for page in pages),
        stored=sum(page.samples for page in pages),
    )


class PromptOut(BaseModel):
    """The rewards of one prompt over the steps."""

    id: str
    line: Annotated[int, Field(description="Line of the file.")]
    text: Annotated[str | None, Field(description="The first characters of the last message.")]
    outcome: Annotated[
        Outcome,
        Field(
            description="By the steps whose mean reward reaches `pass_threshold`. learned: the last one, not the first;"
            " kept: both; forgotten: an earlier one, not the last; stuck: none; ungraded: no sample has a score."
        ),
    ]
    reason: Annotated[
        Reason | None,
        Field(
            description="The reason for stuck or forgotten, as far as its samples say. cut: half of the last ones "
            "ended at the token limit; no_signal: the samples of a step never had different scores; rising: it is "
            "stuck, and the mean rises."
        ),
    ]
    first_mean: Annotated[
        float | None, Field(description="Mean reward of the first step with a graded sample.")
    ]
    last_mean: float | None
    change: Annotated[float | None, Field(description="`last_mean` minus `first_mean`.")]
    steps: Annotated[list[int], Field(description="Steps with samples of this prompt, ascending.")]
    mean_rewards: Annotated[
        list[float | None], Field(description="By step; null where no sample has a score.")
    ]
    samples: Annotated[list[int], Field(description="The number of stored samples by step.")]

    @classmethod
    def of(cls, history: PromptHistory, text: str | None) -> "PromptOut":
        return cls(
            id=_PROMPT + str(history.line),
            line=history.line,
            text=text,
            outcome=history.outcome,
            reason=history.reason,
            first_mean=history.first_mean,
            last_mean=history.last_mean,
            change=history.change,
            steps=list(history.steps),
            mean_rewards=list(history.means),
            samples=list(history.samples),
        )


class PromptListing(Listing[PromptOut]):
    steps: Annotated[list[int], Field(description="All selected steps with stored samples, ascending.")]
    counted_step: Annotated[
        int | None,
        Field(
            description="The step that `outcome`, `last_mean` and `change` are of: that of the delivered checkpoint "
            "for validations, else the last one."
        ),
    ]
    pass_threshold: Annotated[
        float, Field(description="The mean reward from which a prompt counts as solved.")
    ]
    outcomes: Annotated[
        dict[Outcome, int], Field(description="The number of prompts by outcome, of all prompts.")
    ]
    stored: Annotated[int, Field(description="The number of samples behind this list.")]


@router.get("/{job_id}/rollouts/prompts", dependencies=SEARCHES)
def list_prompts(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    split: Literal["train", "valid"] = "valid",
    step_from: Step = None,
    step_to: Step = None,
    line: Line = None,
    outcome: Outcome | None = None,
    pass_threshold: PassThreshold = None,
    sort: SortKey = "line",
    order: Order = "asc",
    after: After = None,
    limit: Annotated[
        int, Query(description=f"Maximum number of prompts, at most {MAX_CONCURRENT}.")
    ] = AT_ONCE,
) -> PromptListing:
    """List the mean reward of each prompt at each step, and whether the prompt was learned, forgotten, or is stuck."""
    with service.database.read() as session:
        job = lifecycle.get(session, project.id, job_id)
        grader = job.body.get("grader", {})
        threshold = evals.pass_threshold(grader) if pass_threshold is None else pass_threshold
        pages = rollouts.pages(session, job.id, first_step=step_from, last_step=step_to, split=split)
        # Of the validation of the delivered checkpoint, as the job's result, unless the request ends the range.
        counts_result = split == "valid" and step_to is None
        counted_step = delivered_steps(session, [job]).get(job.id) if counts_result else None
    everything = prompt_histories.histories(
        service.blobs, pages, threshold, line=line, counted_step=counted_step
    )
    steps = sorted({step for history in everything for step in history.steps})
    matches = [history for history in everything if outcome in (None, history.outcome)]
    matches = prompt_histories.ordered(matches, sort, descending=order == "desc")
    start = 0
    if after is not None:
        lines = [f"{_PROMPT}{history.line}" for history in matches]
        if after not in lines:
            raise _no_cursor(after)
        start = lines.index(after) + 1
    most = max(1, min(limit, MAX_CONCURRENT))
    shown = matches[start : start + most]
    texts = prompt_histories.texts(service.blobs, pages, {one.line: one.steps[0] for one in shown})
    return PromptListing(
        data=[PromptOut.of(history, texts.get(history.line)) for history in shown],
        has_more=len(matches) > start + most,
        steps=steps,
        counted_step=counted_step if counted_step is not None else max(steps, default=None),
        pass_threshold=threshold,
        outcomes=prompt_histories.outcomes(everything),
        stored=sum(sum(history.samples) for history in everything),
    )


class RewardsOut(BaseModel):
    """The rewards of one formula."""

    graded: int
    mean: float | None
    passed: Annotated[int, Field(description="Answers with a score of at least `pass_threshold`.")]
    groups_with_signal: Annotated[int, Field(description="Groups with answers of different scores.")]
    signal_by_group_size: Annotated[
        dict[int, float],
        Field(
            description="Expected share of groups with signal, by a number of answers up to the stored ones."
        ),
    ]


class AdvantageSizesOut(BaseModel):
    """The absolute advantages of the graded answers."""

    mean: float | None
    largest: float | None


class ComparedScores(BaseModel):
    """The stored scores of a job's answers beside others, of all selected answers."""

    answers: int
    groups: Annotated[int, Field(description="Groups with at least two answers.")]
    before: RewardsOut
    after: RewardsOut
    higher: int
    lower: int
    same: int
    gained: Annotated[int, Field(description="Answers that have a score only in the new ones.")]
    lost: Annotated[int, Field(description="Answers that have none in the new ones.")]
    now_passed: int
    now_failed: int
    changed_signs: Annotated[
        int, Field(description="Answers whose reward, minus the mean of their group, has the opposite sign.")
    ]
    centered_cosine: Annotated[
        float | None,
        Field(
            description="Of the rewards minus the means of their groups, before and after: 1 teaches the same, -1 the "
            "opposite."
        ),
    ]
    rank_correlation: Annotated[
        float | None, Field(description="Spearman's, of the stored and the new scores.")
    ]


class WhatIfOut(ComparedScores):
    """Another formula over the stored scores of a multi grader's parts. The job and its scores do not change."""

    object: Literal["regraft.what_if"] = "regraft.what_if"
    formula: str
    pass_threshold: float
    advantage_scale: AdvantageScale
    advantages_before: AdvantageSizesOut
    advantages_after: AdvantageSizesOut

    @classmethod
    def of(
        cls, formula: str, threshold: float, scale: AdvantageScale, answers: Sequence[what_if.Rescored]
    ) -> "WhatIfOut":
        before, after = what_if.advantage_sizes(answers, scale)
        return cls(
            formula=formula,
            pass_threshold=threshold,
            advantage_scale=scale,
            advantages_before=AdvantageSizesOut(**asdict(before)),
            advantages_after=AdvantageSizesOut(**asdict(after)),
            **asdict(what_if.compare(answers, threshold)),
        )


@router.get("/{job_id}/rollouts/what-if", dependencies=SEARCHES)
def rescore(
    job_id: str,
    project: CurrentProject,
    service: ServiceDep,
    pages: Pages,
    formula: Annotated[
        str, Query(max_length=MAX_LENGTH, description="As `calculate_output` of a multi grader.")
    ],
    pass_threshold: PassThreshold = None,
    advantage_scale: Annotated[
        AdvantageScale, Query(description="As of a loss: the divisor of the advantages.")
    ] = "none",
) -> WhatIfOut:
    """Say what another formula over the scores of the multi grader's parts would have changed."""
    with service.database.read() as session:
        grader = lifecycle.get(session, project.id, job_id).body.get("grader", {})
    names = what_if.part_names(grader)
    if not names:
        raise InvalidRequest(
            "The job has no multi grader, so there are no parts for a formula.", param="job_id"
        )
    most = min(MAX_RESCORED, MAX_RESCORED_CHARACTERS // max(1, len(formula)))
    if (selected := sum(page.samples for page in pages)) > most:
        raise InvalidRequest(
            f"{selected} answers are selected, and at most {most} are scored at once by a formula of {len(formula)} "
            "characters: select fewer steps with step_from and step_to.",
            param="step_from",
        )
    try:
        score = part_formula(grader, formula)
    except FormulaError as wrong:
        raise InvalidRequest(
            f"Invalid formula: {wrong}. Its names are {', '.join(names)}.", param="formula"
        ) from None
    threshold = evals.pass_threshold(grader) if pass_threshold is None else pass_threshold
    return WhatIfOut.of(formula, threshold, advantage_scale, what_if.rescored(service.blobs, pages, score))


def part_formula(
    grader: Mapping[str, Any], formula: str
) -> Callable[[Mapping[str, float | None]], float | None]:
    """A formula over the scores of a multi grader's parts; None: it has no value, or a part no score.

    Raises:
        FormulaError: it is invalid.
    """
    names = what_if.part_names(grader)
    parsed = Formula.parse(formula, names)

    def score(parts: Mapping[str, float | None]) -> float | None:
        stand_in = grader.get("invalid_grade")
        values = {name: stand_in if parts.get(name) is None else parts[name] for name in names}
        known = {name: value for name, value in values.items() if value is not None}
        if len(known) < len(names):
            return None
        try:
            return parsed.evaluate(known)
        except FormulaDomainError:
            return None

    return score


@router.get("/{job_id}/rollouts/download", response_class=StreamingResponse)
def download_rollouts(
    job_id: str,
    service: ServiceDep,
    pages: Pages,
    wanted: Filters,
    format: Literal["jsonl", "parquet"] = "jsonl",
) -> StreamingResponse:
    """Download all matching samples in one file."""
    headers = NO_RANGES | {"content-disposition": f'attachment; filename="{job_id}-rollouts.{format}"'}
    if format == "jsonl":
        lines = _lines(service, pages, wanted)
        return StreamingResponse(lines, media_type="application/jsonl", headers=headers)
    file = _parquet(service, pages, wanted)
    headers["content-length"] = str(file.seek(0, 2))
    file.seek(0)
    return StreamingResponse(_chunks(file), media_type="application/vnd.apache.parquet", headers=headers)


class TokenOut(BaseModel):
    """The values of a token, with three decimal digits."""

    text: Annotated[str, Field(description="Empty for all but the last token of a character.")]
    logprob: Annotated[float | None, Field(description="Of the sampler; null if the token was not sampled.")]
    advantage: Annotated[
        float | None, Field(description="As used in training; null if it was not trained on.")
    ]
    gap: Annotated[
        float | None,
        Field(description="Log-probability of the trainer less that of the sampler; null if not computed."),
    ]


class RolloutTokens(BaseModel):
    """The values of each token of a sample, its thought and stop token included, with three decimal digits."""

    object: Literal["regraft.rollout_tokens"] = "regraft.rollout_tokens"
    rollout_id: str
    tokens: list[TokenOut]


@router.get("/{job_id}/rollouts/{rollout_id}/tokens", dependencies=SEARCHES)
def list_tokens(job_id: str, rollout_id: str, project: CurrentProject, service: ServiceDep) -> RolloutTokens:
    """Say how likely each token of a sample was, and how it was trained on. Only samples with `has_tokens` have it."""
    place = SamplePosition.parse(rollout_id)
    with service.database.read() as session:
        job = lifecycle.get(session, project.id, job_id)
        page = None if place is None else session.get(RolloutPage, (job.id, place.step, place.split))
    tokens = None if page is None or place is None else rollouts.tokens_at(service.blobs, page, place)
    if tokens is None:
        raise NotFound(
            f"The tokens of '{rollout_id}' are not stored. Rollouts that have them are listed with has_tokens=true.",
            param="rollout_id",
        )
    return RolloutTokens(rollout_id=rollout_id, tokens=[TokenOut(**token) for token in tokens])


@router.get("/{job_id}/metrics", response_model=StepListing)
def list_metrics(
    job_id: str,
    project: CurrentProject,
    session: ReadSession,
    names: Annotated[
        str | None,
        Query(
            max_length=4096,
            description="Only these metrics, separated by commas, such as `kl,timing.step`. By default all: a few "
            "kilobytes for each step.",
        ),
    ] = None,
) -> Response:
    """List the metrics of all finished steps; step 0 is the validation of the base model."""
    job = lifecycle.get(session, project.id, job_id)
    chosen = None if names is None else _chosen(names)
    steps = [
        {"step": step, **(data if chosen is None else _only(data, chosen))}
        for step, data in events.step_data(session, job.id)
    ]
    # Validated again and encoded by FastAPI, five thousand steps take most of a second longer.
    return JSON(StepListing.model_construct(data=steps))


def _chosen(names: str) -> list[list[str]]:
    """The paths of the metrics. Raises InvalidRequest."""
    paths = [name.strip().split(".") for name in names.split(",")]
    for path in paths:
        if path[0] not in StepMetrics.model_fields or len(path) > (2 if path[0] in SECTIONS else 1):
            raise InvalidRequest(f"There is no metric '{'.'.join(path)}'.", param="names")
    return paths


def _only(data: Mapping[str, Any], paths: Sequence[Sequence[str]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, *below in paths:
        if name not in data:
            continue
        if not below:
            kept[name] = data[name]
        elif below[0] in data[name]:
            kept.setdefault(name, {})[below[0]] = data[name][below[0]]
    return kept


def _no_cursor(after: str) -> InvalidRequest:
    return InvalidRequest(f"No item with id '{after}' in this list.", param="after")


def _lines(service: Service, pages: Sequence[RolloutPage], wanted: Wanted) -> Iterator[bytes]:
    for table in rollouts.found_tables(service.blobs, pages, wanted):
        yield "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rollouts.records(table)).encode()


def _parquet(service: Service, pages: Sequence[RolloutPage], wanted: Wanted) -> BinaryIO:
    """The file, on disk and unnamed, so that closing deletes it. Written one row group at a time."""
    file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - closed by the response
    try:
        with pq.ParquetWriter(file, rollouts.SCHEMA, **rollouts.FORMAT) as writer:
            for table in rollouts.found_tables(service.blobs, pages, wanted):
                writer.write_table(table)
    except BaseException:
        file.close()
        raise
    return file


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
