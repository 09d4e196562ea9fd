"""Notice that another machine of a run has vanished: no power, or no network.

Such a machine closes no connection, and the operating system waits a quarter of an hour for it. So one rank of each
machine counts in the store of the launcher, and reads the counters of others.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

log = logging.getLogger(__name__)


class Counters(Protocol):
    """Of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...


class Presence:
    """One rank's count, and when it has last seen those of others move."""

    def __init__(
        self,
        counters: Counters,
        own: int,
        others: Sequence[int],
        limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters, self.own, self.limit_seconds = counters, own, limit_seconds
        self._clock = clock
        self._counts: dict[int, int] = dict.fromkeys(others, 0)
        self._seen_at = dict.fromkeys(others, clock())

    def exchange(self) -> None:
        """Count once, and read the others' counters. Blocks while the machine with the store does not answer."""
        self.counters.add(_key(self.own), 1)
        for other, last in self._counts.items():
            count = self.counters.add(_key(other), 0)
            if count != last:
                self._counts[other], self._seen_at[other] = count, self._clock()

    def vanished(self) -> list[int]:
        """The ranks whose counters have not moved for the limit."""
        now = self._clock()
        return [other for other, seen in self._seen_at.items() if now - seen > self.limit_seconds]


def _key(rank: int) -> str:
    return f"present/{rank}"


def keep(
    presence: Presence,
    on_vanished: Callable[[int], None],
    left: threading.Event,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Exchange counters until `left`, and call `on_vanished` once with a rank that has vanished.

    Calls `on_answer` after each exchange.

    In two threads, because an exchange with a machine that has vanished does not return.
    """
    pause = presence.limit_seconds / 10

    def exchange() -> None:
        while not left.wait(pause):
            try:
                presence.exchange()
                on_answer()
            except RuntimeError as cause:  # the run has ended, or the machine with the store is lost
                log.debug("the counters of the ranks cannot be read: %s", cause)
                return

    def watch() -> None:
        while not left.wait(pause):
            if found := presence.vanished():
                on_vanished(found[0])
                return

    for name, target in (("present", exchange), ("watch", watch)):
        threading.Thread(target=target, name=name, daemon=True).start()
