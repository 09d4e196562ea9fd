"""An event loop for graders in its own thread, so that a grader that computes delays other graders but not the API."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class GraderLoop:
    """Starts with the first grader. Usable from any event loop."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, grading: Coroutine[Any, Any, T]) -> T:
        """Run `grading` and return its result. Cancellation is passed on and awaited.

        Raises RuntimeError: the system has no thread for the loop now. The next call tries again.
        """
        here = asyncio.get_running_loop()
        try:
            there = self._started()
        except RuntimeError:
            grading.close()  # nothing will await it
            raise
        ended: asyncio.Future[asyncio.Task[T]] = here.create_future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = there.create_task(grading)
            task.add_done_callback(lambda done: here.call_soon_threadsafe(ended.set_result, done))
            tasks.append(task)

        there.call_soon_threadsafe(begin)
        try:
            return (await asyncio.shield(ended)).result()
        except asyncio.CancelledError:
            if not ended.done():
                there.call_soon_threadsafe(lambda: tasks[0].cancel())  # scheduled after `begin`
                await asyncio.shield(ended)
            raise

    def close(self) -> None:
        with self._starting:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                try:
                    threading.Thread(target=_run, args=[loop], name="graders", daemon=True).start()
                except RuntimeError:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
