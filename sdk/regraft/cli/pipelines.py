"""The commands of pipelines."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from regraft.cli.output import answer, say, table
from regraft.cli.shared import DONE, NO, Refused, connect
from regraft.progress import FINAL
from regraft.sync.client import Regraft
from regraft.types import Pipeline


def pipelines_create(arguments: argparse.Namespace) -> int:
    client = connect()
    made = client.pipelines.submit(arguments.file)
    return _waited(arguments, client, made) if arguments.wait else _print_pipeline(arguments, made)


def sweep(arguments: argparse.Namespace) -> int:
    """Exit code 1: no job has succeeded."""
    client = connect()
    over = dict(map(_values, arguments.over))
    if len(over) < len(arguments.over):
        raise Refused("--over names a setting twice: write all of its values in one --over.")
    budget = None if arguments.budget is None else {"gpu_seconds": arguments.budget * 3600}
    made = client.pipelines.sweep(
        client.jobs.prepare(arguments.job, set=arguments.changes),
        over,
        budget=budget,
        stop_losers=not arguments.keep_losers,
    )
    return _waited(arguments, client, made) if arguments.wait else _print_pipeline(arguments, made)


def _values(text: str) -> tuple[str, list[Any]]:
    """A setting and its values, from NAME=VALUE,VALUE. Values are JSON, or else text.

    Raises:
        Refused: it is not of this form.
    """
    name, equals, values = text.partition("=")
    if not name or not equals or not all(values.split(",")):
        raise Refused(f"--over {text}: write it as name=value,value, such as learning_rate=1e-5,3e-5.")
    return name, [_value(one.strip()) for one in values.split(",")]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def pipelines_wait(arguments: argparse.Namespace) -> int:
    """Exit code 1: it failed or was cancelled."""
    client = connect()
    return _waited(arguments, client, client.pipelines.retrieve(arguments.pipeline_id))


def pipelines_clone(arguments: argparse.Namespace) -> int:
    pipelines = connect().pipelines
    return _print_pipeline(arguments, pipelines.clone(arguments.pipeline_id, first=arguments.first))


def _waited(arguments: argparse.Namespace, client: Regraft, created: Pipeline) -> int:
    said: dict[str, str] = {}

    def print_progress(pipeline: Pipeline) -> None:
        for stage in pipeline.stages:
            state = _state(stage)
            if said.get(stage.name) != state:
                said[stage.name] = state
                say(f"{stage.name}: {state}")

    done = client.pipelines.wait(created.id, progress=print_progress)
    _print_pipeline(arguments, done)
    return DONE if done.status in ("succeeded", "paused") else NO


def _print_pipeline(arguments: argparse.Namespace, pipeline: Pipeline) -> int:
    return answer(arguments, pipeline, lambda: text_of(pipeline))


def text_of(pipeline: Pipeline) -> str:
    rows = [
        [stage.name, stage.kind, _state(stage), ", ".join(stage.needs) or "-", _result(stage)]
        for stage in pipeline.stages
    ]
    return "\n".join(
        [
            f"{pipeline.id} {pipeline.status}" + (f" ({pipeline.name})" if pipeline.name else ""),
            table(["stage", "kind", "state", "needs", "result"], rows),
            *(line for stage in pipeline.stages if stage.jobs for line in _sweep_lines(stage)),
            *(f"{stage.name}: {stage.error.message}" for stage in pipeline.stages if stage.error is not None),
        ]
    )


def _sweep_lines(stage: Any) -> Iterator[str]:
    rows = [
        [
            ", ".join(f"{name}={value}" for name, value in job.settings.items()),
            job.job_id,
            job.job_status or "-",
            "-" if job.reward is None else f"{job.reward:.3f}",
            job.stopped or "-",
        ]
        for job in stage.jobs
    ]
    yield table([stage.name, "job", "state", "reward", "stopped because"], rows)
    if stage.conclusion:
        yield f"{stage.name}: {stage.conclusion}"


def _state(stage: Any) -> str:
    if stage.status == "waiting" and stage.note:
        return f"waiting: {stage.note}"
    if stage.status == "running" and stage.progress:
        return f"running, {stage.progress['finished']} of {stage.progress['total']} answers"
    if stage.status == "running" and stage.jobs:
        going = sum(job.job_status not in FINAL for job in stage.jobs)
        return f"running, {going} of {len(stage.jobs)} jobs have not ended"
    if stage.status == "running" and stage.job_status:
        return f"running, {stage.job_id} is {stage.job_status}"
    return str(stage.status)


def _result(stage: Any) -> str:
    if stage.file:
        return f"{stage.file} ({stage.rows} rows)"
    return stage.model or stage.job_id or "-"
