"""Processes that are forked behave as ones that start anew."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.present import present
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
) -> forking.Started:
    command = [sys.executable, "-m", "forked_module", *arguments]
    return forking.start(command, environment, stdin=stdin, stderr=stderr)


def test_a_forked_process_has_its_arguments_environment_input_and_libraries(
    module: Path, said: IO[bytes]
) -> None:
    module.write_text(
        "import os, sys\n"
        "loaded = 'torch' in sys.modules and 'transformers' in sys.modules\n"
        "environment = os.environ['NAME'], os.environ.get('HOME')\n"
        "said = sys.stdin.readline().strip()\n"
        "print(__name__, sys.argv[1:], *environment, said, loaded, file=sys.stderr)\n"
        "print(os.getsid(0) == os.getpid(), open('/proc/self/comm').read(), end='', file=sys.stderr)\n"
    )
    child = fork("a", "b", stderr=said, NAME="value")
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(b"a claim\n")

    assert child.wait(60) == 0
    assert text_of(said) == "__main__ ['a', 'b'] value None a claim True\nTrue forked_module\n"


def test_it_has_the_files_that_are_passed_by_their_numbers(module: Path) -> None:
    module.write_text("import os, sys; os.write(int(sys.argv[1]), b'written')")
    for _ in range(2):
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


WAITING = """
import os, signal, sys
from worker import process
process.die_with_parent(int(sys.argv[1]))
with open(sys.argv[2], "w") as ready:
    ready.write(f"{os.getpid()} {os.getppid()}\\n")
signal.pause()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_forked_process_and_its_server_die_with_the_one_they_were_started_for(
    tmp_path: Path, stopped: bool
) -> None:
    """Also when that is killed by kill -9, and when the process is stopped."""
    (tmp_path / "waiting.py").write_text(WAITING)
    parent = (
        "import os, sys\n"
        "from worker import forking\n"
        "server = forking.ForkServer('json')\n"
        "command = [sys.executable, '-m', 'waiting', str(os.getpid()), '/dev/stdout']\n"
        "forking.start(command, dict(os.environ), server=server).wait()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    handles = [os.pidfd_open(pid) for pid in pids]
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)

    worker.kill()
    worker.wait()

    for handle in handles:
        assert select.select([handle], [], [], 30)[0], "it lives on"
        os.close(handle)


@pytest.fixture
def server() -> forking.ForkServer:
    """Another one, without torch."""
    return forking.ForkServer("json")


def ready(server: forking.ForkServer, folder: Path, **options: Any) -> tuple[forking.Started, int]:
    """A process that waits, and the process id of its parent."""
    (folder / "waits.py").write_text(WAITING)
    fifo = folder / "ready"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "waits", str(os.getpid()), str(fifo)]
    child = forking.start(command, {"PYTHONPATH": str(folder)}, server=server, **options)
    return child, int(fifo.read_text().split()[1])


def test_a_fork_server_that_is_killed_takes_its_processes_with_it_and_is_replaced(
    module: Path, server: forking.ForkServer
) -> None:
    child, parent = ready(server, module.parent)

    handle = os.pidfd_open(present(child.pid))

    os.kill(parent, signal.SIGKILL)

    assert child.wait(60) == -signal.SIGKILL
    assert select.select([handle], [], [], 0)[0], "it has ended"
    os.close(handle)
    module.write_text("import sys; sys.exit(6)")
    assert forking.start([sys.executable, "-m", "forked_module"], {}, server=server).wait(60) == 6


def test_a_fork_server_leaves_signals_to_the_worker(module: Path, server: forking.ForkServer) -> None:
    child, parent = ready(server, module.parent)

    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(parent, number)
    child.send_signal(signal.SIGTERM)

    assert child.wait(60) == -signal.SIGTERM
    module.write_text("import os, sys; sys.exit(os.getppid() != int(sys.argv[1]))")
    again = forking.start([sys.executable, "-m", "forked_module", str(parent)], {}, server=server)
    assert again.wait(60) == 0


def test_a_process_that_is_dropped_is_killed(module: Path, server: forking.ForkServer) -> None:
    child, _ = ready(server, module.parent)
    handle = os.pidfd_open(present(child.pid))

    del child

    assert select.select([handle], [], [], 30)[0]
    os.close(handle)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Slow imports go on when somebody writes to it."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


@pytest.fixture
def slow_server(tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> forking.ForkServer:
    (tmp_path / "slow_imports.py").write_text(f"open({str(gate)!r}).read()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return forking.ForkServer("slow_imports")


def test_a_start_does_not_wait_for_the_imports_and_can_be_taken_back(
    tmp_path: Path, module: Path, slow_server: forking.ForkServer, gate: Path
) -> None:
    module.write_text("import pathlib; pathlib.Path(__file__).with_name('began').touch()")
    command = [sys.executable, "-m", "forked_module"]
    first, second = (forking.start(command, {}, server=slow_server) for _ in range(2))
    assert (first.poll(), first.pid) == (None, None)

    first.kill()

    assert first.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "began").exists()
    gate.write_text("go on")
    assert second.wait(60) == 0
    assert (tmp_path / "began").exists()


def test_a_module_that_cannot_be_imported_before_the_fork_leaves_that_to_each_process(
    module: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module.write_text("import sys; sys.exit(5)")
    server = forking.ForkServer("no_such_module_at_all")

    assert forking.start([sys.executable, "-m", "forked_module"], {}, server=server).wait(60) == 5
    assert "No module named 'no_such_module_at_all'" in capfd.readouterr().err


def test_a_signal_that_comes_before_the_process_has_begun_is_not_lost(
    module: Path, slow_server: forking.ForkServer, gate: Path
) -> None:
    module.write_text("import signal; signal.pause()")
    command = [sys.executable, "-m", "forked_module"]
    child = forking.start(command, {}, server=slow_server)

    child.send_signal(signal.SIGTERM)
    gate.write_text("go on")

    assert child.wait(60) == -signal.SIGTERM


def test_a_thread_that_waits_hears_that_another_has_taken_the_process_back(
    module: Path, slow_server: forking.ForkServer
) -> None:
    module.write_text("")
    child = forking.start([sys.executable, "-m", "forked_module"], {}, server=slow_server)
    statuses: list[int] = []
    waiting = threading.Thread(target=lambda: statuses.append(child.wait()))
    waiting.start()

    child.kill()
    with open(os.devnull) as reuses_its_number:  # noqa: PTH123 - as other threads do
        waiting.join(60)

    assert (statuses, reuses_its_number.closed) == ([-signal.SIGKILL], True)


def test_processes_start_and_end_where_a_thousand_files_are_open(module: Path) -> None:
    """select.select takes no number above 1023."""
    module.write_text("import sys; sys.exit(3)")
    code = (
        "import os, resource, sys\n"
        "from worker import forking\n"
        "limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 4096), limit))\n"
        "files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]\n"
        "command = [sys.executable, '-m', 'forked_module']\n"
        "sys.exit(forking.start(command, dict(os.environ), server=forking.ForkServer('json')).wait(60))\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{module.parent}:{ROOT}"}

    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 3


def test_a_process_that_an_import_has_left_ends_without_harm(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_one.py").write_text(
        "import os, subprocess\n"
        "os.environ.pop('NAME', None)\n"
        "subprocess.Popen(['sleep', '0.2'])\n"
        "print('imported')\n"
    )
    module.write_text("import sys, time; sys.exit(0 if sys.stdin.readline() else 1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NAME", "value")
    server = forking.ForkServer("leaves_one")
    command = [sys.executable, "-m", "forked_module"]
    long = forking.start(command, {}, stdin=subprocess.PIPE, server=server)

    with pytest.raises(subprocess.TimeoutExpired):
        long.wait(1.0)  # the other has ended
    assert long.stdin is not None
    with long.stdin:
        long.stdin.write(b"end\n")

    assert long.wait(60) == 0


def test_a_fork_server_that_nobody_knows_any_more_ends_also_while_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "never_imported.py").write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(gate)!r}).write_text(str(os.getpid()))\n"
        "signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = forking.ForkServer("never_imported")
    server.warm()
    handle = os.pidfd_open(int(gate.read_text()))

    del server

    assert select.select([handle], [], [], 30)[0], "it lives on"
    os.close(handle)


def test_no_status_is_lost_to_a_signal_that_comes_too_late(module: Path, server: forking.ForkServer) -> None:
    module.write_text("import sys; sys.exit(75)")
    for _ in range(30):
        child = forking.start([sys.executable, "-m", "forked_module"], {}, server=server)
        while child.poll() is None:
            child.send_signal(signal.SIGCONT)
        assert child.wait(60) == 75


@pytest.mark.parametrize("number", range(3, 12))
def test_a_passed_file_may_have_any_number(module: Path, server: forking.ForkServer, number: int) -> None:
    """Also one that the process or its server uses itself."""
    module.write_text(
        "import os, sys\n"
        "from worker import process\n"
        "process.die_with_parent(int(sys.argv[2]))\n"
        "os.write(int(sys.argv[1]), b'written')\n"
    )
    reading, writing = os.pipe()
    code = (
        "import os, sys\n"
        "from worker import forking\n"
        f"os.dup2({writing}, {number})\n"
        f"command = [sys.executable, '-m', 'forked_module', '{number}', str(os.getpid())]\n"
        f"child = forking.start(command, dict(os.environ), pass_fds=[{number}], server=forking.ForkServer('json'))\n"
        "sys.exit(child.wait(60))\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{module.parent}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], pass_fds=[writing], env=environment)
    os.close(writing)

    assert (done.returncode, os.read(reading, 100)) == (0, b"written")
    os.close(reading)


def test_a_process_leaves_no_descriptor_open_here(module: Path, server: forking.ForkServer) -> None:
    module.write_text("")

    def descriptors() -> int:
        child = forking.start(
            [sys.executable, "-m", "forked_module"], {}, stdin=subprocess.PIPE, server=server
        )
        assert child.wait(60) == 0
        assert child.stdin is not None
        child.stdin.close()
        return len(list(Path("/proc/self/fd").iterdir()))

    assert descriptors() == descriptors()


def test_functions_for_the_end_of_a_process_run(
    module: Path, said: IO[bytes], server: forking.ForkServer
) -> None:
    module.write_text("import atexit, sys; atexit.register(print, 'the end', file=sys.stderr); sys.exit(4)")

    child = forking.start([sys.executable, "-m", "forked_module"], {}, stderr=said, server=server)

    assert (child.wait(60), text_of(said)) == (4, "the end\n")


def test_one_that_is_given_another_parent_ends_at_once(module: Path) -> None:
    module.write_text("from worker import process; process.die_with_parent(1)")

    assert fork().wait(60) == DRAINED


def test_what_comes_before_a_fork_starts_no_thread_and_asks_torch_for_no_gpu() -> None:
    """CUDA cannot be used after a fork of a process that has used it, and threads are not there any more."""
    code = """
import threading
import torch

def used(*arguments, **options):
    raise AssertionError("a process that is forked asks for a GPU")

for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, used)
import worker.preloaded
from worker.training.launch import Group, launch_config
launch_config(2, Group())
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_process_in_which_a_library_has_used_cuda_before_the_fork_starts_anew(
    module: Path, said: IO[bytes]
) -> None:
    """Torch marks such a process itself."""
    (module.parent / "torch_after_cuda.py").write_text(
        "import sys\n"
        "import torch\n"
        "from worker import fork_server\n"
        "torch.cuda._is_in_bad_fork = lambda: True\n"
        "fork_server.run_module('forked_module', sys.argv[1:])\n"
    )
    module.write_text(
        "import sys\n"
        "from worker import process\n"
        "process.die_with_parent(int(sys.argv[1]))\n"
        "sys.exit(5 if 'torch' in sys.modules else 4)\n"
    )
    command = [sys.executable, "-m", "torch_after_cuda", str(os.getpid())]

    child = forking.start(command, {"PYTHONPATH": str(module.parent)}, stderr=said)

    assert child.wait(60) == 4, text_of(said)
