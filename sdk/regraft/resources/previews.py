"""client.previews: answers of a base model to a few rows of a job, graded as in the job."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from openai.pagination import AsyncCursorPage

from regraft.requests import Source
from regraft.resources.waiting import AsyncWaiting
from regraft.routes import route
from regraft.types import Preview, PreviewAnswer

if TYPE_CHECKING:
    from openai._base_client import AsyncPaginator

    from regraft.client import AsyncRegraft

PATH = "/regraft/previews"
POLL_SECONDS = 0.5


class AsyncPreviews:
    def __init__(self, client: "AsyncRegraft") -> None:
        self._client = client

    async def create(
        self, request: Source, *, rows: int | None = None, samples: int | None = None
    ) -> Preview:
        """Begin a preview of a job, with `samples` answers to each of `rows`, by default 8 and 8.

        Uploads local files; creates no job.
        """
        body = with_sizes(await self._client.jobs.prepare(request), rows, samples)
        return await self._client.post(PATH, body=body, cast_to=Preview)

    def list(
        self, *, after: str | None = None, limit: int = 20
    ) -> "AsyncPaginator[Preview, AsyncCursorPage[Preview]]":
        """Newest first."""
        options = _listed(after, limit)
        return self._client.get_api_list(PATH, page=AsyncCursorPage[Preview], model=Preview, options=options)

    async def retrieve(self, preview_id: str) -> Preview:
        return await self._client.get(route(PATH, preview_id), cast_to=Preview)

    async def wait(
        self,
        preview_id: str,
        *,
        progress: Callable[[Preview], None] = lambda preview: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> Preview:
        """Return the preview once it has ended; `progress` gets it twice a second until then."""
        return await AsyncWaiting(POLL_SECONDS, sleep).until(
            lambda preview: preview.status != "in_progress", lambda: self.retrieve(preview_id), progress
        )

    def answers(
        self, preview_id: str, *, after: str | None = None, limit: int = 100
    ) -> "AsyncPaginator[PreviewAnswer, AsyncCursorPage[PreviewAnswer]]":
        """The answers and grades of a completed preview, by line."""
        return self._client.get_api_list(
            route(PATH, preview_id, "answers"),
            page=AsyncCursorPage[PreviewAnswer],
            model=PreviewAnswer,
            options=_listed(after, limit),
        )

    async def cancel(self, preview_id: str) -> Preview:
        return await self._client.post(route(PATH, preview_id, "cancel"), cast_to=Preview)

    async def delete(self, preview_id: str) -> None:
        """Delete a preview and its answers. One in progress is canceled."""
        await self._client.delete(route(PATH, preview_id), cast_to=object)


def with_sizes(body: dict[str, Any], rows: int | None, samples: int | None) -> dict[str, Any]:
    sizes = {"rows": rows, "samples": samples}
    return body | {name: size for name, size in sizes.items() if size is not None}


def _listed(after: str | None, limit: int) -> Any:
    options = {"after": after, "limit": limit}
    return {"params": {name: value for name, value in options.items() if value is not None}}
