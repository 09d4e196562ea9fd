"""Cancels work when its client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def until_gone(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; if the client disconnects first, cancel it and return None.

    `receive` is that of an ASGI request whose body has been read.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
