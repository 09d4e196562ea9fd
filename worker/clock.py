"""Seconds by phase of one step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from core.telemetry import tracing


class Clock:
    """`with clock("sampling"): ...` adds to that phase; `seconds` has the sums."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with tracing.span(phase):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
