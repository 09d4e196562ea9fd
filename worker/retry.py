"""Retry while the database or the blob store is unavailable, so that short outages do not lose hours of work.

Operations are retried from the start, so they must be idempotent: transactions check whether they have been committed
(a connection can be lost after the commit), and blobs are written atomically.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from core.database import engine
from core.storage import store

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, MAX_PAUSE = 0.1, 5.0


class RetryPolicy:
    """Retries operations for up to `seconds` while a dependency is unavailable. Reports the outage to `tell`."""

    def __init__(
        self,
        seconds: float,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.seconds = seconds
        self._tell = tell
        self._clock = clock
        self._wait = wait

    def __call__(self, do: Callable[[], T]) -> T:
        """Call `do`, with retries, and return its result.

        Raises:
            the last error of `do`, if it is no outage, or if the outage outlasted `seconds`.
        """
        start = self._clock()
        pause = FIRST_PAUSE
        reason: Exception | None = None
        while True:
            try:
                done = do()
            except Exception as cause:
                if (
                    not (engine.is_away(cause) or store.is_away(cause))
                    or self._clock() - start >= self.seconds
                ):
                    raise
                if reason is None:
                    log.warning("waiting: %r", cause)
                reason = cause
            else:
                if reason is not None:
                    self._tell(_incident(reason, self._clock() - start))
                return done
            self._wait(pause)
            pause = min(2 * pause, MAX_PAUSE)


def _incident(reason: Exception, seconds: float) -> str:
    what = "database" if engine.is_away(reason) else "blob store or the disk"
    first_line = str(reason).strip().split("\n", 1)[0]
    return f"The {what} was unavailable; the run waited {seconds:.0f} s and resumed. Last error: {first_line}"
