"""/v1/regraft/preview: sample a few rows with the base model before creating a job."""

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field, ValidationError, model_validator

from api.http.admission import AdmittedRequest
from api.http.deps import CurrentProject, Service, ServiceDep
from api.http.openapi import refusals
from api.resources import estimates as sizes
from api.resources.chat import Inference, Upstream, whole
from api.resources.estimates import Asked, Size
from api.resources.graders import TIMEOUT_S
from api.resources.jobs import JobCreate, refuse_unusable
from api.resources.stream import UNBUFFERED
from core.chat import Chat, Served
from core.database.tables import File, Project
from core.disconnect import until_gone
from core.errors import InvalidRequest, NotReady, ServiceError, TooManyAtOnce
from core.jobs import estimates, usage
from core.jobs.estimates import Range
from core.results import evals, preview
from core.results.preview import (
    Grading,
    PreviewAnswer,
    PreviewPrompt,
    PreviewSampling,
    ShownPrompt,
    Signal,
    Spread,
    Verdict,
)
from core.storage import datasets
from core.storage.datasets import Example, LineError
from core.storage.store import BlobStore
from core.tenancy import tenants
from graders.hazards.pool import OWNER
from graders.run import grade_all
from graders.spec import dump
from graders.types import Grade, Sample, TokenUsage, summed

log = logging.getLogger(__name__)

router = APIRouter(prefix="/regraft/preview", tags=["regraft"])

MAX_ANSWERS = 512
PREVIEW = "A preview"
REQUESTS_AT_ONCE = 64
PROGRESS_SECONDS = 0.5

T = TypeVar("T")


class PreviewCreate(JobCreate):
    """The body that would create the job, and the size of the preview."""

    rows: Annotated[int, Field(ge=1, le=32)] = 8
    samples: Annotated[int, Field(ge=2, le=32)] = 8  # per row
    # Server-sent events: `event: progress` while it runs, then `event: preview` or `event: error`, then [DONE].
    stream: bool = False

    @model_validator(mode="after")
    def _bounded(self) -> "PreviewCreate":
        if self.rows * self.samples > MAX_ANSWERS:
            raise ValueError(f"rows x samples may be at most {MAX_ANSWERS}")
        return self


class PreviewOut(Size):
    """The job's size and estimate as in /v1/regraft/estimate, with the measured answer lengths, and the results of the
    preview. core/results/preview.py documents each number."""

    object: Literal["regraft.preview"] = "regraft.preview"
    prompts: list[ShownPrompt]
    answers: int
    passed: int
    pass_threshold: float
    pass_rate: Range | None
    mean_reward: float | None
    signal: list[Signal]
    prompt_tokens: Spread
    completion_tokens: Spread
    cut_off: int
    cut_thoughts: int
    grading: Grading
    sampling: PreviewSampling
    verdict: Verdict
    recommendation: str


@dataclass(frozen=True)
class Prepared:
    """A validated preview and its requests to the inference server."""

    body: PreviewCreate
    project_id: str
    asked: Asked
    rows: Sequence[Example]
    chats: Sequence[dict[str, Any]]  # `samples` per row


@dataclass
class PreviewProgress:
    """How far a preview is; of all answers, those that are sampled, and those that are graded."""

    phase: Literal["loading", "sampling", "grading"]
    of: int
    sampled: int = 0
    graded: int = 0

    def began(self, phase: Literal["sampling", "grading"]) -> None:
        self.phase = phase

    def one_sampled(self) -> None:
        self.sampled += 1

    def one_graded(self) -> None:
        self.graded += 1

    def message(self) -> bytes:
        return _event("progress", {"object": "regraft.preview.progress", **asdict(self)})


@dataclass(frozen=True)
class Completion:
    text: str
    cut_off: bool
    prompt_tokens: int
    tokens: int
    reasoning: str = ""

    @property
    def cut_thought(self) -> bool:
        """Whether the answer ended within its thought."""
        return bool(self.reasoning) and not self.text and self.cut_off


class Slot:
    """A place among the concurrent previews, held until its grading thread has ended.

    That thread continues after a disconnect or a timeout. Otherwise repeated requests could occupy all threads.
    """

    def __init__(self, place: AdmittedRequest) -> None:
        self._place = place
        self._grading: asyncio.Task[Any] | None = None

    async def in_thread(self, call: Callable[[], T]) -> T:
        grading = self._grading = asyncio.create_task(asyncio.to_thread(call))
        return await asyncio.shield(grading)

    def release(self) -> None:
        if self._grading is None:
            self._place.leave()
        else:
            self._grading.add_done_callback(lambda ended: self._place.leave())


def _prepared(body: PreviewCreate, project: Project, service: Service) -> Prepared:
    """Runs in a thread, because it reads the database and files."""
    with service.database.read() as session:
        limits = tenants.limits(project, service.settings.default_limits)
        if (beyond := tenants.used_up(session, project.id, limits)) is not None:
            raise beyond
    asked = sizes.asked(body, project, service)
    rows = _some_rows(service.blobs, asked.training, body.rows, body.seed or 0)
    chats = [_chat(body, asked, row, member) for row in rows for member in range(body.samples)]
    return Prepared(body, project.id, asked, rows, chats)


@router.post("", response_model=PreviewOut, responses=refusals(404, 503))
async def preview_job(
    request: Request,
    body: PreviewCreate,
    project: CurrentProject,
    service: ServiceDep,
    upstream: Inference,
) -> PreviewOut | Response:
    """Sample a few rows with the base model and grade them as the job would. Nothing is created.

    The inference server samples the answers with the job's parameters, and the job's grader judges them. Tokens of
    judges count towards the project's limit.
    """

    async def read() -> Prepared:
        await refuse_unusable(body, service, project)
        return await sizes.in_reader(service, project, partial(_prepared, body, project, service))

    prepared = await until_gone(request.receive, read())
    if prepared is None:
        return Response(status_code=499)
    try:
        slot = Slot(await service.admission.previews.enter(project.id))
    except TooManyAtOnce:
        raise NotReady("Other previews are still running; try again.", retry_after=10) from None
    progress = PreviewProgress("loading", of=len(prepared.chats))
    work = _in_time(_previewed(prepared, service, upstream, slot, progress), service.preview_seconds)
    # A task beside the response, which a server may cancel before it has begun.
    working = asyncio.create_task(until_gone(request.receive, work))
    working.add_done_callback(lambda ended: slot.release())
    if body.stream:
        return StreamingResponse(_told(working, progress), media_type="text/event-stream", headers=UNBUFFERED)
    made = await working
    return Response(status_code=499) if made is None else made


async def _in_time(work: Awaitable[PreviewOut], seconds: float) -> PreviewOut:
    """Raise InvalidRequest if the preview takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise InvalidRequest(
            f"The preview took longer than {seconds:.0f} s. Request fewer rows or samples, or shorter answers.",
            code="preview_too_slow",
        ) from None


async def _told(working: asyncio.Task[PreviewOut | None], progress: PreviewProgress) -> AsyncIterator[bytes]:
    """The progress of a preview at most twice a second, and its report or error, as server-sent events."""
    told = b""
    while not working.done():
        if (message := progress.message()) != told:
            told = message
            yield message
        await asyncio.wait([working], timeout=PROGRESS_SECONDS)
    try:
        made = working.result()
    except ServiceError as refused:
        yield _refused(refused)
    except Exception:
        log.exception("a preview failed")
        yield _refused(ServiceError("The preview failed by an error of the server, which is in its log."))
    else:
        if made is None:  # the client has left
            return
        yield _event("preview", made.model_dump(mode="json"))
    yield b"data: [DONE]\n\n"


def _refused(error: ServiceError) -> bytes:
    """An error as the response would have it, with its status, which a stream that has begun cannot have."""
    return _event("error", {"error": {**error.envelope()["error"], "status": error.status_code}})


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


async def _previewed(
    prepared: Prepared, service: Service, upstream: Upstream, slot: Slot, progress: PreviewProgress
) -> PreviewOut:
    # One token first, so that the time to load the model does not count as sampling time.
    await _complete(upstream, prepared.chats[0] | {"max_completion_tokens": 1}, prepared.rows[0])
    started = time.perf_counter()
    progress.began("sampling")

    async def sampled(chat: dict[str, Any], row: Example) -> Completion:
        completion = await _complete(upstream, chat, row)
        progress.one_sampled()
        return completion

    rows = [row for row in prepared.rows for _ in range(prepared.body.samples)]
    completions = await _all(
        [partial(sampled, chat, row) for chat, row in zip(prepared.chats, rows, strict=True)]
    )
    seconds = time.perf_counter() - started
    progress.began("grading")
    grading = partial(_graded, prepared, service, completions, progress.one_graded)
    grades, tokens = await slot.in_thread(grading)

    size, samples = prepared.asked.settings, prepared.body.samples
    judged = [_answer(*pair, size.supervision == "process") for pair in zip(completions, grades, strict=True)]
    prompts = [
        PreviewPrompt(row.line, completions[first].prompt_tokens, tuple(judged[first : first + samples]))
        for row, first in zip(prepared.rows, range(0, len(judged), samples), strict=True)
    ]
    report = preview.report(
        prompts,
        group_size=size.group_size,
        max_completion_tokens=size.max_completion_tokens,
        context=prepared.asked.model.context,
        pass_threshold=evals.pass_threshold(dump(prepared.body.reinforcement(PREVIEW).grader)),
        sampling_seconds=seconds,
        grader_tokens=tokens,
    )
    estimate = prepared.asked.estimate(
        partial(
            estimates.after_preview,
            lengths=preview.mean_lengths(prompts),
            tokens_per_second=report.sampling.tokens_per_second,
        )
    )
    return PreviewOut(**prepared.asked.size(), **vars(report), estimate=estimate, reason=None)


def _some_rows(blobs: BlobStore, file: File, count: int, seed: int) -> list[Example]:
    """A uniform sample of the rows, or all if there are fewer; only the chosen ones are held in memory.

    Raises:
        InvalidRequest: a line of the file is invalid.
    """
    chosen: list[Example] = []
    draw = random.Random(f"{seed}/preview")
    for number, row in enumerate(datasets.read_rows(blobs.open(file.blob_key))):
        if isinstance(row, LineError):
            raise InvalidRequest(f"{file.id}: {row}", param="training_file")
        if number < count:
            chosen.append(row)
        elif (place := draw.randrange(number + 1)) < count:
            chosen[place] = row
    return sorted(chosen, key=lambda row: row.line)


def _chat(body: PreviewCreate, asked: Asked, row: Example, member: int) -> dict[str, Any]:
    """The request for one answer, with the job's sampling parameters."""
    hyperparameters = body.reinforcement(PREVIEW).hyperparameters
    effort = hyperparameters.reasoning_effort
    digest = hashlib.sha256(f"{body.seed or 0}/preview/{row.line}/{member}".encode()).digest()
    for number, message in enumerate(row.messages):
        if message.get("role") == "tool" or message.get("tool_calls"):
            why = f"messages.{number}: a reinforcement job has no tools"
            raise InvalidRequest(f"line {row.line} cannot be previewed: {why}", param="training_file")
    try:
        chat = Chat.model_validate(
            {
                "model": asked.name,
                # Message weights apply to a supervised loss, which a job does not have.
                "messages": [
                    {key: value for key, value in message.items() if key != "weight"}
                    for message in row.messages
                ],
                "temperature": asked.settings.temperature,
                "max_completion_tokens": asked.settings.max_completion_tokens,
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
    sampling = hyperparameters.advanced.sampling
    served = Served(
        base_model=asked.name,
        chat_template=None if sampling.chat_template == "auto" else sampling.chat_template,
        chat_template_kwargs=sampling.chat_template_kwargs or None,
        thinking_budget=None if sampling.thinking_budget == "auto" else sampling.thinking_budget,
    )
    return chat.model_dump(mode="json", by_alias=True, exclude_none=True) | {"regraft": served.to_wire()}


async def _all(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all calls concurrently and return their results in order; the first error cancels the others."""
    slots = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await call()

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(call)) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


async def _complete(upstream: Upstream, chat: dict[str, Any], row: Example) -> Completion:
    answer = await upstream.send(chat)
    await whole(answer)
    if answer.status_code != 200:
        raise _refusal(row, answer.status_code, answer.json()["error"], answer.headers.get("retry-after"))
    said: dict[str, Any] = answer.json()
    [choice] = said["choices"]
    return Completion(
        text=choice["message"]["content"],
        cut_off=choice["finish_reason"] == "length",
        prompt_tokens=said["usage"]["prompt_tokens"],
        tokens=said["usage"]["completion_tokens"],
        reasoning=choice["message"].get("reasoning_content") or "",
    )


def _refusal(row: Example, status: int, error: dict[str, Any], retry_after: str | None) -> ServiceError:
    """The inference server's error as ours; an error about a chat is one about a row of the file."""
    message, code = error["message"], error["code"]
    if status == 503:
        return NotReady(message, retry_after=int(retry_after) if retry_after else None, code=code)
    if code == "model_not_found":
        return InvalidRequest(f"The inference server: {message}", param="model", code=code)
    if status < 500:
        return InvalidRequest(f"line {row.line}: {message}", param="training_file", code=code)
    return ServiceError(message)


def _graded(
    prepared: Prepared, service: Service, completions: Sequence[Completion], graded: Callable[[], None]
) -> tuple[list[Grade], int]:
    """The grades, and the token usage of judges, which is recorded even after a disconnect.

    Runs in a thread: a grader that computes for a second would block the server's event loop.
    """
    OWNER.set(prepared.project_id)
    reinforcement = prepared.body.reinforcement(PREVIEW)
    parse_json = reinforcement.response_format is not None
    items = [row.item for row in prepared.rows for _ in range(prepared.body.samples)]
    pairs = [
        (
            Sample.from_text(
                completion.text,
                "length" if completion.cut_off else "stop",
                parse_json,
                reasoning=completion.reasoning,
            ),
            item,
        )
        for completion, item in zip(completions, items, strict=True)
    ]

    async def grade() -> list[Grade]:
        async with service.backends.open(reinforcement.grader, owner=prepared.project_id) as grader:
            return await grade_all(grader, pairs, timeout_s=TIMEOUT_S, graded=graded)

    grades = asyncio.run(grade())
    used = sum(summed(grade.usage for grade in grades).values(), TokenUsage())
    tokens = used.prompt_tokens + used.completion_tokens
    if tokens:
        with service.database.write() as session:
            usage.add_usage(session, prepared.project_id, model=prepared.asked.name, grader_tokens=tokens)
    return grades, tokens


def _answer(completion: Completion, grade: Grade, by_steps: bool) -> PreviewAnswer:
    score, reason, taught = grade.score, grade.reason, tuple(step.score for step in grade.steps)
    if score is not None and not by_steps:
        taught = (score,)
    elif score is not None and not taught:
        score, reason = None, "supervision is 'process' and the grader gave no steps for this answer"
    return PreviewAnswer(
        text=completion.text,
        tokens=completion.tokens,
        cut_off=completion.cut_off,
        cut_thought=completion.cut_thought,
        score=score,
        reason=reason,
        grading_seconds=grade.seconds,
        taught=() if score is None else taught,
    )
