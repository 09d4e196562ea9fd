"""Following a job through an `openai.OpenAI` client that points at a regraft server."""

import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

FINAL = frozenset({"succeeded", "failed", "cancelled"})


def events(client: OpenAI, job_id: str, *, poll_seconds: float = 1.0) -> Iterator[FineTuningJobEvent]:
    """The job's events from its first to its last, as they come; ends when the job has ended or is paused."""
    last: str | None = None
    while True:
        # The status first: events written before the job ended are then surely in the listing after it.
        status = client.fine_tuning.jobs.retrieve(job_id).status
        fresh = []
        for event in client.fine_tuning.jobs.list_events(job_id, limit=100):  # newest first, over all pages
            if event.id == last:
                break
            fresh.append(event)
        if fresh:
            last = fresh[0].id
        yield from reversed(fresh)
        if status in FINAL or status == "paused":
            return
        time.sleep(poll_seconds)


def show(
    client: OpenAI, job_id: str, *, out: TextIO = sys.stdout, poll_seconds: float = 1.0
) -> FineTuningJob:
    """Print the job's progress until it ends, and return it: a live bar in a terminal, plain lines in a pipe."""
    live = out.isatty()
    for event in events(client, job_id, poll_seconds=poll_seconds):
        if event.type != "metrics":
            # A pipe gets every word; a bar would be torn apart by the checkpoints' lines.
            if not live or event.level != "info":
                print(f"{'⚠ ' if event.level == 'warn' else ''}{event.message}", file=out, flush=True)
            continue
        line = progress_line(dict(event.data or {}))
        print(f"\r\x1b[K{line}" if live else line, end="" if live else "\n", file=out, flush=True)
    if live:
        print(file=out)
    return client.fine_tuning.jobs.retrieve(job_id)


def progress_line(data: dict[str, Any], width: int = 24) -> str:
    """One step's metrics as a bar, e.g. `step 3/12 ██████░░ train 0.41 valid 0.38 mixed 75% 14.2 s`."""
    step, total = data["step"], data["total_steps"]
    filled = round(width * step / total)
    parts = [f"step {step:>3}/{total} {'█' * filled}{'░' * (width - filled)}"]
    for label, key in (("train", "train_mean_reward"), ("valid", "full_valid_mean_reward")):
        if data.get(key) is not None:
            parts.append(f"{label} {data[key]:.2f}")
    if "groups_mixed_share" in data:
        parts.append(f"groups with signal {data['groups_mixed_share']:.0%}")
    parts.append(f"{data['timing']['step']['full_iteration']:.1f} s")
    return "  ".join(parts)


def metrics(client: OpenAI, job_id: str) -> list[dict[str, Any]]:
    """The metrics of every finished step, in order."""
    return _list(client, f"/regraft/jobs/{job_id}/metrics")


def rollouts(client: OpenAI, job_id: str, *, step: int, split: str) -> list[dict[str, Any]]:
    """The graded answers of one step; `split` is "train" or "valid". Step 0 is the base model's validation."""
    return _list(client, f"/regraft/jobs/{job_id}/rollouts?step={step}&split={split}")


def _list(client: OpenAI, path: str) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = client.get(path, cast_to=object)["data"]  # type: ignore[index]
    return data
