"""Written by .ci/sync_client.py from regraft.resources.grader_audits; do not edit."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from openai.pagination import SyncCursorPage

from regraft.requests import Source
from regraft.resources.grader_audits import CREATE, PATH, POLL_SECONDS, audit_body
from regraft.resources.stored_graders import listed
from regraft.routes import route
from regraft.sync.waiting import Waiting
from regraft.types import GraderAudit

if TYPE_CHECKING:
    from regraft.sync.client import Regraft


class GraderAudits:
    def __init__(self, client: "Regraft") -> None:
        self._client = client

    def create(
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
        body = audit_body(grader, training_file, answer, rows, repeats, seed, max_tokens)
        return self._client.post(CREATE, body=body, cast_to=GraderAudit)

    def list(self, *, after: str | None = None, limit: int = 20) -> SyncCursorPage[GraderAudit]:
        """Newest first."""
        options = listed(after, limit)
        return self._client.get_api_list(
            PATH, page=SyncCursorPage[GraderAudit], model=GraderAudit, options=options
        )

    def retrieve(self, audit_id: str) -> GraderAudit:
        return self._client.get(route(PATH, audit_id), cast_to=GraderAudit)

    def wait(
        self,
        audit_id: str,
        *,
        progress: Callable[[GraderAudit], None] = lambda audit: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> GraderAudit:
        """Return the audit once it has ended; `progress` gets it twice a second until then."""
        return Waiting(POLL_SECONDS, sleep).until(
            lambda audit: audit.status != "in_progress", lambda: self.retrieve(audit_id), progress
        )

    def cancel(self, audit_id: str) -> GraderAudit:
        return self._client.post(route(PATH, audit_id, "cancel"), cast_to=GraderAudit)

    def delete(self, audit_id: str) -> None:
        """Delete an audit. One in progress is canceled. Versions of stored graders keep its result."""
        self._client.delete(route(PATH, audit_id), cast_to=object)
