"""The file that tells a probe whether a worker is at work."""

import threading
from pathlib import Path

import pytest

from worker.supervisor import liveness


def test_the_file_is_there_while_all_threads_work(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()

    assert liveness.touch_while_alive(tmp_path / "alive", [threading.main_thread()], stop)

    assert (tmp_path / "alive").exists()


def test_a_thread_that_has_ended_is_not_covered_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Thread(target=lambda: None, name="reconciler")
    ended.start()
    ended.join()

    assert not liveness.touch_while_alive(tmp_path / "alive", [ended], threading.Event())

    assert not (tmp_path / "alive").exists()
    assert "reconciler" in caplog.text


def test_a_disk_that_takes_no_file_ends_no_heartbeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    stop.set()

    assert liveness.touch_while_alive(tmp_path / "absent" / "alive", [threading.main_thread()], stop)

    assert "cannot be written" in caplog.text
