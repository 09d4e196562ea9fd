"""What any Exporter must do. A new one is added to SERVICES."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import Notebook
from worker.recording.exporters import RunInfo
from worker.recording.exporters.mlflow import MlflowExporter
from worker.recording.exporters.tensorboard import TensorBoardExporter
from worker.recording.exporters.trackio import TrackioExporter
from worker.recording.exporters.types import Exporter

RUN_INFO = RunInfo("ftjob-1", "colours", "ftjob-1", None, ("a",), {"model": "tiny", "batch_size": 8})
# A connection to one and the same service, as each attempt of a job opens its own.
Connect = Callable[[], Exporter]


def notebook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    book = Notebook()
    return lambda: book


def mlflow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    pytest.importorskip("mlflow")
    return lambda: MlflowExporter(f"sqlite:///{folder}/mlflow.db")


def trackio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    pytest.importorskip("trackio")
    return TrackioExporter


def tensorboard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    return lambda: TensorBoardExporter(folder)


SERVICES = {"notebook": notebook, "mlflow": mlflow, "trackio": trackio, "tensorboard": tensorboard}


@pytest.fixture(params=SERVICES)
def connect(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    return SERVICES[request.param](tmp_path, monkeypatch)


def test_a_new_run_has_no_step_yet(connect: Connect) -> None:
    exporter = connect()

    assert exporter.start(RUN_INFO) is None
    exporter.finish("succeeded")


def test_another_attempt_hears_which_step_is_the_last(connect: Connect) -> None:
    first = connect()
    first.start(RUN_INFO)
    for step in (0, 1):
        first.step(step, {"step": step, "train_mean_reward": step / 4})
    first.finish("interrupted")

    second = connect()

    assert second.start(RUN_INFO) == 1
    second.step(2, {"step": 2, "train_mean_reward": 0.5})
    second.finish("succeeded")
    third = connect()
    assert third.start(RUN_INFO) == 2
    third.finish("succeeded")


def test_a_run_may_end_without_a_step(connect: Connect) -> None:
    exporter = connect()
    exporter.start(RUN_INFO)

    exporter.finish("failed")


def test_a_step_may_have_no_metric_but_its_number(connect: Connect) -> None:
    exporter = connect()
    exporter.start(RUN_INFO)

    exporter.step(0, {"step": 0})
    exporter.finish("succeeded")
