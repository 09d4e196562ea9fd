"""Displays a job's events as they occur: one live line in a terminal, one line per event in a pipe."""

import shutil
from collections.abc import Mapping
from typing import Any, TextIO

from openai.types.fine_tuning import FineTuningJobEvent

from regraft.progress import AXIS, Progress, described, marks_for

CLEAR = "\r\x1b[K"


class Display:
    """Call `event` and `status` as they occur, and `close` at the end."""

    def __init__(self, out: TextIO, axis: tuple[float, float] = AXIS) -> None:
        """`axis`: the range of the job's rewards."""
        self.out = out
        self.live = out.isatty()
        self.progress = Progress(axis=axis)
        self._marks = marks_for(out.encoding)
        self._drawn = False

    def event(self, event: FineTuningJobEvent) -> None:
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
        self.progress.status = status
        if self.live:
            self._draw()

    def inside_step(self, now: Mapping[str, Any]) -> None:
        """Show the work inside of a step; only in a live line."""
        self.progress.now = now
        if self.live:
            self._draw()

    def close(self) -> None:
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
