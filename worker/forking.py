"""Start a process of the worker by forking one that has imported torch and the code of a run: it takes milliseconds.

The one that is forked is worker/fork_server.py, a child of this process. It is started once, and again if it has died.
"""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Protocol

from worker import process

log = logging.getLogger(__name__)

DYING_SECONDS = 10.0
# Other systems' libraries do not survive a fork (macOS: Objective-C), so a process starts anew there.
FORKS = sys.platform == "linux"


class Started(Protocol):
    """A process that the worker has started, such as a `subprocess.Popen`."""

    @property
    def pid(self) -> int | None:
        """None: it has not begun yet."""

    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class ForkServer:
    """The process that is forked.

    Args:
        preloaded: the module that it imports.
    """

    def __init__(self, preloaded: str = "worker.preloaded") -> None:
        self.preloaded = preloaded
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def warm(self) -> None:
        """Start it, if it does not run. Returns before it has imported anything. Raises OSError."""
        with self._lock:
            self._start()

    def send(self, files: Sequence[int]) -> None:
        """Ask for a process with these files: the request, its control socket, its own. Raises OSError."""
        with self._lock:
            running, requests = self._start()
            try:
                socket.send_fds(requests, [b"fork"], files)
            except (BrokenPipeError, ConnectionResetError):  # it is dying
                running.kill()
                running.wait()
                _, requests = self._start()
                socket.send_fds(requests, [b"fork"], files)

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._running is not None:
            running, requests = self._running
            if (status := running.poll()) is None:
                return self._running
            log.warning("the fork server has ended with status %s and is started again", status)
            requests.close()
        # Each request is one message, with its files.
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno()), str(os.getpid()), self.preloaded]
        with theirs:
            running = subprocess.Popen(
                [sys.executable, "-m", "worker.fork_server", *arguments],
                stdin=subprocess.DEVNULL,
                env=process.quiet_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals to the group of the worker are the worker's to handle
            )
        # It would end by itself, but not while it imports.
        weakref.finalize(self, running.kill)
        self._running = running, requests
        return self._running


SERVER = ForkServer()  # of this process


def warm() -> None:
    """Have the next process start at once. Raises OSError: no memory, process or file descriptor is free."""
    if FORKS:
        SERVER.warm()


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stderr: IO[bytes] | None = None,
    pass_fds: Collection[int] = (),
    server: ForkServer = SERVER,
) -> Started:
    """Start a command in its own session. `python -m MODULE ...` of this Python is forked, any other executed.

    A forked process has the module search path of this one.

    Args:
        environment: of the process. The libraries have read theirs when they were imported: this process's.
        stdin: subprocess.PIPE or subprocess.DEVNULL.
        stderr: None: this process's.
        pass_fds: file descriptors that it has by the same numbers.

    Raises OSError: no memory, process or file descriptor is free.
    """
    if FORKS and list(command[:2]) == [sys.executable, "-m"]:
        return Forked(server, command[2:], environment, stdin, stderr, pass_fds)
    return subprocess.Popen(
        command, stdin=stdin, stderr=stderr, env=environment, pass_fds=pass_fds, start_new_session=True
    )


def kill(child: Started, seconds: float = process.KILLED_SECONDS) -> bool:
    """Kill a process, and return whether it has ended within this time. One inside a hung driver never does."""
    child.kill()
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


class Forked:
    """A process that runs a module, with the methods of a `subprocess.Popen`.

    It begins once the fork server has finished its imports, and is killed when this object is dropped.
    """

    def __init__(
        self,
        server: ForkServer,
        module: Sequence[str],
        environment: Mapping[str, str],
        stdin: int,
        stderr: IO[bytes] | None,
        pass_fds: Collection[int],
    ) -> None:
        self._server = server  # it ends with its last reference
        self._pid: int | None = None
        self.stdin: IO[bytes] | None = None
        self._status: int | None = None
        self._lock = threading.Lock()
        # Says the process id and the exit status, and hears signals.
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as opened, ExitStack() as failed:
            failed.callback(self._control.close)
            opened.callback(control.close)
            if stdin == subprocess.PIPE:
                theirs, ours = os.pipe()
                self.stdin = os.fdopen(ours, "wb")
                failed.callback(self.stdin.close)
            else:
                theirs = os.open(os.devnull, os.O_RDONLY)
            opened.callback(os.close, theirs)
            files = {0: theirs, 1: 1, 2: 2 if stderr is None else stderr.fileno()}
            files |= {number: number for number in pass_fds}
            # In a file, because an environment may be larger than a message.
            task = opened.enter_context(os.fdopen(os.memfd_create("task"), "wb"))
            fields = [list(module), dict(environment), sys.path, str(Path.cwd()), list(files)]
            task.write(json.dumps(fields).encode())
            task.flush()
            server.send([task.fileno(), control.fileno(), *files.values()])
            failed.pop_all()

    @property
    def pid(self) -> int | None:
        with self._lock:
            self._read_status()
            return self._pid

    def poll(self) -> int | None:
        with self._lock:
            return self._read_status()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative after a signal. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._readable(left)
        return status

    def send_signal(self, sig: int) -> None:
        with self._lock:
            if self._read_status() is None:
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._control.send(bytes([sig]))

    def kill(self) -> None:
        with self._lock:
            if self._read_status() is None and self._pid is None:
                self._end(-signal.SIGKILL)  # it will not begin
                return
        self.send_signal(signal.SIGKILL)

    def _read_status(self) -> int | None:
        """Read what the fork server has said. A fork server that has died takes the process with it."""
        while self._status is None and self._readable(0):
            try:
                said = self._control.recv(1024).decode()
            except ConnectionResetError:  # a signal came too late for it; what it has said comes now
                continue
            match said.partition(" "):
                case ["pid", _, pid]:
                    self._pid = int(pid)
                case ["status", _, status]:
                    self._end(int(status))
                case ["failed", _, cause]:
                    log.warning("a process could not be forked: %s", cause)
                    self._end(process.UNSTARTED)
                case _:
                    log.warning("the fork server has died, and process %s with it", self._pid)
                    self._await_death()
                    self._end(-signal.SIGKILL)
        return self._status

    def _await_death(self) -> None:
        """The kernel kills it with the fork server, and its memory is free a moment later."""
        if self._pid is not None:
            with suppress(OSError):  # it is dead, or no descriptor is free
                handle = os.pidfd_open(self._pid)
                try:
                    _wait_for(handle, DYING_SECONDS)
                finally:
                    os.close(handle)

    def _end(self, status: int) -> None:
        self._status = status
        with suppress(OSError):  # the fork server has closed its end
            self._control.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait; closed with this object

    def _readable(self, seconds: float | None) -> bool:
        return _wait_for(self._control.fileno(), seconds)


def _wait_for(file: int, seconds: float | None) -> bool:
    """Wait until the file can be read. Not with select.select, which takes no number above 1023."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))
