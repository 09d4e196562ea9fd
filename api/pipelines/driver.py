"""The task that advances pipelines. Any number of processes run it; each pipeline is advanced by one at a time."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import anyio
from anyio import to_thread
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.http.deps import Service
from api.pipelines.stages import Advance
from core.claims import Claim, LeaseLost
from core.database.ids import new_id
from core.database.tables import Pipeline
from core.pipelines import lifecycle

log = logging.getLogger(__name__)
T = TypeVar("T")
AT_ONCE, PER_PROJECT = 8, 2


@dataclass
class HandBack:
    """How many seconds after its release a pipeline is due again."""

    after: float


class PipelineDriver:
    """Looks at every unfinished pipeline once per `settings.reconcile_seconds`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.owner = new_id("api-")
        self._in_work: Counter[str] = Counter()  # by project
        self._claiming, self._polling = anyio.Lock(), anyio.Lock()
        self._left = anyio.Event()  # a pipeline is no longer in work

    async def run(self) -> None:
        """Until cancelled: several pipelines at once, because one may make large files for an hour."""
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(self._run_one_at_a_time)

    async def _run_one_at_a_time(self) -> None:
        """Advance due pipelines, one after the other. A failure is logged, and the pipeline is tried again."""
        while True:
            claimed = await self._next_due()
            try:
                await self.advance(*claimed)
            except Exception:
                log.exception("a pipeline could not be advanced; it will be tried again")

    async def _next_due(self) -> tuple[Claim, str]:
        """Wait for a pipeline that is due. One task queries the database for all that have nothing to do."""
        async with self._polling:
            while True:
                self._left = anyio.Event()
                try:
                    if (claimed := await self.claim_next()) is not None:
                        return claimed
                except Exception:
                    log.exception("could not query due pipelines; retrying")
                with anyio.move_on_after(self.service.settings.reconcile_seconds):
                    await self._left.wait()

    async def advance(self, claim: Claim, project_id: str) -> None:
        """Advance a claimed pipeline of this project as far as it goes now, and release it."""
        try:
            async with self._with_lease(claim) as hand_back:
                hand_back.after = max(hand_back.after, await Advance(self.service, claim).run())
        except LeaseLost as lost:
            log.info("%s", lost)
        finally:
            self._in_work[project_id] -= 1
            self._in_work += Counter()  # drops zeros: the number of projects is unbounded
            self._left.set()  # another pipeline of the project may be claimed

    async def claim_next(self) -> tuple[Claim, str] | None:
        """Claim a pipeline, and count it as in work for its project; None: none is due.

        Those of a project that has PER_PROJECT in work here wait, so that no project has all places.
        """
        async with self._claiming:
            busy = [project for project, count in self._in_work.items() if count >= PER_PROJECT]
            claimed = await to_thread.run_sync(self._claim, busy)
            if claimed is not None:
                self._in_work[claimed[1]] += 1
            return claimed

    def _claim(self, busy: Sequence[str]) -> tuple[Claim, str] | None:
        free = lifecycle.free(Pipeline, busy)
        with self.service.database.read() as session:  # without a write while there is nothing to do
            if session.scalar(select(Pipeline.seq).where(free).limit(1)) is None:
                return None

        def claim(session: Session) -> tuple[Claim, str] | None:
            made = lifecycle.claim(session, self.owner, busy)
            if made is None:
                return None
            return made, session.scalars(select(Pipeline.project_id).where(Pipeline.id == made.job_id)).one()

        return self._written(claim)

    def _written(self, write: Callable[[Session], T]) -> T:
        with self.service.database.write() as session:
            return write(session)

    @asynccontextmanager
    async def _with_lease(self, claim: Claim) -> AsyncIterator["HandBack"]:
        """Renew the lease while the block runs, then hand the pipeline back until the next round."""
        hand_back = HandBack(self.service.settings.reconcile_seconds)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._renew, claim)
            failure: BaseException | None = None
            try:
                yield hand_back
            except Exception as cause:  # outside of the task group, which would wrap it
                failure = cause
            tasks.cancel_scope.cancel()
        with suppress(Exception):  # the lease ends by itself
            await to_thread.run_sync(self._release, claim, hand_back.after)
        if failure is not None:
            raise failure

    def _release(self, claim: Claim, after: float) -> None:
        with lifecycle.fenced(self.service.database, claim) as (session, pipeline):
            lifecycle.release(session, pipeline, after)

    async def _renew(self, claim: Claim) -> None:
        def renew(session: Session) -> bool:
            return lifecycle.heartbeat(session, claim, lifecycle.LEASE_SECONDS)

        while True:
            await anyio.sleep(lifecycle.LEASE_SECONDS / 3)
            try:
                await to_thread.run_sync(self._written, renew)
            except Exception as cause:
                log.warning("could not renew the lease on %s: %r", claim.job_id, cause)
