"""The commands of pipelines."""

import argparse
from typing import Any

from regraft.cli.output import print_json, say, table, when
from regraft.client import Regraft
from regraft.types import Pipeline

DONE, NO = 0, 1


def pipelines_create(arguments: argparse.Namespace) -> int:
    client = Regraft()
    made = client.pipelines.submit(arguments.file)
    return _waited(arguments, client, made) if arguments.wait else _answer(arguments, made)


def pipelines_list(arguments: argparse.Namespace) -> int:
    listed: list[Pipeline] = []
    for pipeline in Regraft().pipelines.list(limit=min(max(arguments.limit, 1), 100)):
        if len(listed) >= arguments.limit:
            break
        listed.append(pipeline)
    if arguments.output == "json":
        print_json(listed)
        return DONE
    rows = [[one.id, one.status, when(one.created_at), _done(one), one.name or "-"] for one in listed]
    print(table(["id", "status", "created", "stages", "name"], rows))
    return DONE


def pipelines_show(arguments: argparse.Namespace) -> int:
    return _answer(arguments, Regraft().pipelines.retrieve(arguments.pipeline_id))


def pipelines_wait(arguments: argparse.Namespace) -> int:
    """Exit code 1: it failed or was cancelled."""
    client = Regraft()
    return _waited(arguments, client, client.pipelines.retrieve(arguments.pipeline_id))


def pipelines_pause(arguments: argparse.Namespace) -> int:
    return _answer(arguments, Regraft().pipelines.pause(arguments.pipeline_id))


def pipelines_resume(arguments: argparse.Namespace) -> int:
    return _answer(arguments, Regraft().pipelines.resume(arguments.pipeline_id))


def pipelines_cancel(arguments: argparse.Namespace) -> int:
    return _answer(arguments, Regraft().pipelines.cancel(arguments.pipeline_id))


def pipelines_retry(arguments: argparse.Namespace) -> int:
    return _answer(arguments, Regraft().pipelines.retry(arguments.pipeline_id))


def pipelines_clone(arguments: argparse.Namespace) -> int:
    pipelines = Regraft().pipelines
    return _answer(arguments, pipelines.clone(arguments.pipeline_id, first=arguments.first))


def _waited(arguments: argparse.Namespace, client: Regraft, made: Pipeline) -> int:
    said: dict[str, str] = {}

    def tell(pipeline: Pipeline) -> None:
        for stage in pipeline.stages:
            state = _state(stage)
            if said.get(stage.name) != state:
                said[stage.name] = state
                say(f"{stage.name}: {state}")

    done = client.pipelines.wait(made.id, progress=tell)
    _answer(arguments, done)
    return DONE if done.status in ("succeeded", "paused") else NO


def _answer(arguments: argparse.Namespace, pipeline: Pipeline) -> int:
    if arguments.output == "json":
        print_json(pipeline)
        return DONE
    print(f"{pipeline.id} {pipeline.status}" + (f" ({pipeline.name})" if pipeline.name else ""))
    rows = [
        [stage.name, stage.kind, _state(stage), ", ".join(stage.needs) or "-", _result(stage)]
        for stage in pipeline.stages
    ]
    print(table(["stage", "kind", "state", "needs", "result"], rows))
    for stage in pipeline.stages:
        if stage.error is not None:
            print(f"{stage.name}: {stage.error.message}")
    return DONE


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


def _done(pipeline: Pipeline) -> str:
    done = sum(stage.status == "succeeded" for stage in pipeline.stages)
    return f"{done} of {len(pipeline.stages)}"
