"""Work on the next items while the result of one is used."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# More threads were slower on two cores: much of the work holds Python's lock.
MAX_AHEAD = 4


def ahead(
    work: Callable[[Item], Result], items: Iterable[Item], discard: Callable[[Result], None]
) -> Generator[Result, None, None]:
    """Yield `work(item)` of each item in their order, computed ahead by threads.

    The first item is computed alone, then two at a time, four and MAX_AHEAD, so that a caller who needs few results
    causes little work. `discard` gets each result that was computed but not yielded.
    """
    left, running, most = iter(items), deque[Future[Result]](), 1
    with ThreadPoolExecutor(MAX_AHEAD, thread_name_prefix="ahead") as pool:
        try:
            while True:
                running += [pool.submit(work, item) for item in islice(left, most - len(running))]
                if not running:
                    return
                yield running.popleft().result()
                most = min(2 * most, MAX_AHEAD)
        finally:
            for future in running:
                future.cancel()
                future.add_done_callback(lambda done: _discard(done, discard))


def _discard(done: "Future[Result]", discard: Callable[[Result], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        discard(done.result())
