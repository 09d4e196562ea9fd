"""Displays a job's events as they occur, and waits: one live line in a terminal, one line per event in a pipe."""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self, TextIO

from openai.types.fine_tuning import FineTuningJobEvent

from regraft.progress import AXIS, Progress, described, marks_for, queued_text

CLEAR = "\r\x1b[K"
UNUSUAL_S = 60.0  # a silence of the server that lasts longer is called unusual


class Display:
    """Call `event` and `status` as they occur, and `close` at the end."""

    def __init__(
        self, out: TextIO, axis: tuple[float, float] = AXIS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`axis`: the range of the job's rewards."""
        self.out = out
        self._clock = clock
        self._queued_at: float | None = None
        self._lock = threading.RLock()  # the clock of a waiting job redraws the live line beside the events
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None
        self.live = out.isatty()
        self.progress = Progress(axis=axis)
        self._marks = marks_for(out.encoding)
        self._drawn = False

    def event(self, event: FineTuningJobEvent) -> None:
        with self._lock:
            self._event(event)

    def _event(self, event: FineTuningJobEvent) -> None:
        if event.type == "metrics" and isinstance(event.data, dict):
            self.progress.add(event.data)
            if self.live:
                self._draw()
            else:
                # Plain numbers without bars, for logs and grep.
                total = event.data["total_steps"]
                self._say(
                    "  ".join([f"step {event.data['step']}/{total}", *described(event.data, self._marks)])
                )
        elif event.level != "info":
            self._say(f"{'warning' if event.level == 'warn' else event.level}: {event.message}")
        elif not self.live:
            self._say(event.message)

    def status(self, status: str) -> None:
        with self._lock:
            self.progress.status, self.progress.queue = status, None
            if self.live:
                self._draw()

    def inside_step(self, now: Mapping[str, Any]) -> None:
        """Show the work inside of a step; only in a live line."""
        with self._lock:
            self.progress.now = now
            if self.live:
                self._draw()

    def queued(self, queue: Mapping[str, Any]) -> None:
        """Show the place of a waiting job and what it waits for: a live line has a running clock."""
        with self._lock:
            if self._queued_at is None:
                self._queued_at = self._clock()
            self.progress.queue = queue
            if not self.live:
                self._say(f"{self.progress.status}: {queued_text(queue)}")
                return
            self.tick()
            if self._ticker is None:
                ticker = threading.Thread(target=self._keep_ticking, name="queue clock", daemon=True)
                with suppress(RuntimeError):  # the system has no other thread now, and the clock stands still
                    ticker.start()
                    self._ticker = ticker

    def tick(self) -> None:
        """Draw how long the job has been watched in its queue. Called every second."""
        with self._lock:
            if self.progress.queue is not None and self._queued_at is not None:
                self.progress.waited = self._clock() - self._queued_at
                self._draw()

    def _keep_ticking(self) -> None:
        while not self._ended.wait(1.0):
            self.tick()

    def close(self) -> None:
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join()
        if self._drawn:
            print(file=self.out, flush=True)
            self._drawn = False

    def _say(self, line: str) -> None:
        print(f"{CLEAR if self._drawn else ''}{line}", file=self.out, flush=True)
        if self._drawn:
            self._draw()

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1  # the last column would wrap in some terminals
        sizes = ((20, 24), (10, 12), (10, 0))
        lines = [self.progress.line(bar=bar, spark=spark, marks=self._marks) for bar, spark in sizes]
        line = next((line for line in lines if len(line) <= width), lines[-1])
        print(f"{CLEAR}{line[:width]}", end="", file=self.out, flush=True)
        self._drawn = True


class Waiting:
    """Says what a command waits for while the server is silent, from the first second, and for how long.

    A terminal gets one live line with a clock, which goes when the wait ends; a pipe gets a line a minute.
    """

    def __init__(self, out: TextIO, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.out, self._what, self._clock = out, what, clock
        self._since = clock()
        self._next_s = 0.0  # when the next line is due in a pipe
        self._drawn = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_saying, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def say(self, line: str) -> None:
        """Print what the server has reported, and start the clock again."""
        with self._lock:
            self._print(line)
            self._since, self._next_s = self._clock(), UNUSUAL_S

    def end(self) -> None:
        """Stop the clock and erase the live line. May be called several times."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._erase()

    def tick(self) -> None:
        """Print how long the wait has lasted. Called every second."""
        with self._lock:
            waited = self._clock() - self._since
            if self.out.isatty():
                print(f"{CLEAR}{waiting_line(self._what, waited)}", end="", file=self.out, flush=True)
                self._drawn = True
            elif waited >= self._next_s:
                self._print(waiting_line(self._what, waited))
                self._next_s = waited + UNUSUAL_S

    def _keep_saying(self) -> None:
        while not self._ended.wait(1.0):
            self.tick()

    def _print(self, line: str) -> None:
        self._erase()
        print(line, file=self.out, flush=True)

    def _erase(self) -> None:
        if self._drawn:
            print(CLEAR, end="", file=self.out, flush=True)
            self._drawn = False


def waiting_line(what: str, seconds: float) -> str:
    """Such as `waiting for desk, 75 s: unusually long`."""
    unusual = ": unusually long; the server's log may say why" if seconds >= UNUSUAL_S else ""
    return f"waiting for {what}, {seconds:.0f} s{unusual}"
