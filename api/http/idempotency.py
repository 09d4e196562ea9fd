"""`Idempotency-Key`: a repeated POST returns the first response instead of creating a second resource.

Do not use it where the response shows a secret once (API keys, signing secrets): responses are stored unchanged.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from anyio import to_thread
from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.http.deps import CurrentProject, ServiceDep, UnitOfWork
from api.http.json_responses import JSON
from core.database.engine import Database, Work
from core.tenancy import idempotency
from core.tenancy.idempotency import Keyed, StoredResponse

Made = TypeVar("Made", bound=BaseModel)

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="A repeated request with the same key returns the first response, for 24 hours.",
        pattern=r"^[\x20-\x7e]{1,255}$",
    ),
]


@dataclass(frozen=True)
class OnceOnly:
    """Runs the creation in one transaction; with a key, only the first time."""

    uow: UnitOfWork
    database: Database
    project_id: str
    key: str | None
    method: str
    path: str
    status: int  # of the first response
    sent: Any = None

    def about(self, sent: Any) -> "OnceOnly":
        """The same for a request whose body had to be read first; `sent` is JSON that identifies the content."""
        return replace(self, sent=sent)

    def __call__(self, create: Callable[[Work], Made]) -> Made | JSONResponse:
        """Return the result of `create`, or the stored first response as a JSONResponse.

        Raises:
            InvalidRequest: the key was used for another request.
        """
        with self.uow() as work:
            if (request := self._keyed()) is None:
                return create(work)
            earlier = idempotency.take(work.session, request)
            if earlier is not None:
                return _replayed(earlier)
            made = create(work)
            idempotency.keep(work.session, request, StoredResponse(self.status, made.model_dump(mode="json")))
            return made

    def first_answer(self) -> dict[str, Any] | None:
        """The answer to an earlier request with the key, which may be another request, even of another endpoint."""
        if self.key is None:
            return None
        with self.database.read() as session:
            return idempotency.answer_of(session, self.project_id, self.key)

    def replay(self) -> None:
        """Look the key up before the request is checked: its first response holds even if its inputs are gone since.

        Raises:
            Replayed: with the first response.
            InvalidRequest: the key was used for another request.
        """
        if (request := self._keyed()) is None:
            return
        with self.database.read() as session:
            earlier = idempotency.find(session, request)
        if earlier is not None:
            raise Replayed(_replayed(earlier))

    def _keyed(self) -> Keyed | None:
        if self.key is None:
            return None
        fingerprint = idempotency.fingerprint(self.method, self.path, self.sent)
        return Keyed(self.project_id, self.key, fingerprint)


class Replayed(Exception):
    """Ends a request with the response of an earlier one. api/http/errors.py sends it."""

    def __init__(self, response: JSONResponse) -> None:
        super().__init__()
        self.response = response


def _replayed(earlier: StoredResponse) -> JSONResponse:
    return JSON(earlier.body, status_code=earlier.status_code, headers={"idempotent-replayed": "true"})


def _once_streamed(
    request: Request, project: CurrentProject, service: ServiceDep, uow: UnitOfWork, key: Key = None
) -> OnceOnly:
    status = request.scope["route"].status_code or 200
    return OnceOnly(uow, service.database, project.id, key, request.method, request.url.path, status)


# For an endpoint that reads its own body: call `about` when the content is known.
OnceStreamed = Annotated[OnceOnly, Depends(_once_streamed, scope="function")]


async def _once(request: Request, once: OnceStreamed) -> OnceOnly:
    if once.key is None:
        return once
    # The bytes, not `request.json()`: a dependency may have put the current version of a stored grader there.
    content = await request.body()
    try:
        once = once.about(json.loads(content) if content else None)
    except ValueError:  # invalid JSON, so the endpoint is not called
        return once
    await to_thread.run_sync(once.replay)
    return once


# For an endpoint with a JSON body.
Once = Annotated[OnceOnly, Depends(_once, scope="function")]
# The first of an endpoint's `dependencies`, if others check its body.
REPLAYS_FIRST = Depends(_once, scope="function")
