"""client.regrades: the stored answers of a job scored by another grader."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from openai.pagination import AsyncCursorPage

from regraft._rules.states import EVAL_RUN
from regraft.literals import Change, Split
from regraft.requests import Source, read_grader
from regraft.resources.waiting import AsyncWaiting
from regraft.routes import route
from regraft.types import Regrade, RegradedAnswer

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai._base_client import AsyncPaginator

POLL_SECONDS = 2.0


class AsyncRegrades:
    def __init__(self, client: "AsyncOpenAI") -> None:
        self._client = client

    async def create(
        self,
        job_id: str,
        grader: Source,
        *,
        split: Split | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
        name: str | None = None,
        max_tokens: int | None = None,
    ) -> Regrade:
        """Score the stored answers of a job with another grader, in the background. The job does not change.

        Args:
            grader: a specification, or a file as `graders.test` reads it.
            max_tokens: of judges; the regrade fails before it uses more.

        Raises:
            openai.BadRequestError: no answers are stored of these steps, or they lack what the grader reads.
        """
        spec = await asyncio.to_thread(read_grader, grader)
        body = _body(spec, split, step_from, step_to, name, max_tokens)
        return await self._client.post(route("/regraft/jobs", job_id, "regrade"), body=body, cast_to=Regrade)

    def list(
        self, job_id: str, *, after: str | None = None, limit: int = 20
    ) -> "AsyncPaginator[Regrade, AsyncCursorPage[Regrade]]":
        """Newest first."""
        return self._client.get_api_list(
            _path(job_id), page=AsyncCursorPage[Regrade], model=Regrade, options=_listed(after, limit)
        )

    async def retrieve(self, job_id: str, regrade_id: str) -> Regrade:
        return await self._client.get(route(_path(job_id), regrade_id), cast_to=Regrade)

    async def wait(
        self,
        job_id: str,
        regrade_id: str,
        *,
        progress: Callable[[Regrade], None] = lambda regrade: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> Regrade:
        """Return the regrade once it has ended; `progress` gets it every few seconds until then."""
        return await AsyncWaiting(POLL_SECONDS, sleep).until(
            lambda regrade: regrade.status in EVAL_RUN.final,
            lambda: self.retrieve(job_id, regrade_id),
            progress,
        )

    def answers(
        self,
        job_id: str,
        regrade_id: str,
        *,
        change: Change | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> "AsyncPaginator[RegradedAnswer, AsyncCursorPage[RegradedAnswer]]":
        """The answers with both scores, by step; those that a running regrade has graded so far."""
        return self._client.get_api_list(
            route(_path(job_id), regrade_id, "answers"),
            page=AsyncCursorPage[RegradedAnswer],
            model=RegradedAnswer,
            options=_listed(after, limit, change),
        )

    async def cancel(self, job_id: str, regrade_id: str) -> Regrade:
        """Cancel immediately. The answers so far are kept."""
        return await self._client.post(route(_path(job_id), regrade_id, "cancel"), cast_to=Regrade)

    async def delete(self, job_id: str, regrade_id: str) -> None:
        await self._client.delete(route(_path(job_id), regrade_id), cast_to=object)


def _path(job_id: str) -> str:
    return route("/regraft/jobs", job_id, "regrades")


def _body(
    grader: dict[str, Any],
    split: Split | None,
    step_from: int | None,
    step_to: int | None,
    name: str | None,
    max_tokens: int | None,
) -> dict[str, Any]:
    asked = {
        "grader": grader,
        "split": split,
        "step_from": step_from,
        "step_to": step_to,
        "name": name,
        "budget": None if max_tokens is None else {"tokens": max_tokens},
    }
    return {key: value for key, value in asked.items() if value is not None}


def _listed(after: str | None, limit: int, change: Change | None = None) -> Any:
    options = {"after": after, "limit": limit, "change": change}
    return {"params": {name: value for name, value in options.items() if value is not None}}
