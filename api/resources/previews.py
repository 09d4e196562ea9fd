"""/v1/regraft/previews: sample a few rows with the model that a job would start from, before creating the job.

This process runs a preview in the background and stores it (core/results/previews.py).
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from api.http import background as background_runs
from api.http.background import Slot
from api.http.deps import CurrentProject, ReadSession, Service, ServiceDep, UnitOfWork
from api.http.judge_usage import booked_judges
from api.http.openapi import refusals
from api.http.shapes import After, Limit, Listing, RunErrorOut, clamped
from api.resources import estimates as sizes
from api.resources.chat import Inference, Upstream
from api.resources.drawn_rows import draw_rows
from api.resources.estimates import EstimateInputs, Size
from api.resources.graders import TIMEOUT_S
from api.resources.job_body import STORED_GRADER, TAKES_JOB, JobCreate
from api.resources.job_checks import usable_body
from api.resources.preview_answers import Completion, complete, play_episode
from api.resources.rollouts import EpisodeMessages, EpisodeStop, EpisodeTrace
from core.asgi import until_gone
from core.chat import Chat, Served
from core.database.pages import fitting
from core.database.tables import Preview as PreviewRow
from core.database.tables import Project
from core.errors import InvalidRequest
from core.evals import targets
from core.inference import address_of, not_served
from core.jobs import estimates
from core.jobs.params import ENVIRONMENT_PARAM, FORMAT_PARAM
from core.jobs.tools import steps_of, unknown_function, with_functions
from core.masking import hide_in_method
from core.model_templates import files_of, tools_problem
from core.outages import Resource
from core.results import background, evals, preview_report, previews
from core.results.preview_report import (
    Grading,
    PreviewAnswer,
    PreviewPrompt,
    PreviewSampling,
    ShownPrompt,
    Signal,
    Spread,
    Verdict,
)
from core.results.previews import PreviewResults
from core.retry import RetryPolicy
from core.statistics import ShareEstimate
from core.storage.datasets import Example
from core.tenancy import tenants
from core.tool_parsers import NO_FORMAT
from graders.hazards.pool import OWNER
from graders.run import grade_all
from graders.spec import dump
from graders.tools.episode import trace_id
from graders.tools.kinds import ToolServices, ToolSet
from graders.tools.protocol import Tools
from graders.tools.turns import EpisodeTools
from graders.types import Grade

log = logging.getLogger(__name__)

router = APIRouter(prefix="/regraft/previews", tags=["regraft"])

MAX_ANSWERS = 512
PREVIEW = "A preview"
REQUESTS_AT_ONCE = 64
# Of the answers and rows of one page: a row may have megabytes, and each of its answers repeats it.
MAX_LISTED_BYTES = 8 << 20

T = TypeVar("T")


class PreviewCreate(JobCreate):
    """The body that would create the job, and the size of the preview."""

    rows: Annotated[int, Field(ge=1, le=32)] = 8
    samples: Annotated[int, Field(ge=2, le=32)] = 8  # per row

    @field_validator("preview")
    @classmethod
    def _is_new(cls, named: str | None) -> None:
        if named is not None:
            raise ValueError("a preview is not made from another one")

    @model_validator(mode="after")
    def _bounded(self) -> "PreviewCreate":
        if self.rows * self.samples > MAX_ANSWERS:
            raise ValueError(f"rows x samples may be at most {MAX_ANSWERS}")
        return self


class PreviewReportOut(Size):
    """The job's size and estimate as in /v1/regraft/estimate, with the measured answer lengths, and the results of the
    preview. docs/howto/preview.md documents each number."""

    prompts: list[ShownPrompt]
    answers: int
    passed: int
    pass_threshold: float
    pass_rate: Annotated[ShareEstimate | None, Field(description="Of the graded answers; null without any.")]
    mean_reward: float | None
    signal: list[Signal]
    prompt_tokens: Spread
    completion_tokens: Spread
    cut_off: Annotated[int, Field(description="Answers that reached the token limit.")]
    cut_thoughts: Annotated[int, Field(description="Of these, within the thought of a reasoning model.")]
    grading: Grading
    sampling: PreviewSampling
    verdict: Verdict
    recommendation: str


class PreviewProgressOut(BaseModel):
    """How far a preview is; of all answers, those that are sampled, and those that are graded."""

    phase: Literal["loading", "sampling", "grading"]
    of: int
    sampled: int
    graded: int
    waiting_for: Annotated[
        str | None,
        Field(
            description="The unavailable part, such as the inference server, if the preview waits for one."
        ),
    ] = None


class PreviewOut(BaseModel):
    """A preview. `request` is the body that created it; values of grader headers are masked."""

    id: str
    object: Literal["regraft.preview"] = "regraft.preview"
    created_at: int
    finished_at: int | None
    status: str = Field(description="in_progress, completed, failed or canceled.")
    request: dict[str, Any]
    answers_of: Annotated[
        str | None,
        Field(description="The earlier preview whose answers this one grades; null: it sampled its own."),
    ]
    progress: PreviewProgressOut
    report: Annotated[PreviewReportOut | None, Field(description="Once it is completed.")]
    error: RunErrorOut | None

    @classmethod
    def of(cls, row: PreviewRow) -> "PreviewOut":
        error = background.error_of(row)
        request = dict(row.request)
        return cls(
            id=row.id,
            created_at=row.created_at,
            finished_at=row.finished_at,
            status=background.status_of(row),
            answers_of=request.pop("answers_of"),
            request=request,
            progress=PreviewProgressOut(**row.progress),
            report=None if row.report is None else PreviewReportOut(**row.report),
            error=None if error is None else RunErrorOut(**error),
        )


class PreviewAnswerOut(BaseModel):
    """An answer and its grade."""

    id: str
    line: Annotated[int, Field(description="Line of the training file.")]
    member: Annotated[int, Field(description="Index of the answer among those of its row.")]
    output_text: str
    output_reasoning: str | None
    output_tools: Annotated[list[dict[str, Any]], Field(description="The calls of functions in the answer.")]
    conversation: EpisodeMessages
    stop: EpisodeStop
    trace_id: EpisodeTrace
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    score: Annotated[float | None, Field(description="null: could not be graded; see `reason`.")]
    reason: str
    sub_scores: dict[str, float | None] | None
    output: Annotated[str | None, Field(description="Printed by the grader.")]
    item: Annotated[dict[str, Any], Field(description="The dataset row as graders see it.")]


class PreviewDeleted(BaseModel):
    object: Literal["regraft.preview.deleted"] = "regraft.preview.deleted"
    deleted: Literal[True] = True
    id: str


@dataclass(frozen=True)
class Prepared:
    """A validated preview and its requests to the inference server."""

    body: PreviewCreate
    project_id: str
    inputs: EstimateInputs
    rows: Sequence[Example]
    chats: Sequence[dict[str, Any]]  # `samples` per row
    parts: dict[str, str]
    # Of an earlier preview that differs at most in its grader, and the seconds that they took.
    earlier: tuple[str, Sequence["Completion"], float] | None

    @property
    def steps(self) -> int:
        """The most answers of the model in an episode."""
        return steps_of(self.body.method_body())

    def tools(self, service: Service) -> Tools | None:
        """Those of the job; None: calls of functions are not executed."""
        rows = self.body.method_body().get("tools")
        if rows is None:
            return None
        return ToolSet.of(
            rows, ToolServices(service.backends.endpoints, service.backends.environments, self.project_id)
        )

    def row(self) -> PreviewRow:
        """The row of a preview that begins."""
        body = self.body
        method = {name: value for name, value in body.method_body().items() if name != STORED_GRADER}
        request = {
            "model": body.model,
            "training_file": body.training_file,
            "validation_file": body.validation_file,
            "validation_split": body.validation_split,
            "method": {
                "type": "reinforcement",
                "reinforcement": {**hide_in_method(method), "grader": _masked(body)},
            },
            **_drawn(body),
            "answers_of": None if self.earlier is None else self.earlier[0],
        }
        return PreviewRow(
            project_id=self.project_id,
            request=request,
            parts=self.parts,
            training_sha256=self.inputs.training.sha256,
            progress=asdict(PreviewProgress("loading", of=len(self.chats))),
        )


@dataclass
class PreviewProgress:
    """How far a preview is; of all answers, those that are sampled, and those that are graded."""

    phase: Literal["loading", "sampling", "grading"]
    of: int
    sampled: int = 0
    graded: int = 0
    waiting_for: str | None = None

    def began(self, phase: Literal["sampling", "grading"]) -> None:
        """Grading may begin again, after an outage."""
        self.phase, self.graded = phase, 0

    def one_sampled(self) -> None:
        self.sampled += 1

    def one_graded(self) -> None:
        self.graded += 1

    @contextmanager
    def waiting(self, resource: Resource) -> Iterator[None]:
        """A request waits for the resource. The first of several that has it again says so for all."""
        self.waiting_for = resource.value
        try:
            yield
        finally:
            self.waiting_for = None


def _prepared(body: PreviewCreate, project: Project, service: Service) -> Prepared:
    """Runs in a thread, because it reads the database and files."""
    with service.database.read() as session:
        limits = tenants.limits(project, service.settings.default_limits)
        if (beyond := tenants.used_up(session, project.id, limits)) is not None:
            raise beyond
        tenants.free_storage(session, project.id, limits)
    asked = sizes.estimate_inputs(body, project, service)
    rows, _ = draw_rows(service.blobs, asked.training, body.rows, body.seed or 0)
    weights = _weights(body, asked, project, service)
    _refuse_mismatch(body, rows)
    rows = with_functions(body.method_body(), rows)
    _refuse_tools(body, asked, rows, service)
    chats = [_chat(body, asked, weights, row, member) for row in rows for member in range(body.samples)]
    wanted = previews.parts_of(
        body.model, asked.model, body.method_body(), asked.settings, asked.training.sha256
    )
    answered = _earlier(body, project, service, asked, wanted)
    return Prepared(body, project.id, asked, rows, chats, wanted, answered)


def _earlier(
    body: PreviewCreate, project: Project, service: Service, inputs: EstimateInputs, wanted: dict[str, str]
) -> tuple[str, Sequence["Completion"], float] | None:
    """The earlier preview whose answers this one grades; None: it samples its own.

    Those of a job with tools are never graded again: what the tools did may differ now, and headers are not compared.
    """
    if body.reinforcement(PREVIEW).tools is not None:
        return None
    with service.database.read() as session:
        earlier = previews.sampled(session, project.id, inputs.training.sha256, wanted, _drawn(body))
    if earlier is None or earlier.report is None:
        return None
    completions = [Completion.of_answer(answer) for answer in earlier.answers or []]
    return earlier.id, completions, earlier.report["sampling"]["seconds"]


def _refuse_mismatch(body: PreviewCreate, rows: Sequence[Example]) -> None:
    """Raise InvalidRequest for an agent, and for functions of rows that no tool of the job executes."""
    if body.reinforcement(PREVIEW).environment is not None:
        message = "Previews do not wait for an agent. Leave 'environment' and 'max_episode_steps' out."
        raise InvalidRequest(message, param=ENVIRONMENT_PARAM)
    unknown = unknown_function(body.method_body(), [(row.line, row.tools) for row in rows])
    if unknown is not None:
        raise InvalidRequest(unknown, param="training_file")


def _refuse_tools(
    body: PreviewCreate, inputs: EstimateInputs, rows: Sequence[Example], service: Service
) -> None:
    """Raise InvalidRequest for a row with tools that the model cannot have, as the validation of the job does."""
    line = next((row.line for row in rows if row.tools), None)
    if line is None:
        return
    template = body.reinforcement(PREVIEW).hyperparameters.advanced.sampling.chat_template
    files = files_of(inputs.model, service.settings.model_cache, template)
    if files is not None and (
        problem := tools_problem(inputs.name, inputs.model.tool_parser, files.template_for_tools)
    ):
        raise InvalidRequest(f"line {line} has tools, and {problem}", param="training_file")
    if body.reinforcement(PREVIEW).response_format is not None:
        message = f"line {line} of the training_file has tools: {NO_FORMAT}"
        raise InvalidRequest(message, param=FORMAT_PARAM)


def _weights(body: PreviewCreate, inputs: EstimateInputs, project: Project, service: Service) -> Served:
    """Resolve the weights that the job starts from: of a base model, or of a tuned model that it trains further.

    Raises:
        InvalidRequest: the files of the tuned model were deleted.
    """
    with service.database.read() as session:
        weights = targets.served(session, service.blobs, service.registry, project.id, body.model)
    if weights is None:
        raise InvalidRequest(
            f"The files of '{body.model}' were deleted, so it cannot be used.",
            param="model",
            code="model_not_available",
        )
    sampling = body.reinforcement(PREVIEW).hyperparameters.advanced.sampling
    return weights.model_copy(
        update={
            "chat_template": None if sampling.chat_template == "auto" else sampling.chat_template,
            "chat_template_kwargs": sampling.chat_template_kwargs or None,
            "thinking_budget": None if sampling.thinking_budget == "auto" else sampling.thinking_budget,
        }
    )


def _refuse_unserved(upstream: Upstream, model: str) -> None:
    """Raise InvalidRequest if this installation has no inference server for the model."""
    if not address_of(upstream.url, model):
        raise not_served(model)


def _drawn(body: PreviewCreate) -> dict[str, int]:
    """Which rows are drawn, and how many answers to each."""
    return {"rows": body.rows, "samples": body.samples, "seed": body.seed or 0}


def _masked(body: PreviewCreate) -> dict[str, Any]:
    return dump(body.reinforcement(PREVIEW).grader, masked=True)


@router.post(
    "", status_code=201, response_model=PreviewOut, responses=refusals(404, 503), dependencies=TAKES_JOB
)
async def create_preview(
    request: Request,
    body: PreviewCreate,
    project: CurrentProject,
    service: ServiceDep,
    upstream: Inference,
    uow: UnitOfWork,
) -> PreviewOut | Response:
    """Sample a few rows with the job's model and grade them as the job would, in the background.

    The inference server samples the answers with the job's parameters, and the job's grader judges them. Tokens of
    judges count towards the project's limit. Answers of an earlier preview that differs only in its grader are graded
    instead of sampled again, unless the job has tools.
    """

    async def read() -> Prepared:
        usable = await usable_body(body, service, project)
        return await sizes.in_reader(service, project, partial(_prepared, usable, project, service))

    prepared = await until_gone(request.receive, read())
    if prepared is None:
        return Response(status_code=499)
    if prepared.earlier is None:
        _refuse_unserved(upstream, prepared.inputs.name)
    slot = await background_runs.enter(service, project)

    def add() -> PreviewOut:
        with uow() as work:
            row = prepared.row()
            previews.add(work, row)
            return PreviewOut.of(row)

    async def run(added: PreviewOut) -> None:
        await _run(added.id, prepared, service, upstream, slot)

    return await background_runs.begin(service, slot, add, run)


@router.get("")
def list_previews(
    project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[PreviewOut]:
    """List the previews of the project, newest first."""
    page = background.page(session, PreviewRow, project.id, after=after, limit=clamped(limit))
    return Listing(data=[PreviewOut.of(row) for row in page.items], has_more=page.has_more)


@router.get("/{preview_id}")
def retrieve_preview(preview_id: str, project: CurrentProject, session: ReadSession) -> PreviewOut:
    """Retrieve a preview: how far it is, and its report once it is completed."""
    return PreviewOut.of(previews.get(session, project.id, preview_id))


@router.get("/{preview_id}/answers")
def list_preview_answers(
    preview_id: str, project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[PreviewAnswerOut]:
    """List the answers and grades of a completed preview, by line. A page also ends at 8 MiB, whatever its `limit`."""
    most = clamped(limit)
    stored = previews.answers(session, previews.get(session, project.id, preview_id))
    items = {one["line"]: one["item"] for one in stored if "item" in one}
    first = 0
    if after is not None:
        first = next((place + 1 for place in range(len(stored)) if _answer_id(place) == after), 0)
        if not first:
            raise InvalidRequest(f"No item with id '{after}' in this list.", param="after")
    page = stored[first : first + most]
    item_bytes = {line: len(json.dumps(item)) for line, item in items.items()}  # which each answer repeats
    answer_bytes = (item_bytes.get(one["line"], 0) + len(json.dumps(one | {"item": None})) for one in page)
    shown = fitting(answer_bytes, MAX_LISTED_BYTES)
    data = [
        PreviewAnswerOut(id=_answer_id(place), **one | {"item": items.get(one["line"])})
        for place, one in enumerate(page[:shown], first)
    ]
    return Listing(data=data, has_more=len(stored) > first + shown)


def _answer_id(place: int) -> str:
    return f"previewanswer_{place}"


@router.post("/{preview_id}/cancel")
def cancel_preview(preview_id: str, project: CurrentProject, uow: UnitOfWork) -> PreviewOut:
    """Cancel a preview. One that has ended stays as it is."""
    with uow() as work:
        row = previews.get(work.session, project.id, preview_id)
        previews.cancel(work, row)
        return PreviewOut.of(row)


@router.delete("/{preview_id}")
def delete_preview(preview_id: str, project: CurrentProject, uow: UnitOfWork) -> PreviewDeleted:
    """Delete a preview and its answers. One in progress is canceled."""
    with uow() as work:
        previews.remove(work, previews.get(work.session, project.id, preview_id))
    return PreviewDeleted(id=preview_id)


async def _run(preview_id: str, prepared: Prepared, service: Service, upstream: Upstream, slot: Slot) -> None:
    progress = PreviewProgress("loading", of=len(prepared.chats))
    await background_runs.run(
        service,
        PreviewRow,
        preview_id,
        _previewed(preview_id, prepared, service, upstream, slot, progress),
        what="preview",
        too_slow=InvalidRequest(
            f"The preview took longer than {service.preview_seconds:.0f} s. Request fewer rows or samples, or shorter "
            "answers.",
            code="preview_too_slow",
        ),
        progress=lambda: asdict(progress),
        complete=previews.complete,
    )


async def _previewed(
    preview_id: str,
    prepared: Prepared,
    service: Service,
    upstream: Upstream,
    slot: Slot,
    progress: PreviewProgress,
) -> PreviewResults:
    retry = RetryPolicy(service.preview_load_seconds, log.warning, during=progress.waiting)
    tools = prepared.tools(service)
    completions, seconds = await _sampled(preview_id, prepared, tools, upstream, progress, retry)
    grading = partial(_graded, prepared, service, completions, progress.one_graded)

    async def graded() -> tuple[list[Grade], int]:
        progress.began("grading")
        return await slot.in_thread(grading)

    grades, tokens = await retry.call_async(graded)

    size, samples = prepared.inputs.settings, prepared.body.samples
    judged = [_answer(*pair, size.supervision == "process") for pair in zip(completions, grades, strict=True)]
    prompts = [
        PreviewPrompt(row.line, completions[first].prompt_tokens, tuple(judged[first : first + samples]))
        for row, first in zip(prepared.rows, range(0, len(judged), samples), strict=True)
    ]
    report = preview_report.report(
        prompts,
        group_size=size.group_size,
        max_completion_tokens=size.max_completion_tokens,
        context=prepared.inputs.model.context,
        pass_threshold=evals.pass_threshold(dump(prepared.body.reinforcement(PREVIEW).grader)),
        sampling_seconds=seconds,
        grader_tokens=tokens,
    )
    lengths, speed = preview_report.mean_lengths(prompts), report.sampling.tokens_per_second
    estimate = prepared.inputs.estimate(
        partial(estimates.after_preview, lengths=lengths, tokens_per_second=speed)
    )
    made = PreviewReportOut(**prepared.inputs.size(), **vars(report), estimate=estimate, reason=None)
    places = [(row, member) for row in prepared.rows for member in range(samples)]
    answers = [
        _answer_fields(row, member, completion, grade, answer)
        for (row, member), completion, grade, answer in zip(places, completions, grades, judged, strict=True)
    ]
    return PreviewResults(
        report=made.model_dump(mode="json"),
        measured={"lengths": lengths, "tokens_per_second": speed},
        answers=answers,
    )


async def _sampled(
    preview_id: str,
    prepared: Prepared,
    tools: Tools | None,
    upstream: Upstream,
    progress: PreviewProgress,
    retry: RetryPolicy,
) -> tuple[Sequence[Completion], float]:
    """The answers, and how long they took.

    Args:
        tools: of the job; None: its calls of functions are not executed.
        retry: for a server that starts, was stopped, or loads the model.
    """
    OWNER.set(prepared.project_id)  # the arguments of calls are checked in the pool of hazards
    if prepared.earlier is not None:
        _, completions, seconds = prepared.earlier
        progress.sampled = len(completions)
        return completions, seconds
    # One token first, so that the time to load the model does not count as sampling time.
    first = prepared.chats[0] | {"max_completion_tokens": 1}
    await retry.call_async(partial(complete, upstream, first, prepared.rows[0]))
    started = time.perf_counter()
    progress.began("sampling")

    async def completed(row: Example, chat: dict[str, Any]) -> Completion:
        return await retry.call_async(partial(complete, upstream, chat, row))

    async def sampled(chat: dict[str, Any], row: Example, member: int) -> Completion:
        one = partial(completed, row)
        if tools is None:
            completion = await one(chat)
        else:
            trace = trace_id(preview_id, "preview", row.line, 0, member)
            episode = EpisodeTools(tools, row.tools, row.item, trace)
            context = prepared.inputs.model.context
            completion = await play_episode(one, chat, episode, prepared.steps, context)
        progress.one_sampled()
        return completion

    places = [(row, member) for row in prepared.rows for member in range(prepared.body.samples)]
    made = await _all(
        [partial(sampled, chat, *place) for chat, place in zip(prepared.chats, places, strict=True)]
    )
    return made, time.perf_counter() - started


def _answer_fields(
    row: Example, member: int, completion: Completion, grade: Grade, answer: PreviewAnswer
) -> dict[str, Any]:
    """An answer as the preview has it. Only the first of a dataset row has the row, which may be large."""
    return {
        "line": row.line,
        "member": member,
        "output_text": completion.text,
        "output_reasoning": completion.reasoning or None,
        "output_tools": list(completion.tool_calls),
        **completion.episode_fields(),
        "finish_reason": "length" if completion.cut_off else "stop",
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.tokens,
        "score": answer.score,
        "reason": answer.reason,
        "sub_scores": {name: part.score for name, part in grade.sub_grades.items()} or None,
        "output": grade.output or None,
    } | ({"item": row.item} if member == 0 else {})


def _chat(
    body: PreviewCreate, inputs: EstimateInputs, weights: Served, row: Example, member: int
) -> dict[str, Any]:
    """The request for one answer, with the job's sampling parameters."""
    hyperparameters = body.reinforcement(PREVIEW).hyperparameters
    effort = hyperparameters.reasoning_effort
    digest = hashlib.sha256(f"{body.seed or 0}/preview/{row.line}/{member}".encode()).digest()
    try:
        chat = Chat.model_validate(
            {
                "model": inputs.name if weights.adapter is None else body.model,
                # Message weights apply to a supervised loss, which a job does not have.
                "messages": [
                    {key: value for key, value in message.items() if key != "weight"}
                    for message in row.messages
                ],
                "tools": row.tools or None,
                "parallel_tool_calls": row.item.get("parallel_tool_calls") if row.tools else None,
                "temperature": inputs.settings.temperature,
                "max_completion_tokens": inputs.settings.max_completion_tokens,
                "response_format": body.reinforcement(PREVIEW).response_format,
                "seed": int.from_bytes(digest[:8], "big") >> 2,
                "reasoning_effort": None if effort == "default" else effort,
            }
        )
    except ValidationError as invalid:
        first = invalid.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(
            f"line {row.line} cannot be previewed: {where}: {first['msg']}", param="training_file"
        ) from None
    return chat.model_dump(mode="json", by_alias=True, exclude_none=True) | {"regraft": weights.to_wire()}


async def _all(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all calls concurrently and return their results in order; the first error cancels the others."""
    slots = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def in_slot(call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await call()

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(in_slot(call)) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


def _graded(
    prepared: Prepared, service: Service, completions: Sequence[Completion], graded: Callable[[], None]
) -> tuple[list[Grade], int]:
    """The grades, and the tokens that judges used, which are booked however the preview ends.

    Runs in a thread: a grader that computes for a second would block the server's event loop.
    """
    OWNER.set(prepared.project_id)
    reinforcement = prepared.body.reinforcement(PREVIEW)
    parse_json = reinforcement.response_format is not None
    items = [row.item for row in prepared.rows for _ in range(prepared.body.samples)]
    pairs = [
        (completion.sample(parse_json=parse_json), item)
        for completion, item in zip(completions, items, strict=True)
        if completion.discarded is None
    ]

    async def grade() -> tuple[list[Grade], int]:
        owner = prepared.project_id
        async with (
            booked_judges(service, owner, prepared.inputs.name) as ledger,
            service.backends.open(reinforcement.grader, owner=owner, ledger=ledger) as grader,
        ):
            return await grade_all(grader, pairs, timeout_s=TIMEOUT_S, graded=graded), ledger.total

    grades, tokens = asyncio.run(grade())
    left = iter(grades)
    return [completion.discarded or next(left) for completion in completions], tokens


def _answer(completion: Completion, grade: Grade, by_steps: bool) -> PreviewAnswer:
    score, reason, rewards = grade.score, grade.reason, tuple(step.score for step in grade.steps)
    if score is not None and not by_steps:
        rewards = (score,)
    elif score is not None and not rewards:
        score, reason = None, "supervision is 'process' and the grader gave no steps for this answer"
    return PreviewAnswer(
        text=completion.text,
        tokens=completion.tokens,
        cut_off=completion.cut_off,
        cut_thought=completion.cut_thought,
        score=score,
        reason=reason,
        grading_seconds=grade.seconds,
        rewards=() if score is None else rewards,
    )
