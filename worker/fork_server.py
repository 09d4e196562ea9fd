"""`python -m worker.fork_server SOCKET PARENT PRELOADED`: import a module, then be forked for each request.

It starts no thread and computes nothing, because neither threads nor CUDA survive a fork. It ends when PARENT, the
worker, closes the socket or dies, and the kernel kills all processes that were forked from it then.

A request carries file descriptors: a file with its fields as JSON (`ForkRequest`), the control socket of the process,
and the files. On the control socket the server says `pid N` and `status N`, or `failed CAUSE`, and hears signals, one
in a byte. Its end kills the process.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from worker import process

MAX_FILES = 64
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ForkRequest(NamedTuple):
    """The module that a forked process runs, and its surroundings."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    search: list[str]  # sys.path
    folder: str
    files: dict[int, int]  # by the number that each is to have


class ForkRequests:
    """The sockets of the server, and the processes that were forked from it."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.controls: dict[int, socket.socket] = {}  # of processes by id
        self.unheard: set[int] = set()  # processes whose control sockets have ended

    def next(self) -> ForkRequest | None:
        """Wait for a request and fork. Return the task in the new process; None in the server at its end."""
        woken, wakes = socket.socketpair()
        for end in (woken, wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            heard = {pid: control for pid, control in self.controls.items() if pid not in self.unheard}
            ready = _ready(self.requests, woken, *heard.values())
            if woken in ready:
                with suppress(BlockingIOError):
                    woken.recv(4096)
                self._reap()
            for pid, control in heard.items():
                if control in ready and pid in self.controls:
                    self._signal(pid, control)
            if self.requests in ready:
                said, files, _, _ = socket.recv_fds(self.requests, 16, MAX_FILES)
                if not said:
                    return None
                if (task := self._fork(files)) is not None:
                    for end in (woken, wakes):
                        end.close()
                    return task

    def _reap(self) -> None:
        while self.controls:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.unheard.discard(pid)
            if (control := self.controls.pop(pid, None)) is None:  # a process that an import has left
                continue
            with control, suppress(OSError):
                control.send(f"status {os.waitstatus_to_exitcode(status)}".encode())

    def _signal(self, pid: int, control: socket.socket) -> None:
        """Send the signals that have come. The process has not been reaped, so the id is still its own."""
        try:
            numbers = control.recv(16)
        except OSError:
            numbers = b""
        if not numbers:
            self.unheard.add(pid)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)

    def _fork(self, files: list[int]) -> ForkRequest | None:
        """Return the task in the new process, None in the server."""
        task, control, *others = files
        told = socket.socket(fileno=control)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of other threads. NumPy's are made for forks.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as cause:  # no memory or process is free: as if it had ended at once
            with suppress(OSError):
                os.write(others[2], f"{cause}\n".encode())  # its standard error
            with suppress(OSError):
                told.send(f"failed {cause}".encode())
            pid = -1
        if pid == 0:
            told.close()
            self._close()
            with os.fdopen(task, "rb") as given:
                given.seek(0)
                (module, *arguments), environment, search, folder, numbers = json.load(given)
            return ForkRequest(
                module, arguments, environment, search, folder, dict(zip(numbers, others, strict=True))
            )
        for file in (task, *others):
            os.close(file)
        if pid > 0:
            self.controls[pid] = told
            with suppress(OSError):
                told.send(f"pid {pid}".encode())
        else:
            told.close()
        return None

    def _close(self) -> None:
        """Close in a new process what belongs to the server."""
        signal.set_wakeup_fd(-1)
        self.requests.close()
        for control in self.controls.values():
            control.close()


def _ready(*sockets: socket.socket) -> list[socket.socket]:
    """The sockets that can be read, of which there is at least one. select.select takes no number above 1023."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLIN)
    numbers = {number for number, _ in poll.poll()}
    return [one for one in sockets if one.fileno() in numbers]


def main() -> None:
    # The worker decides. Those that a process is sent wait until it has its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    listener, parent, preloaded = sys.argv[1:]
    requests = ForkRequests(socket.socket(fileno=int(listener)))
    before = set(os.environ)
    try:
        importlib.import_module(preloaded)
    except Exception:  # each process will say so, too, as far as it needs the module
        traceback.print_exc()
    for out in (sys.stdout, sys.stderr):
        out.flush()  # or each process would print it again
    server = os.getpid()
    if (task := requests.next()) is not None:
        for name in before - task.environment.keys():  # what the imports have set stays
            os.environ.pop(name, None)
        os.environ.update(task.environment)
        be(task, server, int(parent))
    else:
        os._exit(0)  # at once, because the kernel's kill of all processes waits for it


def be(task: ForkRequest, server: int, parent: int) -> None:
    """Be `python -m module ...` in a process that has just been forked and has its environment."""
    os.setsid()
    _place(task.files)
    process.forked_by(server, parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    sys.path[:] = task.search
    os.chdir(task.folder)
    run_module(task.module, task.arguments)


def run_module(module: str, arguments: list[str]) -> None:
    """Run a module here, or in place of this process if a library has used CUDA before the fork."""
    if _used_cuda():
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    sys.argv = [module, *arguments]
    process.name_this(module)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _place(files: dict[int, int]) -> None:
    """Give the files their numbers."""
    import fcntl

    # First above all numbers that are wanted, so that none is overwritten before it has been copied.
    above = max(files) + 1
    copies = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, copy in copies.items():
        os.dup2(copy, number, inheritable=True)
        os.close(copy)
    sys.stdin = os.fdopen(0)


def _used_cuda() -> bool:
    """Whether a library has used CUDA while it was imported, which cannot be used after a fork then."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


if __name__ == "__main__":
    main()
