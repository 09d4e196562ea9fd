"""Written by .ci/sync_client.py from regraft.resources.previews; do not edit."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from openai.pagination import SyncCursorPage

from regraft.requests import Source
from regraft.resources.previews import PATH, POLL_SECONDS, _listed, with_sizes
from regraft.routes import route
from regraft.sync.waiting import Waiting
from regraft.types import Preview, PreviewAnswer

if TYPE_CHECKING:
    from regraft.sync.client import Regraft


class Previews:
    def __init__(self, client: "Regraft") -> None:
        self._client = client

    def create(self, request: Source, *, rows: int | None = None, samples: int | None = None) -> Preview:
        """Begin a preview of a job, with `samples` answers to each of `rows`, by default 8 and 8.

        Uploads local files; creates no job.
        """
        body = with_sizes(self._client.jobs.prepare(request), rows, samples)
        return self._client.post(PATH, body=body, cast_to=Preview)

    def list(self, *, after: str | None = None, limit: int = 20) -> SyncCursorPage[Preview]:
        """Newest first."""
        options = _listed(after, limit)
        return self._client.get_api_list(PATH, page=SyncCursorPage[Preview], model=Preview, options=options)

    def retrieve(self, preview_id: str) -> Preview:
        return self._client.get(route(PATH, preview_id), cast_to=Preview)

    def wait(
        self,
        preview_id: str,
        *,
        progress: Callable[[Preview], None] = lambda preview: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Preview:
        """Return the preview once it has ended; `progress` gets it twice a second until then."""
        return Waiting(POLL_SECONDS, sleep).until(
            lambda preview: preview.status != "in_progress", lambda: self.retrieve(preview_id), progress
        )

    def answers(
        self, preview_id: str, *, after: str | None = None, limit: int = 100
    ) -> SyncCursorPage[PreviewAnswer]:
        """The answers and grades of a completed preview, by line."""
        return self._client.get_api_list(
            route(PATH, preview_id, "answers"),
            page=SyncCursorPage[PreviewAnswer],
            model=PreviewAnswer,
            options=_listed(after, limit),
        )

    def cancel(self, preview_id: str) -> Preview:
        return self._client.post(route(PATH, preview_id, "cancel"), cast_to=Preview)

    def delete(self, preview_id: str) -> None:
        """Delete a preview and its answers. One in progress is canceled."""
        self._client.delete(route(PATH, preview_id), cast_to=object)
