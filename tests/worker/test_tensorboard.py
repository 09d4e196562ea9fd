"""Event files of the exporter to TensorBoard, read as its format describes them."""

import struct
from pathlib import Path

import pytest

from worker.recording.exporters import RunInfo
from worker.recording.exporters.tensorboard import TensorBoardExporter, recorded_steps

RUN_INFO = RunInfo("ftjob-1", "colours", "ftjob-1", None, (), {})
# How each event file of TensorFlow's own writer begins: the length of a record (24 bytes) with its checksum, and after
# the nine bytes of the time Event.file_version.
LENGTH = bytes.fromhex("1800000000000000a37f4b22")
VERSION = b"\x1a\x0dbrain.Event:2"


def written(folder: Path) -> Path:
    [file] = folder.rglob("events.out.tfevents.*")
    return file


def test_a_record_has_the_length_checksum_and_event_that_tensorflow_writes(tmp_path: Path) -> None:
    TensorBoardExporter(tmp_path).start(RUN_INFO)

    data = written(tmp_path / "colours" / "ftjob-1").read_bytes()

    assert data[:12] == LENGTH
    assert data[12:13] == b"\x09"
    assert data[21:36] == VERSION


def test_a_step_has_each_metric_with_its_name_and_value(tmp_path: Path) -> None:
    exporter = TensorBoardExporter(tmp_path)
    exporter.start(RUN_INFO)
    exporter.step(300, {"step": 300, "train_mean_reward": 0.25, "tokens": 1e300})

    data = written(tmp_path).read_bytes()

    assert [*recorded_steps(written(tmp_path))] == [300]
    assert b"\x0a\x11train_mean_reward\x15" + struct.pack("<f", 0.25) in data
    assert b"\x0a\x06tokens\x15" + struct.pack("<f", float("inf")) in data


def test_a_record_that_is_cut_off_is_not_a_step_and_later_ones_are_written(tmp_path: Path) -> None:
    """A killed attempt leaves the start of a record."""
    exporter = TensorBoardExporter(tmp_path)
    exporter.start(RUN_INFO)
    exporter.step(0, {"reward": 0.5})
    exporter.step(1, {"reward": 0.5})
    written(tmp_path).write_bytes(written(tmp_path).read_bytes()[:-3])

    assert TensorBoardExporter(tmp_path).start(RUN_INFO) == 0


def test_a_call_that_failed_leaves_nothing_before_its_retry(tmp_path: Path) -> None:
    exporter = TensorBoardExporter(tmp_path)
    exporter.start(RUN_INFO)
    with written(tmp_path).open("ab") as file:
        file.write(b"half of a record")  # as of a disk that was full
    exporter.step(0, {"reward": 0.5})

    assert [*recorded_steps(written(tmp_path))] == [0]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("first", "first-ftjob-1"),
        ("../../etc", ".._.._etc-ftjob-1"),
        ("é" * 128, "é" * 123 + "-ftjob-1"),  # 254 bytes
    ],
)
def test_the_folder_of_a_run_is_in_that_of_its_project(name: str, folder: str, tmp_path: Path) -> None:
    TensorBoardExporter(tmp_path).start(RunInfo("ftjob-1", "colours", name, None, (), {}))

    assert written(tmp_path).parent == tmp_path / "colours" / folder


@pytest.mark.parametrize(
    ("project", "folder"),
    [("研究", "研究"), ("製品", "製品"), ("研" * 128, "研" * 85), ("..", "_"), ("a/b", "a_b")],
)
def test_a_project_has_a_folder_of_its_own(project: str, folder: str, tmp_path: Path) -> None:
    """Letters of all languages are kept, and a name has at most 255 bytes."""
    TensorBoardExporter(tmp_path).start(RunInfo("ftjob-1", project, "ftjob-1", None, (), {}))

    assert written(tmp_path).parent == tmp_path / folder / "ftjob-1"


def test_tensorboard_reads_every_step_of_all_attempts_once(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for attempt in ([0, 1], [2]):
        exporter = TensorBoardExporter(tmp_path)
        exporter.start(RUN_INFO)
        for step in attempt:
            exporter.step(step, {"train_mean_reward": step / 4})

    run = reader.EventAccumulator(str(tmp_path / "colours" / "ftjob-1")).Reload()

    assert [(one.step, one.value) for one in run.Scalars("train_mean_reward")] == [
        (0, 0.0),
        (1, 0.25),
        (2, 0.5),
    ]
