"""Concurrency limits: a share of the process per kind of long request, and within it a share per project.

Beyond its share a project's requests queue, and beyond that queue they get 429. A free place goes to the waiting
project with the fewest places, and among equals to the one served longest ago. Everything here runs in the server's
event loop, so nothing is locked and a waiting request holds no thread.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from core.errors import TooManyAtOnce
from core.settings import Settings

# Per process, for all projects together.
GRADER_RUNS, UPLOADS, STREAMS, PREVIEWS, FILE_READS = 64, 32, 500, 4, 4
# Large JSON bodies (api/http/large_bodies.py): those still arriving, up to 2 MiB each, and those parsed, up to 30 MB
# each.
ARRIVING_BODIES, PARSED_BODIES = 64, 8
ARRIVING_BODIES_PER_PROJECT = 8
# Of the 40 threads of the default pool, leaving the others to ordinary endpoints. A name server that does not answer
# holds a check of an address for as long as the resolver waits.
CHECKS, ADDRESS_CHECKS, SEARCHES = 12, 8, 8

T = TypeVar("T")


@dataclass
class _Project:
    running: int = 0
    turn: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class AdmittedRequest:
    """One admitted request of a `ConcurrencyLimit`. `leave` is idempotent."""

    def __init__(self, limit: "ConcurrencyLimit", project_id: str) -> None:
        self._limit: ConcurrencyLimit | None = limit
        self._project_id = project_id

    def leave(self) -> None:
        limit, self._limit = self._limit, None
        if limit is not None:
            limit._leave(self._project_id)


class ConcurrencyLimit:
    """At most `places` concurrent requests of one kind, `per_project` of one project; `waiting` more of each may queue.

    Args:
        what: Plural name of the kind for error messages, such as "grader runs".
    """

    def __init__(self, what: str, *, places: int, per_project: int, waiting: int = 0) -> None:
        self.what = what
        self.places, self.per_project, self.waiting = places, min(per_project, places), waiting
        self.in_use = 0
        self._turns = 0
        self._projects: dict[str, _Project] = {}

    def queued(self, project_id: str) -> int:
        """Requests of this project that wait for a place."""
        project = self._projects.get(project_id)
        return 0 if project is None else len(project.waiting)

    @asynccontextmanager
    async def admitted(self, project_id: str) -> AsyncIterator[None]:
        """Hold a place while the block runs. Raises TooManyAtOnce, as `enter` does."""
        place = await self.enter(project_id)
        try:
            yield
        finally:
            place.leave()

    async def in_thread(
        self, project_id: str, call: Callable[[], T], limiter: CapacityLimiter | None = None
    ) -> T:
        """Run `call` in a thread, by default of the common pool, and return its result. Raises as `enter` does.

        A thread cannot be stopped: if the caller is cancelled, the place is kept until the thread has ended.
        """
        place = await self.enter(project_id)
        running = asyncio.ensure_future(to_thread.run_sync(call, limiter=limiter))
        running.add_done_callback(lambda ended: place.leave())
        return await asyncio.shield(running)

    async def enter(self, project_id: str) -> AdmittedRequest:
        """Wait for a place for a request of this project. Cancellation removes it from the queue.

        Raises:
            TooManyAtOnce: the queue of the project is full.
        """
        project = self._projects.setdefault(project_id, _Project())
        # A free place always goes to a queued request first, so this skips no queued request.
        if self.in_use < self.places and project.running < self.per_project:
            self._take(project)
            return AdmittedRequest(self, project_id)
        if len(project.waiting) >= self.waiting:
            under_way = project.running
            self._forget(project_id)
            raise TooManyAtOnce(self.what, running=under_way, waiting=self.waiting)
        turn = asyncio.get_running_loop().create_future()
        project.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted at the same moment
                self._leave(project_id)
            else:
                with suppress(ValueError):  # `_next` has removed it at the same moment
                    project.waiting.remove(turn)
                self._forget(project_id)
            raise
        return AdmittedRequest(self, project_id)

    def _take(self, project: _Project) -> None:
        self.in_use += 1
        self._turns += 1
        project.running += 1
        project.turn = self._turns

    def _leave(self, project_id: str) -> None:
        self._projects[project_id].running -= 1
        self.in_use -= 1
        while self.in_use < self.places and (project := self._next()) is not None:
            turn = project.waiting.popleft()
            if not turn.cancelled():
                self._take(project)
                turn.set_result(None)
        self._forget(project_id)

    def _next(self) -> _Project | None:
        able = [
            project
            for project in self._projects.values()
            if project.waiting and project.running < self.per_project
        ]
        return min(able, key=lambda project: (project.running, project.turn), default=None)

    def _forget(self, project_id: str) -> None:
        """Delete the row of an idle project: the number of projects is unbounded."""
        project = self._projects.get(project_id)
        if project is not None and not project.running and not project.waiting:
            del self._projects[project_id]


class Admission:
    """The concurrency limits of one process."""

    def __init__(self, settings: Settings) -> None:
        self.grader_runs = ConcurrencyLimit(
            "grader runs",
            places=GRADER_RUNS,
            per_project=settings.grader_runs_per_project,
            waiting=settings.grader_runs_waiting_per_project,
        )
        self.uploads = ConcurrencyLimit(
            "uploads",
            places=UPLOADS,
            per_project=settings.uploads_per_project,
            waiting=settings.uploads_waiting_per_project,
        )
        # A stream lasts as long as its job, so queueing would be unbounded.
        self.streams = ConcurrencyLimit("streams", places=STREAMS, per_project=settings.streams_per_project)
        # Rejected instead of queued: each takes minutes.
        self.previews = ConcurrencyLimit("previews", places=PREVIEWS, per_project=2)
        # Requests that read whole files first: estimates, the start of a preview, and jobs with a validation_split.
        self.file_reads = ConcurrencyLimit(
            "estimates, previews and validation splits", places=FILE_READS, per_project=2, waiting=16
        )
        # Lists of rollouts and of their prompts, which may read all samples of a job.
        self.searches = ConcurrencyLimit("searches of rollouts", places=SEARCHES, per_project=4, waiting=64)
        # Checks of schemas and patterns (api/http/schema_checks.py).
        self.checks = ConcurrencyLimit(
            "checks of schemas and patterns", places=CHECKS, per_project=4, waiting=16
        )
        self.address_checks = ConcurrencyLimit(
            "checks of webhook addresses", places=ADDRESS_CHECKS, per_project=2, waiting=8
        )
        self.arriving_bodies = ConcurrencyLimit(
            "large request bodies",
            places=ARRIVING_BODIES,
            per_project=ARRIVING_BODIES_PER_PROJECT,
            waiting=256,
        )
        # Only bodies that have arrived queue here, so none is rejected.
        self.parsed_bodies = ConcurrencyLimit(
            "large request bodies",
            places=PARSED_BODIES,
            per_project=PARSED_BODIES // 2,
            waiting=ARRIVING_BODIES_PER_PROJECT,
        )
