"""Retry during outages (core/outages.py), so that a short one does not lose hours of work.

Operations are retried from the start, so they must be idempotent: transactions check whether they have been committed
(a connection can be lost after the commit), and blobs are written atomically.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeVar

from core.outages import Resource, outage
from core.storage.disk import count_refusal

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, MAX_PAUSE = 0.1, 5.0


def pauses() -> Iterator[float]:
    """The seconds to wait after each try: they double from FIRST_PAUSE to MAX_PAUSE."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, MAX_PAUSE)


class RetryPolicy:
    """Retries operations until an outage has lasted for `seconds`. Reports an outage that has ended to `tell`."""

    def __init__(
        self,
        seconds: float,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        during: Callable[[Resource], AbstractContextManager[None]] = lambda waiting_for: nullcontext(),
    ) -> None:
        """Create a policy.

        Args:
            wait: returns True to give up at once, as `threading.Event.wait` does when the process stops.
            during: gets the resource, and is left when that is back or given up.
        """
        self.seconds = seconds
        self._tell = tell
        self._clock = clock
        self._wait = wait
        self._during = during
        self._exhausted: Exception | None = (
            None  # what a call gave up on, so that a call around it does not wait again
        )

    def __call__(self, do: Callable[[], T]) -> T:
        """Call `do`, with retries, and return its result.

        Raises:
            the last error of `do`, if it is no outage, or if the outage outlasted `seconds` or `wait` gave up.
        """
        since: float | None = None
        reason: Exception | None = None
        with ExitStack() as waiting:
            for pause in pauses():
                try:
                    done = do()
                    break
                except Exception as cause:
                    resource = outage(cause)
                    if since is None:
                        since = self._clock()
                    if resource is None or cause is self._exhausted:
                        raise
                    if self._clock() - since >= self.seconds:
                        self._exhausted = cause
                        raise
                    if reason is None:
                        log.warning("waiting for the %s: %r", resource, cause)
                        count_refusal(resource)
                        waiting.enter_context(self._during(resource))
                    reason = cause
                if self._wait(pause):
                    raise reason
        if reason is not None and since is not None:
            self._tell(_incident(reason, self._clock() - since))
        return done


def _incident(reason: Exception, seconds: float) -> str:
    first_line = (str(reason).strip() or repr(reason)).split("\n", 1)[0]
    return (
        f"The {outage(reason)} was unavailable; the work waited {seconds:.0f} s and resumed. "
        f"Last error: {first_line}"
    )
