"""client.grader_audits: a grader tried on right answers and on exploits, before it trains."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from openai.pagination import AsyncCursorPage

from regraft.requests import Source, read_grader
from regraft.resources.stored_graders import listed
from regraft.resources.waiting import AsyncWaiting
from regraft.routes import route
from regraft.types import GraderAudit

if TYPE_CHECKING:
    from openai._base_client import AsyncPaginator

    from regraft.client import AsyncRegraft

CREATE, PATH = "/regraft/graders/audit", "/regraft/grader_audits"
POLL_SECONDS = 0.5


class AsyncGraderAudits:
    def __init__(self, client: "AsyncRegraft") -> None:
        self._client = client

    async def create(
        self,
        grader: Source,
        training_file: str,
        *,
        answer: str | None = None,
        rows: int | None = None,
        repeats: int | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
    ) -> GraderAudit:
        """Begin an audit on rows of an uploaded file.

        Args:
            grader: A specification, or {"type": "stored", "name": ...}.
            answer: Template of a right answer, such as `<answer>{{item.answer}}</answer>`.
            repeats: Grades of one answer by judges.
            max_tokens: Most tokens of judges.
        """
        body = await asyncio.to_thread(
            audit_body, grader, training_file, answer, rows, repeats, seed, max_tokens
        )
        return await self._client.post(CREATE, body=body, cast_to=GraderAudit)

    def list(
        self, *, after: str | None = None, limit: int = 20
    ) -> "AsyncPaginator[GraderAudit, AsyncCursorPage[GraderAudit]]":
        """Newest first."""
        options = listed(after, limit)
        return self._client.get_api_list(
            PATH, page=AsyncCursorPage[GraderAudit], model=GraderAudit, options=options
        )

    async def retrieve(self, audit_id: str) -> GraderAudit:
        return await self._client.get(route(PATH, audit_id), cast_to=GraderAudit)

    async def wait(
        self,
        audit_id: str,
        *,
        progress: Callable[[GraderAudit], None] = lambda audit: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> GraderAudit:
        """Return the audit once it has ended; `progress` gets it twice a second until then."""
        return await AsyncWaiting(POLL_SECONDS, sleep).until(
            lambda audit: audit.status != "in_progress", lambda: self.retrieve(audit_id), progress
        )

    async def cancel(self, audit_id: str) -> GraderAudit:
        return await self._client.post(route(PATH, audit_id, "cancel"), cast_to=GraderAudit)

    async def delete(self, audit_id: str) -> None:
        """Delete an audit. One in progress is canceled. Versions of stored graders keep its result."""
        await self._client.delete(route(PATH, audit_id), cast_to=object)


def audit_body(
    grader: Source,
    training_file: str,
    answer: str | None,
    rows: int | None,
    repeats: int | None,
    seed: int | None,
    max_tokens: int | None,
) -> dict[str, Any]:
    options = {"answer": answer, "rows": rows, "repeats": repeats, "seed": seed}
    budget = {} if max_tokens is None else {"budget": {"tokens": max_tokens}}
    given = {name: value for name, value in options.items() if value is not None}
    return {"grader": read_grader(grader), "training_file": training_file, **given, **budget}
