"""The exporters on the libraries themselves, where they are installed: what is written is read back."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from worker.recording.exporters import RunInfo
from worker.recording.exporters.mlflow import MlflowExporter
from worker.recording.exporters.trackio import TrackioExporter
from worker.recording.exporters.wandb import WandbExporter
from worker.types import Ended

RUN_INFO = RunInfo("ftjob-1", "colours", "ftjob-1", None, ("a",), {"model": "tiny", "batch_size": 8})
METRICS = {"step": 1, "train_mean_reward": 0.25, "scores/graders/string_check/it's/train_reward_mean": 1.0}


def attempt(
    exporter: MlflowExporter | WandbExporter | TrackioExporter, steps: list[Any], ended: Ended
) -> int | None:
    """The last step that was there before."""
    last = exporter.start(RUN_INFO)
    for step in steps:
        exporter.step(step, METRICS | {"step": step, "train_mean_reward": step / 4})
    exporter.finish(ended)
    return last


def test_mlflow_has_one_run_with_every_step_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    first = attempt(MlflowExporter(uri), [0, 1], "interrupted")
    client = mlflow.MlflowClient(uri)
    [experiment] = [one.experiment_id for one in client.search_experiments() if one.name == "colours"]
    between = client.search_runs([experiment])[0].info.status
    second = attempt(MlflowExporter(uri), [2], "succeeded")

    assert (first, second, between) == (None, 1, "SCHEDULED")
    [run] = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("ftjob-1", "FINISHED")
    assert run.data.params == {"model": "tiny", "batch_size": "8"}
    assert run.data.tags["a"] == "true"
    history = client.get_metric_history(run.info.run_id, "train_mean_reward")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert run.data.metrics["scores/graders/string_check/it_s/train_reward_mean"] == 1.0


def test_wandb_writes_a_run_that_can_be_synchronised_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)

    assert attempt(WandbExporter(tmp_path), [0, 1, 2], "succeeded") is None

    [file] = tmp_path.glob("wandb/offline-run-*/run-ftjob-1.wandb")
    run, history, exit_code = read_wandb(file)
    assert (run.project, run.run_id, run.display_name) == ("colours", "ftjob-1", "ftjob-1")
    assert list(run.tags) == ["a", "regraft/finetune", "regraft/tiny", "regraft/ftjob-1"]
    assert [(row["_step"], row["train_mean_reward"]) for row in history] == [(0, 0), (1, 0.25), (2, 0.5)]
    assert exit_code == 0


def read_wandb(path: Path) -> tuple[Any, list[dict[Any, Any]], Any]:
    """The run's record, its history and its exit code."""
    from wandb.proto import wandb_internal_pb2

    run, history, exit_code = None, [], None
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
            case "history":
                items = record.history.item
                history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
            case "exit":
                exit_code = record.exit.exit_code
    return run, history, exit_code


def log_records(data: bytes) -> Iterator[bytes]:
    """What a file in LevelDB's log format holds, behind the seven bytes of W&B's own at its beginning."""
    place, parts = 7, []
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:  # no header fits into the rest of a block
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def test_trackio_has_one_run_with_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    first = attempt(TrackioExporter(), [0, 1], "interrupted")
    second = attempt(TrackioExporter(), [2], "succeeded")

    assert (first, second) == (None, 1)
    assert SQLiteStorage.get_runs("colours") == ["ftjob-1"]
    rows = SQLiteStorage.get_logs("colours", "ftjob-1")
    assert [(row["step"], row["train_mean_reward"]) for row in rows] == [(0, 0.0), (1, 0.25), (2, 0.5)]
