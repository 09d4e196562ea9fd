"""client.jobs: OpenAI's fine_tuning.jobs, extended by watching, waiting and cloning."""

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args, overload

import openai
from openai import AsyncStream
from openai.resources.fine_tuning.jobs import AsyncJobs as OpenAIAsyncJobs
from openai.types.fine_tuning import FineTuningJob

from regraft import datasets
from regraft._rules.datasets import InvalidDataset
from regraft._rules.states import JOB
from regraft.display import Display
from regraft.errors import JobFailed
from regraft.jobs import JobEvent, grader_of, result_of, verdict_of
from regraft.literals import Method, Split
from regraft.notebook import PLOTTED, plot_reward
from regraft.progress import axis_of
from regraft.requests import InvalidRequestFile, JobRequest, Source, read_grader, read_job, refuse_masked
from regraft.resources.waiting import retry_in
from regraft.routes import listed, route
from regraft.types import Curve, JobComparison, JobLedger, Verdict

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Steps = list[dict[str, Any]]
VALIDATE = "/regraft/jobs/validate"
METHODS: tuple[Method, ...] = get_args(Method)
SPLITS: dict[str, Split] = {"training_file": "train", "validation_file": "valid"}
# The server sends a keep-alive every 15 seconds; after a minute without one the connection is dead.
SILENCE_SECONDS = 60.0

# An event, a new status, or what the job does inside of its step.
News = JobEvent | str | Mapping[str, Any]


@dataclass
class Cursor:
    """The position in a stream of events, across its connections."""

    job_id: str
    last: str | None
    status: str = ""
    failures: int = 0

    @property
    def path(self) -> str:
        return route("/regraft/jobs", self.job_id, "stream") + "?progress=true"

    @property
    def options(self) -> Any:
        headers = {} if self.last is None else {"Last-Event-ID": self.last}
        # Retries are up to `retry_in` alone.
        return {"headers": headers, "timeout": SILENCE_SECONDS, "max_retries": 0}

    def read(self, message: object) -> News:
        assert isinstance(message, dict)
        self.failures = 0
        if message.get("object") == "regraft.job.status":
            self.status = message["status"]
            return self.status
        if message.get("object") in ("regraft.job.progress", "regraft.job.queue"):
            return message
        event = JobEvent.construct(**message)
        self.last = event.id
        return event

    def retry_in(self, error: openai.APIError | None) -> float:
        """Seconds until the next connection; raises the error if it is permanent. None: the stream just ended."""
        self.failures += 1
        ended = openai.OpenAIError(f"The stream of {self.job_id} ended before the job.")
        return retry_in(error or ended, self.failures)


class Curves(openai.BaseModel):
    data: list[Curve]


class AsyncJobs(OpenAIAsyncJobs):
    """Everything of OpenAI's `client.fine_tuning.jobs`, and more."""

    async def submit(self, request: Source, *, set: Sequence[str] = ()) -> FineTuningJob:
        """Create a job from a job file or its content; local files are validated and uploaded first.

        `set` overrides fields, as in ["hyperparameters.n_epochs=2"]. A retry after a lost response does not create a
        second
        job.
        """
        return await self._create(await self.prepare(request, set=set))

    async def prepare(self, request: Source, *, set: Sequence[str] = ()) -> dict[str, Any]:
        """Upload the files and return the body that `submit` sends, for `client.estimate` and `client.preview`.

        Raises:
            InvalidDataset: a local file has invalid rows. Nothing was uploaded.
        """
        job, files = read_job(request, set), self._client.files
        await asyncio.to_thread(validate_local, job)
        # One file for both fields is uploaded once, so that the service knows that it is one.
        ids = {path: (await files.create(file=path, purpose="fine-tune")).id for path in job.distinct_uploads}
        return job.with_ids({field: ids[path] for field, path in job.uploads.items()})

    async def validate(self, request: Source, *, set: Sequence[str] = ()) -> Any:
        """Validate a job file with the server, and its local files by the rules for rows. Uploads nothing.

        Returns the server's response: the job's normalized `model` and `method`, and `warnings`.

        Raises:
            openai.BadRequestError: as on creation.
            InvalidDataset: a local file has invalid rows.
        """
        job = read_job(request, set)
        answer: Any = await self._client.post(VALIDATE, body=validation(job), cast_to=object)
        await asyncio.to_thread(validate_local, job)
        return answer

    async def clone(
        self, job_id: str, *, set: Sequence[str] = (), grader: Source | None = None
    ) -> FineTuningJob:
        """Create a copy of a job, with the changes in `set`; it has the same seed unless that is changed.

        Raises:
            InvalidRequestFile: the job's grader has secrets, which the server does not show. Pass a `grader`.
        """
        asked: Any = await self._client.get(route("/regraft/jobs", job_id, "request"), cast_to=object)
        return await self._create(_changed(asked, set, grader))

    async def curves(self, job_ids: Sequence[str]) -> list[Curve]:
        """Return the validations of up to 100 jobs as short curves, in the order of the ids."""
        return (await self._client.get(f"/regraft/curves?jobs={listed(job_ids)}", cast_to=Curves)).data

    async def compare(self, first: str, *others: str) -> JobComparison:
        """Compare the validated rewards of jobs prompt by prompt with those of the first, and their requests."""
        return await self._client.get(_comparison(first, others), cast_to=JobComparison)

    async def ledger(self, job_id: str) -> JobLedger:
        """Return what the tokens and the GPU time of a job taught, by step and in all."""
        return await self._client.get(route("/regraft/jobs", job_id, "ledger"), cast_to=JobLedger)

    async def ledger_csv(self, job_id: str) -> str:
        """Return the ledger as CSV, with a row for each step and bucket."""
        return await self._client.get(route("/regraft/jobs", job_id, "ledger", "download"), cast_to=str)

    async def passport(self, job_id: str, *, checkpoint_id: str | None = None) -> dict[str, Any]:
        """Return the signed statement about the job's model, or about another checkpoint of the job.

        `regraft verify` verifies it. The server signs nothing without a key (NotFoundError, code `no_passport_key`).
        """
        path = route("/regraft/jobs", job_id, "passport")
        answer: Any = await self._client.get(path, cast_to=object, options=_of_checkpoint(checkpoint_id))
        return dict(answer)

    async def watch(self, job_id: str, *, after: str | None = None) -> AsyncIterator[JobEvent]:
        """Yield the job's events as they occur, from the first or after `after`, until the job ends or is paused.

        Reconnects when the connection breaks, without gaps or duplicates.
        """
        async with aclosing(self._follow(Cursor(job_id, after))) as news:
            async for one in news:
                if isinstance(one, JobEvent):
                    yield one

    async def wait(self, job_id: str, *, progress: bool | TextIO = False) -> FineTuningJob:
        """Wait until the job has succeeded or is paused, and return it.

        `progress` displays it on stderr, or on the given stream. Ctrl-C stops waiting; the job continues.

        Raises:
            JobFailed: it failed or was cancelled.
        """
        display = _display(progress, await self.retrieve(job_id)) if progress else None
        try:
            async for one in self._follow(Cursor(job_id, None)):
                if display:
                    _show(display, one)
        except asyncio.CancelledError:
            _say_it_goes_on(display, job_id)
            raise
        finally:
            if display:
                display.close()
        return _or_raise(await self.retrieve(job_id))

    async def verdict(self, job_id: str) -> Verdict | None:
        """Whether the delivered model is better than its base; None before the end, or without a comparison."""
        return verdict_of(await self.retrieve(job_id))

    @overload
    async def metrics(
        self, job_id: str, *, frame: Literal[True], names: Sequence[str] = ()
    ) -> "pandas.DataFrame": ...
    @overload
    async def metrics(self, job_id: str, *, frame: Literal[False], names: Sequence[str] = ()) -> Steps: ...
    @overload
    async def metrics(self, job_id: str, *, frame: None = None, names: Sequence[str] = ()) -> Any: ...
    async def metrics(self, job_id: str, *, frame: bool | None = None, names: Sequence[str] = ()) -> Any:
        """One row per step: a DataFrame indexed by step if pandas is installed, else a list of dicts.

        Args:
            frame: selects one of the two. Nested numbers become columns such as "timing.step.eval".
            names: only these metrics, such as "kl" or "timing.step"; default: all.

        Raises:
            openai.BadRequestError: there is no such metric.
        """
        options: Any = {"params": {"names": ",".join(names)} if names else {}}
        path = route("/regraft/jobs", job_id, "metrics")
        found: Any = await self._client.get(path, cast_to=object, options=options)
        return _framed(found["data"], frame)

    async def plot(self, job_id: str, *, axes: "Axes | None" = None) -> "Axes":
        """Draw the rewards of a job with the delivered step, for a notebook; see regraft.notebook.plot_reward.

        Raises:
            CannotShow: no step has a reward.
            ImportError: matplotlib is missing.
        """
        result = result_of(await self.retrieve(job_id))
        return plot_reward(await self.metrics(job_id, frame=False, names=PLOTTED), result, axes)

    async def _create(self, body: dict[str, Any]) -> FineTuningJob:
        return await self._client.post("/fine_tuning/jobs", body=body, cast_to=FineTuningJob, options=_once())

    async def _follow(self, cursor: Cursor) -> AsyncGenerator[News, None]:
        while True:
            failed: openai.APIError | None = None
            try:
                async with await self._client.get(
                    cursor.path,
                    cast_to=object,
                    options=cursor.options,
                    stream=True,
                    stream_cls=AsyncStream[object],
                ) as stream:
                    async for message in stream:
                        yield cursor.read(message)
                        if cursor.status in JOB.stopped:
                            return
            except openai.APIError as error:
                failed = error
            await asyncio.sleep(cursor.retry_in(failed))


def validation(job: JobRequest) -> dict[str, Any]:
    """The body of a validation request for the job."""
    return {"job": job.body, "local_files": list(job.uploads)}


def validate_local(job: JobRequest) -> None:
    """Raise InvalidDataset for the first local file of the job with bad rows."""
    method = job.body.get("method") or {"type": "supervised"}
    kind = method.get("type") if isinstance(method, dict) else None
    if kind not in METHODS:
        return  # the server says so
    inside = method.get(kind)
    grader = inside.get("grader") if isinstance(inside, dict) else None
    mode = inside.get("mode") if isinstance(inside, dict) else None
    # Distillation in the mode `logits` learns from rows of supervised jobs.
    rows: Method = "supervised" if kind == "distillation" and mode == "logits" else kind
    for field, split in SPLITS.items():
        if field in job.uploads:
            try:
                datasets.validate(job.uploads[field], grader=grader, split=split, method=rows)
            except InvalidDataset as bad:
                bad.file = str(job.uploads[field])
                raise


def _comparison(first: str, others: Sequence[str]) -> str:
    return route("/regraft/jobs", first, "compare") + f"?other={listed(others)}"


def _of_checkpoint(checkpoint_id: str | None) -> Any:
    return {"params": {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id}}


def _once() -> Any:
    # The client retries after a lost response; the server recognizes the request by this key.
    return {"headers": {"Idempotency-Key": str(uuid.uuid4())}}


def _changed(body: dict[str, Any], changes: Sequence[str], grader: Source | None) -> dict[str, Any]:
    if grader is not None:
        body["method"]["reinforcement"]["grader"] = read_grader(grader)
    job = read_job(body, changes)
    if job.uploads:
        raise InvalidRequestFile("A clone uses the files of its job; to train on others, submit a job file.")
    refuse_masked(job.body)
    return job.body


def _framed(steps: Steps, frame: bool | None) -> Any:
    if frame is False:
        return steps
    try:
        import pandas
    except ImportError:
        if frame:
            raise
        return steps
    table = pandas.json_normalize(steps)
    return table.set_index("step") if steps else table


def _or_raise(job: FineTuningJob) -> FineTuningJob:
    if job.status in ("failed", "cancelled"):
        raise JobFailed(job)
    return job


def _display(progress: bool | TextIO, job: FineTuningJob) -> Display:
    return Display(sys.stderr if isinstance(progress, bool) else progress, axis_of(grader_of(job)))


def _show(display: Display, news: News) -> None:
    if isinstance(news, str):
        display.status(news)
    elif isinstance(news, JobEvent):
        display.event(news)
    elif news.get("object") == "regraft.job.queue":
        display.queued(news)
    else:
        display.inside_step(news)


def _say_it_goes_on(display: Display | None, job_id: str) -> None:
    if display:
        display.close()
        print(
            f"The job {job_id} continues; `regraft jobs watch {job_id}` watches it again.", file=display.out
        )
