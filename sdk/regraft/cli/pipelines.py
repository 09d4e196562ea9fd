"""The commands of pipelines."""

import argparse
from typing import Any

from regraft.cli.output import answer, say, table
from regraft.cli.shared import DONE, NO, connect
from regraft.sync.client import Regraft
from regraft.types import Pipeline


def pipelines_create(arguments: argparse.Namespace) -> int:
    client = connect()
    made = client.pipelines.submit(arguments.file)
    return _waited(arguments, client, made) if arguments.wait else _print_pipeline(arguments, made)


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
            *(f"{stage.name}: {stage.error.message}" for stage in pipeline.stages if stage.error is not None),
        ]
    )


def _state(stage: Any) -> str:
    if stage.status == "waiting" and stage.note:
        return f"waiting: {stage.note}"
    if stage.status == "running" and stage.progress:
        return f"running, {stage.progress['finished']} of {stage.progress['total']} answers"
    if stage.status == "running" and stage.job_status:
        return f"running, {stage.job_id} is {stage.job_status}"
    return str(stage.status)


def _result(stage: Any) -> str:
    if stage.file:
        return f"{stage.file} ({stage.rows} rows)"
    return stage.model or stage.job_id or "-"
