"""Seconds by phase of one step. Those in which the run waits for the device, which other jobs use, are a phase too."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.telemetry import tracing
from worker.sharing.turns import TURNS, DeviceTurns

WAITING = "waiting"


class Clock:
    """`with clock("sampling"): ...` adds to that phase; `seconds` has the sums."""

    def __init__(self, turns: DeviceTurns = TURNS, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._turns, self._clock = turns, clock

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, waited = self._clock(), self._turns.waited
        with tracing.span(phase):
            yield
        waited = self._turns.waited - waited
        self._add(phase, self._clock() - start - waited)
        if waited:
            self._add(WAITING, waited)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
