"""client.jobs: OpenAI's fine_tuning.jobs, and following, waiting for and repeating them."""

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO, overload

import openai
from openai import AsyncStream, Stream
from openai.resources.fine_tuning.jobs import AsyncJobs as OpenAIAsyncJobs
from openai.resources.fine_tuning.jobs import Jobs as OpenAIJobs
from openai.types.fine_tuning import FineTuningJob

from regraft import datasets
from regraft.display import Display
from regraft.errors import JobFailed
from regraft.jobs import FINAL, grader_of
from regraft.progress import axis_of
from regraft.requests import InvalidRequestFile, JobRequest, Source, read_grader, read_job, refuse_masked
from regraft.types import JobEvent, Verdict, verdict_of

if TYPE_CHECKING:
    import pandas

Steps = list[dict[str, Any]]
VALIDATE = "/regraft/jobs/validate"
ENDS = FINAL | {"paused"}
SPLITS: dict[str, datasets.Split] = {"training_file": "train", "validation_file": "valid"}
# The server says something every 15 seconds; after a minute of silence the connection is dead.
SILENCE_SECONDS = 60.0
MOST_FAILURES = 10  # in a row: about three minutes, which is more than a server takes to start


@dataclass
class Cursor:
    """Where a stream of events stands, over all its connections."""

    job_id: str
    last: str | None
    status: str = ""
    failures: int = 0

    @property
    def path(self) -> str:
        return f"/regraft/jobs/{self.job_id}/stream"

    @property
    def options(self) -> Any:
        headers = {} if self.last is None else {"Last-Event-ID": self.last}
        # How often to try again is for `retry_in` alone to say.
        return {"headers": headers, "timeout": SILENCE_SECONDS, "max_retries": 0}

    def read(self, message: object) -> JobEvent | str:
        """An event, or a new status."""
        assert isinstance(message, dict)
        self.failures = 0
        if message.get("object") == "regraft.job.status":
            self.status = message["status"]
            return self.status
        event = JobEvent.construct(**message)
        self.last = event.id
        return event

    def retry_in(self, error: openai.APIError | None) -> float:
        """Seconds until the next connection; raises the error if there should be none. None: the stream just ended."""
        if error is not None and not _passes(error):
            raise error
        self.failures += 1
        if self.failures > MOST_FAILURES:
            raise error or openai.OpenAIError(f"The stream of {self.job_id} ends before the job does.")
        # At once the first time: most connections break because a proxy or a server was restarted.
        return 0.0 if self.failures == 1 else float(min(2 ** (self.failures - 2), 30))


def _passes(error: openai.APIError) -> bool:
    """Whether asking again may help."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


class Jobs(OpenAIJobs):
    """Everything of OpenAI's `client.fine_tuning.jobs`, and more."""

    def submit(self, request: Source, *, set: Sequence[str] = ()) -> FineTuningJob:
        """Create a job from a job file, or from what would be in one; local files are uploaded first.

        `set` changes fields, as ["hyperparameters.n_epochs=2"]. A request that is sent again after a lost answer
        creates no second job.
        """
        return self._create(self.prepare(request, set=set))

    def prepare(self, request: Source, *, set: Sequence[str] = ()) -> dict[str, Any]:
        """The body that `submit` sends, its files uploaded; `client.estimate` and `client.preview` take it, too."""
        job, files = read_job(request, set), self._client.files
        return job.with_ids(
            {field: files.create(file=path, purpose="fine-tune").id for field, path in job.uploads.items()}
        )

    def validate(self, request: Source, *, set: Sequence[str] = ()) -> Any:
        """Check a job file by the rules of the server, and its local files by those for rows. Nothing is uploaded.

        Returns the server's answer: the job's `model` and `method` as they would be kept, and `warnings`.

        Raises:
            openai.BadRequestError: what creating the job would raise.
            InvalidDataset: a local file has bad rows.
        """
        job = read_job(request, set)
        answer: Any = self._client.post(VALIDATE, body=validation(job), cast_to=object)
        validate_local(job)
        return answer

    def clone(self, job_id: str, *, set: Sequence[str] = (), grader: Source | None = None) -> FineTuningJob:
        """The same job once more, with the changes in `set`; the seed stays unless it is changed, too.

        Raises:
            InvalidRequestFile: the job's grader has secrets, which the server does not show. Give a `grader`.
        """
        asked: Any = self._client.get(f"/regraft/jobs/{job_id}/request", cast_to=object)
        return self._create(_changed(asked, set, grader))

    def watch(self, job_id: str, *, after: str | None = None) -> Iterator[JobEvent]:
        """The job's events, from its first or the one behind `after`, as they come; ends when it ends or is paused.

        A connection that breaks is made again, and nothing is missed or told twice.
        """
        with closing(self._follow(Cursor(job_id, after))) as news:
            for one in news:
                if not isinstance(one, str):
                    yield one

    def wait(self, job_id: str, *, progress: bool | TextIO = False) -> FineTuningJob:
        """Return the job when it has succeeded or is paused.

        `progress` shows it on stderr, or on the stream that is given. Ctrl-C stops the waiting and not the job.

        Raises:
            JobFailed: it failed or was cancelled.
        """
        display = _display(progress, self.retrieve(job_id)) if progress else None
        try:
            for one in self._follow(Cursor(job_id, None)):
                if display:
                    _show(display, one)
        except KeyboardInterrupt:
            _say_it_goes_on(display, job_id)
            raise
        finally:
            if display:
                display.close()
        return _or_raise(self.retrieve(job_id))

    def verdict(self, job_id: str) -> Verdict | None:
        """Whether the delivered model is better than its base; None before the end, or if nothing could be compared."""
        return verdict_of(self.retrieve(job_id))

    @overload
    def metrics(self, job_id: str, *, frame: Literal[True]) -> "pandas.DataFrame": ...
    @overload
    def metrics(self, job_id: str, *, frame: Literal[False]) -> Steps: ...
    @overload
    def metrics(self, job_id: str, *, frame: None = None) -> Any: ...
    def metrics(self, job_id: str, *, frame: bool | None = None) -> Any:
        """One row a step: a DataFrame indexed by step where pandas is installed, else a list of dicts.

        `frame` asks for one of the two. Nested numbers are columns such as "timing.step.eval".
        """
        listed: Any = self._client.get(f"/regraft/jobs/{job_id}/metrics", cast_to=object)
        return _framed(listed["data"], frame)

    def _create(self, body: dict[str, Any]) -> FineTuningJob:
        return self._client.post("/fine_tuning/jobs", body=body, cast_to=FineTuningJob, options=_once())

    def _follow(self, cursor: Cursor) -> Generator[JobEvent | str, None, None]:
        while True:
            failed: openai.APIError | None = None
            try:
                with self._client.get(
                    cursor.path,
                    cast_to=object,
                    options=cursor.options,
                    stream=True,
                    stream_cls=Stream[object],
                ) as stream:
                    for message in stream:
                        yield cursor.read(message)
                        if cursor.status in ENDS:
                            return
            except openai.APIError as error:
                failed = error
            time.sleep(cursor.retry_in(failed))


class AsyncJobs(OpenAIAsyncJobs):
    """Everything of OpenAI's `client.fine_tuning.jobs`, and more."""

    async def submit(self, request: Source, *, set: Sequence[str] = ()) -> FineTuningJob:
        """As Jobs.submit."""
        return await self._create(await self.prepare(request, set=set))

    async def prepare(self, request: Source, *, set: Sequence[str] = ()) -> dict[str, Any]:
        """As Jobs.prepare."""
        job, files = read_job(request, set), self._client.files
        return job.with_ids(
            {
                field: (await files.create(file=path, purpose="fine-tune")).id
                for field, path in job.uploads.items()
            }
        )

    async def validate(self, request: Source, *, set: Sequence[str] = ()) -> Any:
        """As Jobs.validate."""
        job = read_job(request, set)
        answer: Any = await self._client.post(VALIDATE, body=validation(job), cast_to=object)
        await asyncio.to_thread(validate_local, job)
        return answer

    async def clone(
        self, job_id: str, *, set: Sequence[str] = (), grader: Source | None = None
    ) -> FineTuningJob:
        """As Jobs.clone."""
        asked: Any = await self._client.get(f"/regraft/jobs/{job_id}/request", cast_to=object)
        return await self._create(_changed(asked, set, grader))

    async def watch(self, job_id: str, *, after: str | None = None) -> AsyncIterator[JobEvent]:
        """As Jobs.watch: `async for event in client.jobs.watch(job_id)`."""
        async with aclosing(self._follow(Cursor(job_id, after))) as news:
            async for one in news:
                if not isinstance(one, str):
                    yield one

    async def wait(self, job_id: str, *, progress: bool | TextIO = False) -> FineTuningJob:
        """As Jobs.wait. Cancelling the waiting does not cancel the job."""
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
        """As Jobs.verdict."""
        return verdict_of(await self.retrieve(job_id))

    @overload
    async def metrics(self, job_id: str, *, frame: Literal[True]) -> "pandas.DataFrame": ...
    @overload
    async def metrics(self, job_id: str, *, frame: Literal[False]) -> Steps: ...
    @overload
    async def metrics(self, job_id: str, *, frame: None = None) -> Any: ...
    async def metrics(self, job_id: str, *, frame: bool | None = None) -> Any:
        """As Jobs.metrics."""
        listed: Any = await self._client.get(f"/regraft/jobs/{job_id}/metrics", cast_to=object)
        return _framed(listed["data"], frame)

    async def _create(self, body: dict[str, Any]) -> FineTuningJob:
        return await self._client.post("/fine_tuning/jobs", body=body, cast_to=FineTuningJob, options=_once())

    async def _follow(self, cursor: Cursor) -> AsyncGenerator[JobEvent | str, None]:
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
                        if cursor.status in ENDS:
                            return
            except openai.APIError as error:
                failed = error
            await asyncio.sleep(cursor.retry_in(failed))


def validation(job: JobRequest) -> dict[str, Any]:
    """The body that asks the server whether it would create the job."""
    return {"job": job.body, "local_files": list(job.uploads)}


def validate_local(job: JobRequest) -> None:
    """Raise InvalidDataset for the first local file of the job with bad rows."""
    method = job.body.get("method")
    inside = method.get("reinforcement") if isinstance(method, dict) else None
    grader = inside.get("grader") if isinstance(inside, dict) else None
    for field, split in SPLITS.items():
        if field in job.uploads:
            datasets.validate(job.uploads[field], grader=grader, split=split)


def _once() -> Any:
    # The client sends a request again when its answer was lost; the server knows it by this.
    return {"headers": {"Idempotency-Key": str(uuid.uuid4())}}


def _changed(asked: dict[str, Any], changes: Sequence[str], grader: Source | None) -> dict[str, Any]:
    if grader is not None:
        asked["method"]["reinforcement"]["grader"] = read_grader(grader)
    job = read_job(asked, changes)
    if job.uploads:
        raise InvalidRequestFile("A clone has the files of its job; to train on others, submit a job file.")
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


def _show(display: Display, one: JobEvent | str) -> None:
    if isinstance(one, str):
        display.status(one)
    else:
        display.event(one)


def _say_it_goes_on(display: Display | None, job_id: str) -> None:
    if display:
        display.close()
        print(f"The job {job_id} goes on; `regraft jobs watch {job_id}` follows it again.", file=display.out)
