"""Watch a job with a plain `openai.OpenAI` that points at a regraft server; `Regraft` has all of this and more."""

import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO
from urllib.parse import quote

from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

from regraft._rules.states import JOB
from regraft.display import Display
from regraft.progress import axis_of
from regraft.routes import route
from regraft.types import JobResult, StepMetrics, Verdict


class JobEvent(FineTuningJobEvent):
    """A line of a job's log, or the metrics of a step."""

    @property
    def metrics(self) -> StepMetrics | None:
        """The metrics of a step, of events of type "metrics"."""
        if self.type != "metrics" or not isinstance(self.data, dict):
            return None
        return StepMetrics.construct(**self.data)


def events(client: OpenAI, job_id: str, *, poll_seconds: float = 1.0) -> Iterator[FineTuningJobEvent]:
    """Yield the job's events in order as they occur, until the job ends or is paused."""
    seen: set[str] = set()  # all of them: a step that is repeated removes the newest ones from the list
    while True:
        # The status first, so that the listing after it has all events written before the end.
        status: str = client.fine_tuning.jobs.retrieve(job_id).status
        fresh = []
        for event in client.fine_tuning.jobs.list_events(job_id, limit=100):  # newest first, over all pages
            if event.id in seen:
                break
            fresh.append(event)
        seen.update(event.id for event in fresh)
        yield from reversed(fresh)
        if status in JOB.stopped:
            return
        time.sleep(poll_seconds)


def show(
    client: OpenAI, job_id: str, *, out: TextIO = sys.stdout, poll_seconds: float = 1.0
) -> FineTuningJob:
    """Print the job's progress until it ends, and return the job: a live bar in a terminal, lines in a pipe."""
    display = Display(out, axis_of(grader_of(client.fine_tuning.jobs.retrieve(job_id))))
    for event in events(client, job_id, poll_seconds=poll_seconds):
        display.event(event)
    display.close()
    return client.fine_tuning.jobs.retrieve(job_id)


def grader_of(job: FineTuningJob) -> Any:
    """The grader's spec, as parsed by the client; None if the job shows none."""
    reinforcement = getattr(job.method, "reinforcement", None)
    return getattr(reinforcement, "grader", None)


def verdict_of(job: FineTuningJob) -> Verdict | None:
    """The verdict of a job; None before its end, and without a comparison."""
    stored = getattr(job, "verdict", None)
    return None if stored is None else Verdict.construct(**stored)


def result_of(job: FineTuningJob) -> JobResult | None:
    """The result of a job; None before its end, and without a validation."""
    stored = getattr(job, "result", None)
    return None if stored is None else JobResult.construct(**stored)


def metrics(client: OpenAI, job_id: str) -> list[dict[str, Any]]:
    """The metrics of every finished step, in order."""
    return _list(client, route("/regraft/jobs", job_id, "metrics"))


def rollouts(client: OpenAI, job_id: str, *, step: int, split: str) -> list[dict[str, Any]]:
    """The graded answers of one step; `split` is "train" or "valid". Step 0 is the validation of the base model."""
    return _list(client, route("/regraft/jobs", job_id, "rollouts") + f"?step={step}&split={quote(split)}")


def _list(client: OpenAI, path: str) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = client.get(path, cast_to=object)["data"]  # type: ignore[index]
    return data
