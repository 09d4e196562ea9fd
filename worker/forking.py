"""Start a process of the worker by forking one that has imported torch and the code of a run: it takes milliseconds.

The one that is forked is the fork server of Python's `multiprocessing`: a process that imports `worker.preloaded`,
starts no thread and computes nothing. It ends when this process and all that were forked for it have ended.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn, Protocol

from worker import process

# Other systems' libraries do not survive a fork (macOS: Objective-C), so a process starts anew there.
FORKS = sys.platform == "linux"
PRELOADED = "worker.preloaded"

_context = multiprocessing.get_context("forkserver")
# `Process.start` asks for the exit statuses of all others, too, and a status can be read once.
_statuses = threading.Lock()
_alive: "set[Forked]" = set()


class Child(Protocol):
    """A process that the worker has started, such as a `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def warm() -> None:
    """Start the process that is forked, if it does not run yet. Returns before it has imported anything."""
    if FORKS:
        _context.set_forkserver_preload([PRELOADED])
        forkserver.ensure_running()


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stderr: IO[bytes] | None = None,
    pass_fds: Collection[int] = (),
) -> Child:
    """Start a command in its own session. `python -m MODULE ...` of this Python is forked, any other executed.

    Args:
        environment: of the process. The libraries have read theirs when they were imported: this process's.
        stdin: subprocess.PIPE or subprocess.DEVNULL.
        stderr: None: this process's.
        pass_fds: file descriptors that it has by the same numbers.

    Raises OSError: no memory, process or file descriptor is free.
    """
    if FORKS and list(command[:2]) == [sys.executable, "-m"]:
        return Forked(command[2], command[3:], environment, stdin, stderr, pass_fds)
    return subprocess.Popen(
        command, stdin=stdin, stderr=stderr, env=environment, pass_fds=pass_fds, start_new_session=True
    )


class Forked:
    """A process that runs a module, with the methods of a `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdin: int,
        stderr: IO[bytes] | None,
        pass_fds: Collection[int],
    ) -> None:
        theirs, ours = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        files = {0: theirs, 1: 1, 2: 2 if stderr is None else stderr.fileno()}
        files |= {number: number for number in pass_fds}
        sent = {number: Connection(os.dup(file)) for number, file in files.items()}
        os.close(theirs)
        self._process = _context.Process(
            target=_run, name=module, args=(module, list(arguments), dict(environment), sent)
        )
        try:
            with _statuses:
                warm()
                self._process.start()
        except BaseException:
            if ours is not None:
                os.close(ours)
            raise
        finally:
            for copy in sent.values():
                copy.close()
        self.stdin: IO[bytes] | None = None
        if ours is not None:
            self.stdin = os.fdopen(ours, "wb")
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        _alive.add(self)

    def poll(self) -> int | None:
        with _statuses:
            status: int | None = self._process.exitcode
        if status is not None:
            _alive.discard(self)
        return status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative after a signal. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            connection.wait([self._process.sentinel], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        with _statuses, suppress(ProcessLookupError):
            if self._process.exitcode is None:
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(module: str, arguments: list[str], environment: dict[str, str], files: dict[int, Any]) -> NoReturn:
    """Be `python -m module arguments`, in a process that has just been forked."""
    os.setsid()
    # First above all numbers that are wanted, so that none is overwritten before it has been copied.
    above = max(files) + 1
    copies = {number: _copied_above(file.fileno(), above) for number, file in files.items()}
    for file in files.values():
        file.close()
    for number, copy in copies.items():
        os.dup2(copy, number, inheritable=True)
        os.close(copy)
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # Python's own, as in a process that starts anew
    run_module(module, arguments)


def run_module(module: str, arguments: list[str]) -> NoReturn:
    """Run a module here, or in place of this process if a library has used CUDA before the fork."""
    if _touched_a_gpu():
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    sys.argv = [module, *arguments]
    process.name_this(module)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _copied_above(file: int, number: int) -> int:
    import fcntl

    return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, number)


def _touched_a_gpu() -> bool:
    """Whether a library has used CUDA while it was imported, which cannot be used after a fork then."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


@atexit.register
def _end_all() -> None:
    """Python waits at its end for what was forked, and a test that has failed may have left a process."""
    for forked in list(_alive):
        forked.kill()
