"""Processes that are forked behave as ones that start anew."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from worker import forking
from worker.process import DRAINED

pytestmark = [
    pytest.mark.slow,  # the first one imports torch
    pytest.mark.skipif(not forking.FORKS, reason="forks on Linux only"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that a test writes, and that processes find."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "forked_module.py"
    sys.modules.pop("forked_module", None)


@pytest.fixture
def said() -> Iterator[IO[bytes]]:
    """The stderr of a process."""
    with tempfile.TemporaryFile() as file:
        yield file


def text_of(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read().decode()


def fork(
    *arguments: str, stderr: IO[bytes] | None = None, stdin: int = subprocess.PIPE, **environment: str
) -> forking.Child:
    command = [sys.executable, "-m", "forked_module", *arguments]
    return forking.start(command, environment, stdin=stdin, stderr=stderr)


def test_a_forked_process_has_its_arguments_environment_input_and_libraries(
    module: Path, said: IO[bytes]
) -> None:
    module.write_text(
        "import os, sys\n"
        "loaded = 'torch' in sys.modules and 'transformers' in sys.modules\n"
        "print(__name__, sys.argv[1:], dict(os.environ), sys.stdin.readline().strip(), loaded, file=sys.stderr)\n"
        "print(os.getsid(0) == os.getpid(), open('/proc/self/comm').read(), end='', file=sys.stderr)\n"
    )
    child = fork("a", "b", stderr=said, NAME="value")
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(b"a claim\n")

    assert child.wait(60) == 0
    assert text_of(said) == "__main__ ['a', 'b'] {'NAME': 'value'} a claim True\nTrue forked_module\n"


def test_it_has_the_files_that_are_passed_by_their_numbers(module: Path) -> None:
    module.write_text("import os, sys; os.write(int(sys.argv[1]), b'written')")
    for _ in range(2):  # also where the number is free in the process and where it is not
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "forked_module", str(writing)]
        child = forking.start(command, {}, pass_fds=[writing])
        os.close(writing)
        assert child.wait(60) == 0
        assert os.read(reading, 100) == b"written"
        os.close(reading)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import sys; sys.exit(75)", 75),
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise ValueError('because')", 1),
    ],
)
def test_its_exit_status_is_that_of_a_process_that_starts_anew(
    module: Path, said: IO[bytes], source: str, status: int
) -> None:
    module.write_text(source)
    child = fork(stderr=said)

    assert child.wait(60) == status
    assert child.poll() == status
    child.kill()  # one that has ended is left alone
    assert ("ValueError: because" in text_of(said)) == ("because" in source)


def test_it_can_be_waited_for_and_signalled(module: Path) -> None:
    module.write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "open(sys.argv[1], 'w').close()\n"
        "signal.pause()\n"
    )
    ready = module.parent / "ready"
    os.mkfifo(ready)
    child = fork(str(ready))
    ready.read_text()  # it is open for writing
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    assert child.poll() is None

    child.send_signal(signal.SIGTERM)

    assert child.wait(60) == 7


def test_a_forked_process_dies_with_the_one_it_was_forked_for(tmp_path: Path) -> None:
    """Also when that is killed by kill -9, and the fork server goes, too."""
    (tmp_path / "waiting.py").write_text(
        "import os, signal, sys\n"
        "from worker import process\n"
        "process.die_with_parent(int(sys.argv[1]))\n"
        "print(os.getpid(), os.getppid(), flush=True)\n"
        "signal.pause()\n"
    )
    parent = (
        "import os, sys\n"
        "from worker import forking\n"
        "forking.PRELOADED = 'json'\n"
        "forking.start([sys.executable, '-m', 'waiting', str(os.getpid())], dict(os.environ)).wait()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    assert all(map(is_alive, pids))

    worker.kill()

    assert worker.stdout.read() == ""  # returns when all have closed the pipe: when they are dead
    worker.wait()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_that_is_given_another_parent_ends_at_once(module: Path) -> None:
    module.write_text("from worker import process; process.die_with_parent(1)")

    assert fork().wait(60) == DRAINED


def test_what_is_imported_before_a_fork_starts_no_thread_and_asks_for_no_gpu() -> None:
    """CUDA cannot be used after a fork of a process that has used it, and threads are not there any more."""
    code = """
import threading
import torch

def used(*arguments, **options):
    raise AssertionError("an import asks for a GPU")

for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, used)
import worker.preloaded
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_process_in_which_a_library_has_used_cuda_before_the_fork_starts_anew(
    module: Path, said: IO[bytes]
) -> None:
    """Torch marks such a process itself."""
    (module.parent / "torch_after_cuda.py").write_text(
        "import torch\n"
        "from worker import forking\n"
        "torch.cuda._is_in_bad_fork = lambda: True\n"
        "forking.run_module('forked_module', [])\n"
    )
    module.write_text("import sys; sys.exit(5 if 'torch' in sys.modules else 4)")
    command = [sys.executable, "-m", "torch_after_cuda"]

    child = forking.start(command, {"PYTHONPATH": str(module.parent)}, stderr=said)

    assert child.wait(60) == 4, text_of(said)
