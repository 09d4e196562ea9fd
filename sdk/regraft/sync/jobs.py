"""Written by .ci/sync_client.py from regraft.resources.jobs; do not edit."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, TextIO, overload

import openai
from openai import Stream
from openai.resources.fine_tuning.jobs import Jobs as OpenAIJobs
from openai.types.fine_tuning import FineTuningJob

from regraft._rules.states import JOB
from regraft.jobs import JobEvent, result_of, verdict_of
from regraft.notebook import PLOTTED, plot_reward
from regraft.requests import Source, read_job
from regraft.resources.jobs import (
    VALIDATE,
    Cursor,
    Curves,
    News,
    Steps,
    _changed,
    _comparison,
    _display,
    _framed,
    _of_checkpoint,
    _once,
    _or_raise,
    _say_it_goes_on,
    _show,
    validate_local,
    validation,
)
from regraft.routes import listed, route
from regraft.types import Curve, JobComparison, JobLedger, Verdict

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


class Jobs(OpenAIJobs):
    """Everything of OpenAI's `client.fine_tuning.jobs`, and more."""

    def submit(self, request: Source, *, set: Sequence[str] = ()) -> FineTuningJob:
        """Create a job from a job file or its content; local files are validated and uploaded first.

        `set` overrides fields, as in ["hyperparameters.n_epochs=2"]. A retry after a lost response does not create a
        second
        job.
        """
        return self._create(self.prepare(request, set=set))

    def prepare(self, request: Source, *, set: Sequence[str] = ()) -> dict[str, Any]:
        """Upload the files and return the body that `submit` sends, for `client.estimate` and `client.preview`.

        Raises:
            InvalidDataset: a local file has invalid rows. Nothing was uploaded.
        """
        job, files = read_job(request, set), self._client.files
        validate_local(job)
        # One file for both fields is uploaded once, so that the service knows that it is one.
        ids = {path: files.create(file=path, purpose="fine-tune").id for path in job.distinct_uploads}
        return job.with_ids({field: ids[path] for field, path in job.uploads.items()})

    def validate(self, request: Source, *, set: Sequence[str] = ()) -> Any:
        """Validate a job file with the server, and its local files by the rules for rows. Uploads nothing.

        Returns the server's response: the job's normalized `model` and `method`, and `warnings`.

        Raises:
            openai.BadRequestError: as on creation.
            InvalidDataset: a local file has invalid rows.
        """
        job = read_job(request, set)
        answer: Any = self._client.post(VALIDATE, body=validation(job), cast_to=object)
        validate_local(job)
        return answer

    def clone(self, job_id: str, *, set: Sequence[str] = (), grader: Source | None = None) -> FineTuningJob:
        """Create a copy of a job, with the changes in `set`; it has the same seed unless that is changed.

        Raises:
            InvalidRequestFile: the job's grader has secrets, which the server does not show. Pass a `grader`.
        """
        asked: Any = self._client.get(route("/regraft/jobs", job_id, "request"), cast_to=object)
        return self._create(_changed(asked, set, grader))

    def curves(self, job_ids: Sequence[str]) -> list[Curve]:
        """Return the validations of up to 100 jobs as short curves, in the order of the ids."""
        return self._client.get(f"/regraft/curves?jobs={listed(job_ids)}", cast_to=Curves).data

    def compare(self, first: str, *others: str) -> JobComparison:
        """Compare the validated rewards of jobs prompt by prompt with those of the first, and their requests."""
        return self._client.get(_comparison(first, others), cast_to=JobComparison)

    def ledger(self, job_id: str) -> JobLedger:
        """Return what the tokens and the GPU time of a job taught, by step and in all."""
        return self._client.get(route("/regraft/jobs", job_id, "ledger"), cast_to=JobLedger)

    def ledger_csv(self, job_id: str) -> str:
        """Return the ledger as CSV, with a row for each step and bucket."""
        return self._client.get(route("/regraft/jobs", job_id, "ledger", "download"), cast_to=str)

    def passport(self, job_id: str, *, checkpoint_id: str | None = None) -> dict[str, Any]:
        """Return the signed statement about the job's model, or about another checkpoint of the job.

        `regraft verify` verifies it. The server signs nothing without a key (NotFoundError, code `no_passport_key`).
        """
        path = route("/regraft/jobs", job_id, "passport")
        answer: Any = self._client.get(path, cast_to=object, options=_of_checkpoint(checkpoint_id))
        return dict(answer)

    def watch(self, job_id: str, *, after: str | None = None) -> Iterator[JobEvent]:
        """Yield the job's events as they occur, from the first or after `after`, until the job ends or is paused.

        Reconnects when the connection breaks, without gaps or duplicates.
        """
        with closing(self._follow(Cursor(job_id, after))) as news:
            for one in news:
                if isinstance(one, JobEvent):
                    yield one

    def wait(self, job_id: str, *, progress: bool | TextIO = False) -> FineTuningJob:
        """Wait until the job has succeeded or is paused, and return it.

        `progress` displays it on stderr, or on the given stream. Ctrl-C stops waiting; the job continues.

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
        """Whether the delivered model is better than its base; None before the end, or without a comparison."""
        return verdict_of(self.retrieve(job_id))

    @overload
    def metrics(
        self, job_id: str, *, frame: Literal[True], names: Sequence[str] = ()
    ) -> "pandas.DataFrame": ...
    @overload
    def metrics(self, job_id: str, *, frame: Literal[False], names: Sequence[str] = ()) -> Steps: ...
    @overload
    def metrics(self, job_id: str, *, frame: None = None, names: Sequence[str] = ()) -> Any: ...
    def metrics(self, job_id: str, *, frame: bool | None = None, names: Sequence[str] = ()) -> Any:
        """One row per step: a DataFrame indexed by step if pandas is installed, else a list of dicts.

        Args:
            frame: selects one of the two. Nested numbers become columns such as "timing.step.eval".
            names: only these metrics, such as "kl" or "timing.step"; default: all.

        Raises:
            openai.BadRequestError: there is no such metric.
        """
        options: Any = {"params": {"names": ",".join(names)} if names else {}}
        path = route("/regraft/jobs", job_id, "metrics")
        found: Any = self._client.get(path, cast_to=object, options=options)
        return _framed(found["data"], frame)

    def plot(self, job_id: str, *, axes: "Axes | None" = None) -> "Axes":
        """Draw the rewards of a job with the delivered step, for a notebook; see regraft.notebook.plot_reward.

        Raises:
            CannotShow: no step has a reward.
            ImportError: matplotlib is missing.
        """
        result = result_of(self.retrieve(job_id))
        return plot_reward(self.metrics(job_id, frame=False, names=PLOTTED), result, axes)

    def _create(self, body: dict[str, Any]) -> FineTuningJob:
        return self._client.post("/fine_tuning/jobs", body=body, cast_to=FineTuningJob, options=_once())

    def _follow(self, cursor: Cursor) -> Generator[News, None, None]:
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
                        if cursor.status in JOB.stopped:
                            return
            except openai.APIError as error:
                failed = error
            time.sleep(cursor.retry_in(failed))
