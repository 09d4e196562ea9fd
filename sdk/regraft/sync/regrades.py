"""Written by .ci/sync_client.py from regraft.resources.regrades; do not edit."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from openai.pagination import SyncCursorPage

from regraft._rules.states import EVAL_RUN
from regraft.literals import Change, Split
from regraft.requests import Source, read_grader
from regraft.resources.regrades import POLL_SECONDS, _body, _listed, _path
from regraft.routes import route
from regraft.sync.waiting import Waiting
from regraft.types import Regrade, RegradedAnswer

if TYPE_CHECKING:
    from openai import OpenAI


class Regrades:
    def __init__(self, client: "OpenAI") -> None:
        self._client = client

    def create(
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
        spec = read_grader(grader)
        body = _body(spec, split, step_from, step_to, name, max_tokens)
        return self._client.post(route("/regraft/jobs", job_id, "regrade"), body=body, cast_to=Regrade)

    def list(self, job_id: str, *, after: str | None = None, limit: int = 20) -> SyncCursorPage[Regrade]:
        """Newest first."""
        return self._client.get_api_list(
            _path(job_id), page=SyncCursorPage[Regrade], model=Regrade, options=_listed(after, limit)
        )

    def retrieve(self, job_id: str, regrade_id: str) -> Regrade:
        return self._client.get(route(_path(job_id), regrade_id), cast_to=Regrade)

    def wait(
        self,
        job_id: str,
        regrade_id: str,
        *,
        progress: Callable[[Regrade], None] = lambda regrade: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Regrade:
        """Return the regrade once it has ended; `progress` gets it every few seconds until then."""
        return Waiting(POLL_SECONDS, sleep).until(
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
    ) -> SyncCursorPage[RegradedAnswer]:
        """The answers with both scores, by step; those that a running regrade has graded so far."""
        return self._client.get_api_list(
            route(_path(job_id), regrade_id, "answers"),
            page=SyncCursorPage[RegradedAnswer],
            model=RegradedAnswer,
            options=_listed(after, limit, change),
        )

    def cancel(self, job_id: str, regrade_id: str) -> Regrade:
        """Cancel immediately. The answers so far are kept."""
        return self._client.post(route(_path(job_id), regrade_id, "cancel"), cast_to=Regrade)

    def delete(self, job_id: str, regrade_id: str) -> None:
        self._client.delete(route(_path(job_id), regrade_id), cast_to=object)
