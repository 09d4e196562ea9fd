"""Turns of jobs on the device that they share: one computes at a time, so that each runs as fast as it would alone.

The worker (worker/supervisor/turn_server.py) gives turns in the order of requests. A turn ends when its process has
nothing more to compute, or at the next `offer` after a second.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from worker.clock import Clock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAITING = "waiting"  # the phase of a clock
TURN_SECONDS = 1.0
BEAT_SECONDS = 5.0
# The messages of a process to the worker, and its answer.
ASK, DONE, GRANT = b"?", b".", b"!"
GONE = "the worker gives no turns on the device any more"


class TurnsLost(Exception):
    """The worker does not answer."""


class _Depth(threading.local):
    value = 0


class DeviceTurns:
    """The turns of this process on the device: a context, for code that computes there.

    Threads of a process share its turn. It blocks, also an event loop if it is entered in its thread.
    """

    def __init__(
        self,
        address: Path,
        beat: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        """Connect to the worker at `address`.

        Args:
            beat: called from time to time while the process waits, because waiting is no sign of a hung run.

        Raises:
            TurnsLost: the worker does not listen there.
        """
        self._clock, self._beat, self._beat_seconds = clock, beat, beat_seconds
        self._worker = socket.socket(socket.AF_UNIX)
        try:
            self._worker.connect(str(address))
        except OSError as cause:
            self._worker.close()
            raise TurnsLost(GONE) from cause
        self._changed = threading.Condition()
        self._inside = 0  # threads
        self._is_lost = False  # the worker gives no turn any more, and this process has none
        self._ends_at = 0.0
        self._depth = _Depth()
        self._synchronize: Callable[[], None] = lambda: None
        self._waits: tuple[float, float | None] = 0.0, None  # in all, and the beginning of the one now

    @property
    def waited(self) -> float:
        """Seconds in which the process has waited for a turn, up to now."""
        in_all, since = self._waits
        return in_all if since is None else in_all + self._clock() - since

    def __enter__(self) -> None:
        if self._depth.value == 0:
            self._enter()
        self._depth.value += 1

    def __exit__(self, *raised: object) -> None:
        self._depth.value -= 1
        if self._depth.value == 0 and not self._is_lost:
            self._leave()

    def offer(self) -> None:
        """Let others have their turn if this one is over. Call it between parts of a long computation."""
        if self._depth.value and self._is_over():
            self._leave()
            self._enter()

    def offer_before_each_forward(self, model: "PreTrainedModel") -> None:
        """Call `offer` whenever the model begins to compute a micro-batch, or the next token of its answers."""
        model.get_input_embeddings().register_forward_pre_hook(lambda *_: self.offer())

    def synchronize_with(self, synchronize: Callable[[], None]) -> None:
        """Call `synchronize` before a turn ends. A GPU computes after the CPU has queued the kernels and gone on."""
        self._synchronize = synchronize

    def _enter(self) -> None:
        with self._changed:
            # Other threads of this process cannot prolong its turn.
            self._changed.wait_for(lambda: not (self._inside and self._is_over()))
            if self._is_lost:
                raise TurnsLost(GONE)
            if not self._inside:
                try:
                    self._take()
                except TurnsLost:
                    self._is_lost = True
                    self._changed.notify_all()
                    raise
            self._inside += 1

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            try:
                if not self._inside:
                    self._synchronize()
            finally:
                if not self._inside:
                    with contextlib.suppress(OSError):  # the next turn will say so
                        self._worker.sendall(DONE)
                self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._clock() >= self._ends_at

    def _take(self) -> None:
        in_all, since = self._waits[0], self._clock()
        self._waits = in_all, since
        try:
            self._worker.sendall(ASK)
            while (answer := self._answer()) is None:
                self._beat()
        except OSError as cause:
            raise TurnsLost(GONE) from cause
        now = self._clock()
        self._waits, self._ends_at = (in_all + now - since, None), now + TURN_SECONDS
        if answer != GRANT:
            raise TurnsLost(GONE)

    def _answer(self) -> bytes | None:
        """Return what the worker sends; b"" at its end, None after `beat_seconds` without anything."""
        self._worker.settimeout(self._beat_seconds)
        try:
            return self._worker.recv(1)
        except TimeoutError:
            return None


class SharedClock(Clock):
    """Counts the time in which the process waits for the device as a separate phase.

    So usage, budgets and costs are those of a job that runs alone.
    """

    def __init__(self, turns: DeviceTurns, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._turns = turns

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        waited = self._turns.waited
        with super().__call__(phase):
            yield
        if waited := self._turns.waited - waited:
            self.add(phase, -waited)
            self.add(WAITING, waited)
