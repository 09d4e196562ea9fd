"""Several requests at once, for both kinds of clients."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(call: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
    """The results of the calls, in the order of the items."""
    with ThreadPoolExecutor(at_once) as threads:
        return [*threads.map(call, items)]


async def async_each(call: Callable[[T], Awaitable[R]], items: Iterable[T], at_once: int) -> list[R]:
    """As `each`."""
    places = asyncio.Semaphore(at_once)

    async def limited(item: T) -> R:
        async with places:
            return await call(item)

    return [*await asyncio.gather(*map(limited, items))]
