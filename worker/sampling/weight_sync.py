"""The time in which a job's own engines have no answers to sample, because they start, wake or get the weights."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class WeightSync:
    """Seconds of this process, which is one attempt, in all of its sessions with engines."""

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0
    _began: float | None = field(default=None, init=False)

    def begin(self) -> None:
        """A session begins."""
        self._began = self.clock()

    def end(self) -> None:
        """The first engine of the session has the weights. A second call does nothing."""
        if self._began is not None:
            self.seconds += self.clock() - self._began
            self._began = None


WEIGHT_SYNC = WeightSync()
