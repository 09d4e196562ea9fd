"""`Idempotency-Key`: a repeated POST returns the first response instead of creating a second resource.

Do not use it where the response shows a secret once (API keys, signing secrets): responses are stored unchanged.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.http.deps import CurrentProject, UnitOfWork
from api.http.json_responses import JSON
from core.database.engine import Work
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
            if self.key is None:
                return create(work)
            request = Keyed(
                self.project_id, self.key, idempotency.fingerprint(self.method, self.path, self.sent)
            )
            earlier = idempotency.take(work.session, request)
            if earlier is not None:
                headers = {"idempotent-replayed": "true"}
                return JSON(earlier.body, status_code=earlier.status_code, headers=headers)
            made = create(work)
            idempotency.keep(work.session, request, StoredResponse(self.status, made.model_dump(mode="json")))
            return made


def _once_streamed(request: Request, project: CurrentProject, uow: UnitOfWork, key: Key = None) -> OnceOnly:
    status = request.scope["route"].status_code or 200
    return OnceOnly(uow, project.id, key, request.method, request.url.path, status)


# For an endpoint that reads its own body: call `about` when the content is known.
OnceStreamed = Annotated[OnceOnly, Depends(_once_streamed, scope="function")]


async def _once(request: Request, once: OnceStreamed) -> OnceOnly:
    if once.key is None:
        return once
    # The bytes, not `request.json()`: a dependency may have put the current version of a stored grader there.
    content = await request.body()
    try:
        return once.about(json.loads(content))
    except ValueError:  # invalid JSON, so the endpoint is not called
        return once


# For an endpoint with a JSON body.
Once = Annotated[OnceOnly, Depends(_once, scope="function")]
