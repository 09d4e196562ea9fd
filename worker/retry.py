"""Retry while the database or the blob store is unavailable, so that short outages do not lose hours of work.

Operations are retried from the start, so they must be idempotent: transactions check whether they have been committed
(a connection can be lost after the commit), and blobs are written atomically.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
        during: Callable[[str], AbstractContextManager[None]] = lambda waiting_for: nullcontext(),
    ) -> None:
        """`during` gets the name of the dependency, and is left when that is back or given up."""
        self.seconds = seconds
        self._tell = tell
        self._clock = clock
        self._wait = wait
        self._during = during

    def __call__(self, do: Callable[[], T]) -> T:
        """Call `do`, with retries, and return its result.

        Raises:
            the last error of `do`, if it is no outage, or if the outage outlasted `seconds`.
        """
        start = self._clock()
        pause = FIRST_PAUSE
        reason: Exception | None = None
        with ExitStack() as outage:
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
                        outage.enter_context(self._during(_away(cause)))
                    reason = cause
                else:
                    break
                self._wait(pause)
                pause = min(2 * pause, MAX_PAUSE)
        if reason is not None:
            self._tell(_incident(reason, self._clock() - start))
        return done


def _incident(reason: Exception, seconds: float) -> str:
    first_line = str(reason).strip().split("\n", 1)[0]
    return f"The {_away(reason)} was unavailable; the run waited {seconds:.0f} s and resumed. Last error: {first_line}"


def _away(reason: Exception) -> str:
    return "database" if engine.is_away(reason) else "blob store or the disk"
