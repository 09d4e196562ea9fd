"""Export metrics to services without blocking the run.

Each exporter has a queue and a thread. Failed exports are retried until the run ends, and the job gets one warning. A
resumed run fills gaps of the last attempt by comparing its recorded steps with the last step of the service.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

from core.step_metrics import StepMetrics
from worker.recording.exporters.types import Exporter, RunInfo
from worker.recording.results import row
from worker.types import Ended

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 1000  # steps: hours of an outage, in a few megabytes
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
CLOSE_SECONDS = 10.0  # for all exporters together; well inside the half minute that a worker has to drain


def flat(step: StepMetrics) -> dict[str, float]:
    """A step's numbers by the names that /metrics and the result file have for them; what is nested in the first has
    the names of the second."""
    named = {**step.to_data(), **row(step)}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class ExporterThread:
    """The thread that carries one run's steps to one exporter."""

    def __init__(
        self,
        exporter: Exporter,
        run_info: RunInfo,
        on_failure: Callable[[str], None],
        *,
        first_pause: float = FIRST_PAUSE,
        most_waiting: int = MAX_WAITING,
    ) -> None:
        """`on_failure` hears once of an exporter that fails, and may raise."""
        self.exporter = exporter
        self.run_info = run_info
        self.delivered = False  # everything, and the end as well
        self.on_failure = on_failure
        self._reported = False
        self._first_pause = first_pause
        self._waiting: queue.Queue[StepMetrics | Ended] = queue.Queue(most_waiting + 1)
        self._most_waiting = most_waiting
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name="exporter", daemon=True)
        self._recorded: Sequence[StepMetrics] = ()

    def start(self, recorded: Sequence[StepMetrics]) -> None:
        """`recorded`: the steps of attempts before this one."""
        self._recorded = recorded
        self._thread.start()

    def put(self, data: StepMetrics) -> None:
        """Hand over a step. One that finds `most_waiting` before it is left out; the job has it."""
        if self._waiting.qsize() < self._most_waiting:
            self._waiting.put_nowait(data)

    def close(self, ended: Ended) -> None:
        """No more steps will come. From now on each of those that wait is tried once. Returns at once."""
        self._waiting.put_nowait(ended)
        self._closing.set()

    def join(self, seconds: float) -> None:
        if self._thread.ident is None:  # the run ended before it was started
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._report_failure(TimeoutError("the service did not respond before the run ended"))

    @property
    def is_abandoned(self) -> bool:
        """Whether its library was called and has not finished."""
        return self._thread.ident is not None and not self.delivered

    def _deliver(self) -> None:
        try:
            last = self._retry(lambda: self.exporter.start(self.run_info))
            for data in chain(self._recorded, self._steps()):
                if last is None or data.step > last:
                    self._retry(partial(self._send, data))
            self._retry(lambda: self.exporter.finish(self._ended))
            self.delivered = True
        except _Abandoned:
            log.warning("metrics of %s were not all delivered", self.run_info.job_id)

    def _send(self, data: StepMetrics) -> None:
        self.exporter.step(data.step, flat(data))

    def _steps(self) -> Iterator[StepMetrics]:
        while not isinstance(one := self._waiting.get(), str):
            yield one
        self._ended: Ended = one

    def _retry(self, do: Callable[[], T]) -> T:
        pause = self._first_pause
        while True:
            closing = self._closing.is_set()
            try:
                return do()
            except Exception as cause:  # the run continues, no matter what the library raises
                self._report_failure(cause)
            if closing:
                raise _Abandoned
            self._closing.wait(pause)
            pause = min(2 * pause, MAX_PAUSE)

    def _report_failure(self, cause: Exception) -> None:
        log.warning("an exporter failed: %r", cause)
        if self._reported:
            return
        self._reported = True
        try:
            self.on_failure(f"{type(cause).__name__}: {cause}".removesuffix(": "))
        except Exception as untold:  # this attempt lost the job's lease, or the database is unavailable
            log.warning("the warning event could not be written: %r", untold)


class _Abandoned(Exception):
    """The run is over and the exporter still fails."""


class ExporterThreads:
    """All exporters of a run."""

    def __init__(
        self, threads: Sequence[ExporterThread] = (), *, close_seconds: float = CLOSE_SECONDS
    ) -> None:
        self.threads = threads
        self.close_seconds = close_seconds
        self._closed = False

    def start(self, recorded: Sequence[StepMetrics]) -> None:
        for thread in self.threads:
            thread.start(recorded)

    def put(self, data: StepMetrics) -> None:
        for thread in self.threads:
            thread.put(data)

    def close(self, ended: Ended) -> None:
        """Give them `close_seconds` to take what waits, all together. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for thread in self.threads:
            thread.close(ended)
        deadline = time.monotonic() + self.close_seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_abandoned:
                _LEFT_BEHIND.append(thread)

    def abandon(self) -> None:
        """Say nothing more, not even how it ended: another process may be writing to the same runs by now."""
        self._closed = True
        _LEFT_BEHIND.extend(self.threads)


# Libraries like to finish their uploads when the process ends, however long that takes. Whether any would is a property
# of the process, and so is this.
_LEFT_BEHIND: list[ExporterThread] = []


def has_abandoned_threads() -> bool:
    """Whether an exporter was given up, and its library must not be waited for at the end of the process."""
    return bool(_LEFT_BEHIND)
