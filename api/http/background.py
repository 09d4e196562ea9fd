"""Runs work in the background of this process, and stores its progress and how it ends (core/results/background.py)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from anyio import to_thread

from api.http.admission import AdmittedRequest
from api.http.deps import Service
from core.database.tables import BackgroundRun, Project
from core.errors import InvalidRequest, NotReady, ServiceError, TooManyAtOnce
from core.results import background
from core.retry import RetryPolicy

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0

T = TypeVar("T")


class Slot:
    """A place among the concurrent runs, held until its grading thread has ended.

    That thread continues after a disconnect or a timeout. Otherwise repeated requests could occupy all threads.
    """

    def __init__(self, place: AdmittedRequest) -> None:
        self._place = place
        self._grading: asyncio.Task[Any] | None = None

    async def in_thread(self, call: Callable[[], T]) -> T:
        grading = self._grading = asyncio.create_task(asyncio.to_thread(call))
        return await asyncio.shield(grading)

    def release(self) -> None:
        if self._grading is None:
            self._place.leave()
        else:
            self._grading.add_done_callback(lambda ended: self._place.leave())


async def enter(service: Service, project: Project) -> Slot:
    """Take a place for a run of this project.

    Raises:
        NotReady: this process has as many runs as it takes, of the project or of all.
    """
    try:
        return Slot(await service.admission.previews.enter(project.id))
    except TooManyAtOnce:
        raise NotReady("Other previews or audits are still running; try again.", retry_after=10) from None


async def begin(
    service: Service,
    slot: Slot,
    add: Callable[[], T],
    run: Callable[[T], Awaitable[None]],
) -> T:
    """Add the row of a run in a thread, start the run, and return the result of `add`. The slot is freed at its end."""
    try:
        added = await to_thread.run_sync(add)
    except BaseException:
        slot.release()
        raise
    running: asyncio.Task[None] = asyncio.ensure_future(run(added))
    service.tasks.add(running)
    running.add_done_callback(service.tasks.discard)
    running.add_done_callback(lambda ended: slot.release())
    return added


Complete = Callable[..., bool]
"""Stores the results in a session: (session, id, progress, results). False: the run was canceled or deleted."""


async def run(
    service: Service,
    table: type[BackgroundRun],
    run_id: str,
    work: Awaitable[T],
    *,
    what: str,
    too_slow: InvalidRequest,
    progress: Callable[[], Mapping[str, Any]],
    complete: Complete,
) -> None:
    """Do the work, write its progress once a second, and store how it ends.

    Args:
        what: for the error of a run that broke, such as "preview".
        too_slow: the error of a run that takes longer than `service.preview_seconds`.
    """
    working = asyncio.create_task(_in_time(work, service.preview_seconds, too_slow))
    retry = RetryPolicy(service.settings.patience_seconds, log.warning)

    def write_once(write: Callable[..., bool], *values: Any) -> bool:
        with service.database.write() as session:
            return write(session, *values)

    async def written(write: Callable[..., bool], *values: Any) -> bool:
        return await retry.call_async(partial(asyncio.to_thread, write_once, write, *values))

    try:
        while not (await asyncio.wait([working], timeout=PROGRESS_SECONDS))[0]:
            if not await written(background.renew, table, run_id, progress()):
                return  # canceled or deleted
        await written(complete, run_id, progress(), working.result())
    except ServiceError as refused:
        await written(background.fail, table, run_id, _error(refused))
    except Exception:
        log.exception("the %s %s failed", what, run_id)
        broken = ServiceError(f"The {what} failed by an error of the server, which is in its log.")
        await written(background.fail, table, run_id, _error(broken))
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _in_time(work: Awaitable[T], seconds: float, too_slow: InvalidRequest) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise too_slow from None


def _error(error: ServiceError) -> dict[str, Any]:
    """An error as a response would have it, with its status."""
    return {**error.envelope()["error"], "status": error.status_code}
