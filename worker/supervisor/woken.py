"""A thread's work that others ask for: by a message of the broker, or by the reconciler."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class LoopEnded(Exception):
    """Raised by the work of a loop to end its thread, and with it the worker (worker/supervisor/liveness.py)."""


class WokenLoop:
    """Calls `work` after each wake-up, in the thread of `run_until`. Wake-ups during a call are one more call."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self.work = name, work
        self._woken = threading.Event()

    def wake(self) -> None:
        self._woken.set()

    def run_until(self, stop: threading.Event) -> None:
        """Work until `stop` is set and `wake` was called after that.

        An exception is logged and ends nothing, except LoopEnded.
        """
        while True:
            self._woken.wait()
            if stop.is_set():
                return
            self._woken.clear()
            try:
                self.work()
            except LoopEnded as cause:
                log.error("the thread %s ends: %s", self.name, cause)
                return
            except Exception:
                log.exception("the thread %s failed; it is woken again while work waits", self.name)
