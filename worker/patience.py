"""Waiting for a database or a blob store that is away, rather than losing hours of work to half a minute.

What is done under patience is done again from its beginning, so it must do no harm to do it twice: transactions check
whether they have happened already (a connection can be lost after the commit), and blobs are written whole.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from core import blobs, db

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0


class Patience:
    """Does things again for up to `seconds`, for as long as what they need is unavailable. `tell` hears how long."""

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
        """What `do` returns.

        Raises:
            whatever `do` raised last, if it is not about something being away, or was so for all those seconds.
        """
        start = self._clock()
        pause = FIRST_PAUSE
        reason: Exception | None = None
        while True:
            try:
                done = do()
            except Exception as cause:
                if not (db.is_away(cause) or blobs.is_away(cause)) or self._clock() - start >= self.seconds:
                    raise
                if reason is None:
                    log.warning("waiting: %r", cause)
                reason = cause
            else:
                if reason is not None:
                    self._tell(_incident(reason, self._clock() - start))
                return done
            self._wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _incident(reason: Exception, seconds: float) -> str:
    what = "database" if db.is_away(reason) else "blob store or the disk"
    first_line = str(reason).strip().split("\n", 1)[0]
    return f"The {what} was away; the run waited {seconds:.0f} s and went on. The last answer: {first_line}"
