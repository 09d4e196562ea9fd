"""Turns of jobs on the device that they share: one computes at a time, so that each runs as fast as it would alone.

The worker (worker/supervise/turn_server.py) gives turns in the order of requests. A turn ends when its process has
nothing more to compute, or at the next `offer` after a second.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

TURN_SECONDS = 1.0
BEAT_SECONDS = 5.0
# The messages of a process to the worker, and its answer.
ASK, DONE, GRANT = b"?", b".", b"!"
GONE = "the worker gives no turns on the device any more"


class TurnsLost(Exception):
    """The worker does not answer."""


class _Depth(threading.local):
    value = 0


class DeviceTurns(contextlib.ContextDecorator):
    """The turns of this process: `with TURNS:` around what computes on the device, or `@TURNS` on a function.

    Threads of a process share its turn. Without `join` the process has the device to itself, and this does nothing.
    It blocks, also an event loop if it is entered in its thread.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, beat_seconds: float = BEAT_SECONDS
    ) -> None:
        self._clock, self._beat_seconds = clock, beat_seconds
        self._worker: socket.socket | None = None
        self._beat: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._inside = 0  # threads
        self._ends_at = 0.0
        self._depth = _Depth()
        self._waits: tuple[float, float | None] = 0.0, None  # in all, and the beginning of the one now

    def join(self, address: Path, beat: Callable[[], None] = lambda: None) -> None:
        """Share the device from now on.

        Args:
            beat: called from time to time while the process waits, because waiting is no sign of a hung run.

        Raises:
            TurnsLost: the worker does not listen there.
        """
        self._worker, self._beat = socket.socket(socket.AF_UNIX), beat
        try:
            self._worker.connect(str(address))
        except OSError as cause:
            raise TurnsLost(GONE) from cause

    @property
    def waited(self) -> float:
        """Seconds in which the process has waited for a turn, up to now."""
        in_all, since = self._waits
        return in_all if since is None else in_all + self._clock() - since

    def __enter__(self) -> None:
        if self._worker is not None and self._depth.value == 0:
            self._enter(self._worker)
        self._depth.value += 1

    def __exit__(self, *raised: object) -> None:
        self._depth.value -= 1
        if self._worker is not None and self._depth.value == 0:
            self._leave(self._worker)

    def offer(self) -> None:
        """Let others have their turn if this one is over. Call it between parts of a long computation."""
        if self._worker is not None and self._depth.value and self._is_over():
            self._leave(self._worker)
            self._enter(self._worker)

    def _enter(self, worker: socket.socket) -> None:
        with self._changed:
            # Other threads of this process cannot prolong its turn.
            self._changed.wait_for(lambda: not (self._inside and self._is_over()))
            if not self._inside:
                self._take(worker)
            self._inside += 1

    def _leave(self, worker: socket.socket) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                with contextlib.suppress(OSError):  # the next turn will say so
                    worker.sendall(DONE)
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._clock() >= self._ends_at

    def _take(self, worker: socket.socket) -> None:
        in_all, since = self._waits[0], self._clock()
        self._waits = in_all, since
        try:
            worker.sendall(ASK)
            while (answer := self._answer(worker)) is None:
                self._beat()
        except OSError as cause:
            raise TurnsLost(GONE) from cause
        now = self._clock()
        self._waits, self._ends_at = (in_all + now - since, None), now + TURN_SECONDS
        if answer != GRANT:
            raise TurnsLost(GONE)

    def _answer(self, worker: socket.socket) -> bytes | None:
        """Return what the worker sends; b"" at its end, None after `beat_seconds` without anything."""
        worker.settimeout(self._beat_seconds)
        try:
            return worker.recv(1)
        except TimeoutError:
            return None


TURNS = DeviceTurns()
"""Those of this process, which is one attempt."""
