"""Who may be served now: a bounded share of the process for each kind of long request, and in it one for each project.

Beyond its share a project's requests wait in line, and beyond that line they are refused with 429. A place that becomes
free goes to the waiting project with the fewest places, and among equals to the one whose last turn was longest ago.
Everything here runs in the server's event loop: nothing is locked, and who waits holds no thread.
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

# In one process, for all projects together.
GRADER_RUNS, UPLOADS, STREAMS, PREVIEWS, FILE_READS = 64, 32, 500, 4, 4
# Large JSON bodies (api/large_bodies.py) that arrive, of up to 2 MiB each, and that are parsed, of up to 30 MB each.
ARRIVING_BODIES, PARSED_BODIES = 64, 8
ARRIVING_BODIES_PER_PROJECT = 8
CHECKS = 12  # each waits in one of the 40 threads that answer everybody: the rest of these are for others

T = TypeVar("T")


@dataclass
class _Project:
    running: int = 0
    turn: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Place:
    """What `Share` gives out. Leaving twice is fine."""

    def __init__(self, share: "Share", project_id: str) -> None:
        self._share: Share | None = share
        self._project_id = project_id

    def leave(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share._leave(self._project_id)


class Share:
    """At most `places` requests of one kind at once, `per_project` of one project; `waiting` more of each wait.

    Args:
        what: the kind in the words of a refusal, such as "grader runs".
    """

    def __init__(self, what: str, *, places: int, per_project: int, waiting: int = 0) -> None:
        self.what = what
        self.places, self.per_project, self.waiting = places, min(per_project, places), waiting
        self.taken = 0
        self._turns = 0
        self._projects: dict[str, _Project] = {}

    @asynccontextmanager
    async def admitted(self, project_id: str) -> AsyncIterator[None]:
        """A place for as long as the block runs. Raises TooManyAtOnce, as `enter` does."""
        place = await self.enter(project_id)
        try:
            yield
        finally:
            place.leave()

    async def in_thread(
        self, project_id: str, call: Callable[[], T], limiter: CapacityLimiter | None = None
    ) -> T:
        """What `call` returns in a thread, by default one of those that answer everybody. Raises as `enter` does.

        A thread cannot be stopped: if the caller is cancelled, the place is kept until the thread has ended.
        """
        place = await self.enter(project_id)
        running = asyncio.ensure_future(to_thread.run_sync(call, limiter=limiter))
        running.add_done_callback(lambda ended: place.leave())
        return await asyncio.shield(running)

    async def enter(self, project_id: str) -> Place:
        """A place for a request of this project, after those that are before it. Cancelling gives up the wait.

        Raises:
            TooManyAtOnce: as many as may wait do so already.
        """
        project = self._projects.setdefault(project_id, _Project())
        # A free place is always given to a waiting request first, so none is passed over here.
        if self.taken < self.places and project.running < self.per_project:
            self._take(project)
            return Place(self, project_id)
        if len(project.waiting) >= self.waiting:
            under_way = project.running
            self._forget(project_id)
            raise TooManyAtOnce(self.what, running=under_way, waiting=self.waiting)
        turn = asyncio.get_running_loop().create_future()
        project.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at the same moment
                self._leave(project_id)
            else:
                with suppress(ValueError):  # a place became free at the same moment, and passed it over
                    project.waiting.remove(turn)
                self._forget(project_id)
            raise
        return Place(self, project_id)

    def _take(self, project: _Project) -> None:
        self.taken += 1
        self._turns += 1
        project.running += 1
        project.turn = self._turns

    def _leave(self, project_id: str) -> None:
        self._projects[project_id].running -= 1
        self.taken -= 1
        while self.taken < self.places and (project := self._next()) is not None:
            turn = project.waiting.popleft()
            if not turn.cancelled():
                self._take(project)
                turn.set_result(None)
        self._forget(project_id)

    def _next(self) -> _Project | None:
        able = [one for one in self._projects.values() if one.waiting and one.running < self.per_project]
        return min(able, key=lambda one: (one.running, one.turn), default=None)

    def _forget(self, project_id: str) -> None:
        """Keep no row for a project that has nothing here: there may be any number of projects."""
        project = self._projects.get(project_id)
        if project is not None and not project.running and not project.waiting:
            del self._projects[project_id]


class Admission:
    """The shares of one process."""

    def __init__(self, settings: Settings) -> None:
        self.grader_runs = Share(
            "grader runs",
            places=GRADER_RUNS,
            per_project=settings.grader_runs_per_project,
            waiting=settings.grader_runs_waiting_per_project,
        )
        self.uploads = Share(
            "uploads",
            places=UPLOADS,
            per_project=settings.uploads_per_project,
            waiting=settings.uploads_waiting_per_project,
        )
        # A stream lasts as long as its job does, so there is nothing to wait for.
        self.streams = Share("streams", places=STREAMS, per_project=settings.streams_per_project)
        # Refused and not queued: each takes minutes.
        self.previews = Share("previews", places=PREVIEWS, per_project=2)
        # What reads whole files before it can answer: estimates, and the beginning of a preview.
        self.file_reads = Share("estimates and previews", places=FILE_READS, per_project=2, waiting=16)
        # Of schemas and patterns (api/schemas.py).
        self.checks = Share("checks of schemas and patterns", places=CHECKS, per_project=4, waiting=16)
        self.arriving_bodies = Share(
            "large request bodies",
            places=ARRIVING_BODIES,
            per_project=ARRIVING_BODIES_PER_PROJECT,
            waiting=256,
        )
        # Only bodies that have arrived wait here, so that none is refused.
        self.parsed_bodies = Share(
            "large request bodies",
            places=PARSED_BODIES,
            per_project=PARSED_BODIES // 2,
            waiting=ARRIVING_BODIES_PER_PROJECT,
        )
