"""The time limit of a grade. It stands still while the grade waits for its turn at what all grades share.

That is a server, a core of the sandbox, or a process for what may take long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class _Deadline:
    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._waiting = 0  # parts of the grade
        self._left_s = 0.0
        self._has_ended = False

    @contextmanager
    def standing(self) -> Iterator[None]:
        if self._has_ended or self._limit.expired():
            yield
            return
        loop = asyncio.get_running_loop()
        self._waiting += 1
        if self._waiting == 1:
            self._left_s = max(0.0, (self._limit.when() or loop.time()) - loop.time())
            self._limit.reschedule(None)
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and not self._has_ended:
                self._limit.reschedule(loop.time() + self._left_s)

    def end(self) -> None:
        """A part of the grade may outlast it by a moment, until it is cancelled."""
        self._has_ended = True


_CURRENT: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer, except for the time in `standing_still`."""
    async with asyncio.timeout(seconds) as limit:
        deadline = _Deadline(limit)
        token = _CURRENT.set(deadline)
        try:
            yield
        finally:
            deadline.end()
            _CURRENT.reset(token)


async def once_begun(began: Future[None], call: Future[T]) -> T:
    """Return the result of a queued call. The deadline of this task runs from the time at which the call has begun.

    Cancelling this cancels the call.

    Args:
        began: has its result once the call runs. It cannot be cancelled.
    """
    result = asyncio.wrap_future(call)
    beginning = asyncio.wrap_future(began)
    either: list[asyncio.Future[Any]] = [beginning, result]
    try:
        if not began.done():
            with standing_still():
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return await result
    finally:
        beginning.cancel()
        result.cancel()


@contextmanager
def standing_still() -> Iterator[None]:
    """The deadline of this task, if any, does not run."""
    deadline = _CURRENT.get()
    if deadline is None:
        yield
        return
    with deadline.standing():
        yield
