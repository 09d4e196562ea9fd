"""The work of a run inside of its step, in a small file that its supervisor copies to the job's row.

Steps may take minutes, and nothing is recorded before their end.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.telemetry import logs, tracing
from worker import process

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0


class Progress:
    """Counts the answers of a step, or its rows. Every method is cheap, and may be called in any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._step: int | None = None
        self._phase, self._since = "loading", clock()  # the newest one without answers
        self._is_in_phase = False
        self._rows: int | None = None  # of the phase; None: it has none
        self._rows_done = 0
        # The answers that are wanted now.
        self._kind, self._sampling_since = "sampling", clock()
        self._wanted = self._sampled = self._graded = 0
        self._has_grader = False
        self._outages: list[tuple[str, float]] = []  # several calls may wait at once
        self._compiling: tuple[int, int, float] | None = None  # done, of, since

    def begin(self) -> None:
        """The attempt begins: its process may have been waiting for it."""
        with self._lock:
            self._since = self._sampling_since = self._clock()

    def step(self, number: int) -> None:
        """Step `number` begins; 0 is the validation of the start."""
        with self._lock:
            self._step = number

    def sampling(self, answers: int, *, validates: bool) -> None:
        """`answers` are wanted, for training or for a validation."""
        with self._lock:
            self._kind, self._sampling_since = "validation" if validates else "sampling", self._clock()
            self._wanted, self._sampled, self._graded = answers, 0, 0

    def with_grader(self) -> None:
        """Answers are done when they are graded."""
        with self._lock:
            self._has_grader = True

    def sampled(self) -> None:
        with self._lock:
            self._sampled += 1

    def graded(self) -> None:
        with self._lock:
            self._graded += 1

    @contextmanager
    def phase(self, name: str, rows: int | None = None) -> Iterator[None]:
        """A part of the step in which no answers are waited for, though those of the next step may arrive.

        Args:
            rows: those of a file that it goes through, told by `row`.
        """
        with self._lock:
            self._phase, self._since, self._is_in_phase = name, self._clock(), True
            self._rows, self._rows_done = rows, 0
        try:
            yield
        finally:
            with self._lock:
                self._is_in_phase = False

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Nothing is done until the resource `name` of core/outages.py is back."""
        outage = f"waiting for the {name}", self._clock()
        with self._lock:
            self._outages.append(outage)
        try:
            yield
        finally:
            with self._lock:
                self._outages.remove(outage)

    @contextmanager
    def compiling(self, done: int, of: int) -> Iterator[None]:
        """A kernel is compiled, after `done` of the `of` that are known to be needed."""
        with self._lock:
            self._compiling = done, of, self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._compiling = None

    def row(self, count: int) -> None:
        """`count` more rows of the phase are done."""
        with self._lock:
            self._rows_done += count

    def now(self) -> dict[str, Any]:
        """{"step", "phase", "done", "of", "since"}; `done` and `of` are null where nothing is counted."""
        with self._lock:
            if self._outages:
                phase, since = self._outages[0]
                return {"step": self._step, "phase": phase, "done": None, "of": None, "since": int(since)}
            if self._compiling:
                done, of, since = self._compiling
                return {"step": self._step, "phase": "compiling", "done": done, "of": of, "since": int(since)}
            are_sampled = self._sampled >= self._wanted
            if self._is_in_phase or (are_sampled and not (self._has_grader and self._graded < self._wanted)):
                rows_done = None if self._rows is None else min(self._rows_done, self._rows)
                counted: dict[str, Any] = {
                    "phase": self._phase,
                    "done": rows_done,
                    "of": self._rows,
                    "since": self._since,
                }
            else:
                is_grading = are_sampled and self._kind == "sampling"
                counted = {
                    "phase": "grading" if is_grading else self._kind,
                    "done": self._graded if are_sampled else self._sampled,
                    "of": self._wanted,
                    "since": self._sampling_since,
                }
            return {"step": self._step, **counted, "since": int(counted["since"])}


PROGRESS = Progress()
"""That of this process, which is one attempt."""


@contextmanager
def written_to(path: Path, progress: Progress = PROGRESS) -> Iterator[None]:
    """Write the progress to `path` whenever it has changed, at most once in WRITE_SECONDS, during the context."""
    with repeated(Writer(path, progress), WRITE_SECONDS, name="progress"):
        yield


@contextmanager
def repeated(do: Callable[[], None], seconds: float, *, name: str) -> Iterator[None]:
    """Call `do` every few seconds during the context, in a thread, and once more at its end."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(seconds):
            do()

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        do()


class Writer:
    """Writes a progress to a file. An error of the disk is logged once, and the next call retries."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self.path, self.progress = path, progress
        self._last: dict[str, Any] | None = None
        self._failed = False

    def __call__(self) -> None:
        now = self.progress.now()
        if now == self._last:
            return
        try:
            new = process.unfinished(self.path)
            new.write_text(json.dumps(now))
            new.replace(self.path)
        except OSError as cause:
            if not self._failed:
                log.warning("the progress of the run cannot be written: %s; retrying", cause)
            self._failed = True
            return
        self._failed = False
        self._last = now


@contextmanager
def in_step(number: int) -> Iterator[None]:
    """Attribute progress, logs and traces during the context to this step."""
    PROGRESS.step(number)
    with logs.bound(step=number), tracing.span("step", **{"regraft.step": number}):
        yield
