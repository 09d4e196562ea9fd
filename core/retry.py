"""Retry during outages (core/outages.py), so that a short one does not lose hours of work.

Operations are retried from the start, so they must be idempotent: transactions check whether they have been committed
(a connection can be lost after the commit), and blobs are written atomically.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    """Retries operations until an outage has lasted for `seconds`. Reports an outage that has ended to `report`."""

    def __init__(
        self,
        seconds: float,
        report: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        during: Callable[[Resource], AbstractContextManager[None]] = lambda waiting_for: nullcontext(),
    ) -> None:
        """Create a policy.

        Args:
            wait: returns True to give up at once, as `threading.Event.wait` does when the process stops.
            sleep: waits between the tries of `call_async`.
            during: gets the resource, and is left when that is back or given up.
        """
        self.seconds = seconds
        self._report = report
        self._clock = clock
        self._wait = wait
        self._sleep = sleep
        self._during = during
        self._exhausted: Exception | None = (
            None  # what a call gave up on, so that a call around it does not wait again
        )

    def __call__(self, do: Callable[[], T]) -> T:
        """Call `do`, with retries, and return its result.

        Raises:
            the last error of `do`, if it is no outage, or if the outage outlasted `seconds` or `wait` gave up.
        """
        with _Call(self) as call:
            for pause in pauses():
                try:
                    return do()
                except Exception as cause:
                    call.failed(cause)
                    error = cause
                if self._wait(pause):
                    raise error
        raise AssertionError("there is always another pause")

    async def call_async(self, do: Callable[[], Awaitable[T]]) -> T:
        """As a call, in the event loop: cancellation ends the wait."""
        with _Call(self) as call:
            for pause in pauses():
                try:
                    return await do()
                except Exception as cause:
                    call.failed(cause)
                await self._sleep(pause)
        raise AssertionError("there is always another pause")


class _Call:
    """The outage that one call of a policy meets. Left without an error, it reports the end of the outage."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._waiting = ExitStack()
        self._since = 0.0
        self._reason: Exception | None = None

    def failed(self, cause: Exception) -> None:
        """Return if the operation is to be retried after a pause.

        Raises:
            cause: it is no outage, or the outage outlasted the policy.
        """
        policy, resource = self._policy, outage(cause)
        if resource is None or cause is policy._exhausted:
            raise cause
        if self._reason is None:
            self._since = policy._clock()
        if policy._clock() - self._since >= policy.seconds:
            policy._exhausted = cause
            raise cause
        if self._reason is None:
            log.warning("waiting for the %s: %r", resource, cause)
            count_refusal(resource)
            with _best_effort():
                self._waiting.enter_context(policy._during(resource))
        self._reason = cause

    def __enter__(self) -> "_Call":
        return self

    def __exit__(self, error: object, *about: object) -> None:
        with _best_effort():
            self._waiting.close()
        if error is None and self._reason is not None:
            with _best_effort():
                self._policy._report(_incident(self._reason, self._policy._clock() - self._since))


@contextmanager
def _best_effort() -> Iterator[None]:
    """Log an error of a report about an outage. Most write to the database, which may be unavailable again by then;
    the operation has its own result.
    """
    try:
        yield
    except Exception:
        log.warning("an outage could not be reported", exc_info=True)


def _incident(reason: Exception, seconds: float) -> str:
    first_line = (str(reason).strip() or repr(reason)).split("\n", 1)[0]
    return (
        f"The {outage(reason)} was unavailable; the work waited {seconds:.0f} s and resumed. "
        f"Last error: {first_line}"
    )
