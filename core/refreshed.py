"""A value of another server, for callers that must not wait for it: read in a thread, and not for each of them."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` beside the caller."""
    threading.Thread(target=work, daemon=True).start()


class Refreshed(Generic[T]):
    """Reads a value at most every `seconds`, and never twice at once: nothing more is requested of a silent server."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._run = run
        self._lock = threading.Lock()
        self._begun_at = 0.0
        self._reading: Future[T] | None = None

    def latest(self, read: Callable[[], T]) -> "Future[T]":
        """The newest reading. Begins one with `read` if that is old and done."""
        with self._lock:
            now = self._clock()
            if self._reading is None or (now - self._begun_at >= self.seconds and self._reading.done()):
                reading: Future[T] = Future()
                self._reading, self._begun_at = reading, now
                try:
                    self._run(lambda: _fulfil(reading, read))
                except RuntimeError as cause:  # no thread can be started now
                    reading.set_exception(cause)
            return self._reading


def _fulfil(reading: "Future[T]", read: Callable[[], T]) -> None:
    try:
        reading.set_result(read())
    except BaseException as cause:
        reading.set_exception(cause)
