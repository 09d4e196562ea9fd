"""Seconds by phase of one step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.telemetry import tracing


class Clock:
    """`with clock("sampling"): ...` adds to that phase; `seconds` has the sums."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._clock()
        with tracing.span(phase):
            yield
        self.add(phase, self._clock() - start)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
