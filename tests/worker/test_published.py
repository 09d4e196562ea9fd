"""The files that vLLM engines load all weights from: when they are written, where, and when they are gone."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from worker.model import memory
from worker.sampling.published import PREFIX, PublishedWeights, parent_for

ROOT = Path(__file__).parents[2]


class Counted:
    """Weights in two files that are the number of their version."""

    def __init__(self) -> None:
        self.weights_version, self.written = 1, 0

    def write_weights(self, folder: Path) -> None:
        self.written += 1
        assert folder.stat().st_mode & 0o077 == 0, "other users could read the weights"
        for name in ("b", "a"):
            save_file({name: torch.tensor([self.weights_version])}, folder / f"{name}.safetensors")


@pytest.fixture
def policy() -> Counted:
    return Counted()


@pytest.fixture
def published(policy: Counted, tmp_path: Path) -> Iterator[PublishedWeights]:
    weights = PublishedWeights(policy, str(tmp_path))
    yield weights
    weights.close()


def read(published: PublishedWeights) -> list[dict[str, list[int]]]:
    return [{name: one.tolist() for name, one in load_file(path).items()} for path in published.paths]


def test_weights_are_written_once_for_each_version(policy: Counted, published: PublishedWeights) -> None:
    for _ in range(3):
        published.publish()
    assert (policy.written, read(published)) == (1, [{"a": [1]}, {"b": [1]}])

    policy.weights_version = 7
    published.publish()

    assert (policy.written, read(published)) == (2, [{"a": [7]}, {"b": [7]}])


def test_their_files_have_no_names_and_are_gone_when_closed(
    published: PublishedWeights, tmp_path: Path
) -> None:
    published.publish()
    paths = published.paths
    assert all(Path(path).exists() for path in paths)
    assert list(tmp_path.iterdir()) == []

    published.close()

    assert published.paths == ()
    assert not any(tmp_path in Path(path).readlink().parents for path in paths if Path(path).exists())


def test_another_process_reads_them(published: PublishedWeights) -> None:
    published.publish()

    script = "import sys; from safetensors import safe_open; print(safe_open(sys.argv[1], 'pt').keys())"
    found = subprocess.check_output([sys.executable, "-c", script, published.paths[0]], text=True)

    assert found == "['a']\n"


KILLED = """
import os, signal, sys
from worker.sampling.published import PublishedWeights
class Killed:
    weights_version = 1
    def write_weights(self, folder):
        (folder / "part").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)
PublishedWeights(Killed(), sys.argv[1]).publish()
"""


@pytest.mark.slow
def test_what_a_process_leaves_that_is_killed_while_it_writes_is_removed_by_the_next(
    published: PublishedWeights, tmp_path: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.name.startswith(PREFIX)

    published.publish()

    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    class Full(Counted):
        def write_weights(self, folder: Path) -> None:
            super().write_weights(folder)
            raise OSError("no space left on device")

    weights = PublishedWeights(Full(), str(tmp_path))
    with pytest.raises(OSError, match="no space left"):
        weights.publish()

    assert (weights.version, weights.paths, list(tmp_path.iterdir())) == (0, (), [])


def test_they_are_written_to_shared_memory_if_that_and_main_memory_have_room_for_twice_as_much(
    tmp_path: Path,
) -> None:
    free = memory.available("cpu")

    assert parent_for(1000, "cuda", shared=tmp_path) == str(tmp_path)
    assert parent_for(free, "cuda", shared=tmp_path) is None
    assert parent_for(1000, "cuda", reserved=free * 2, shared=tmp_path) is None
    assert parent_for(1000, "cuda", shared=tmp_path / "absent") is None
    assert parent_for(1000, "cpu", shared=tmp_path) is None  # the memory plan counts no further copy there
