"""`Idempotency-Key`: whoever lost the answer to a POST asks again, and gets it instead of a second creation.

Do not use it where the answer shows a secret that is shown once (API keys, signing secrets): answers are stored as
they were sent.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.deps import CurrentProject, Uow
from core import idempotency
from core.db import Work
from core.idempotency import Answer, Keyed

Made = TypeVar("Made", bound=BaseModel)

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="The same key with the same request gets the first answer again, for 24 hours.",
        pattern=r"^[\x20-\x7e]{1,255}$",
    ),
]


@dataclass(frozen=True)
class OnceOnly:
    """Calls what creates, in one transaction; with a key, only the first time."""

    uow: Uow
    project_id: str
    key: str | None
    method: str
    path: str
    sent: Any = None

    def about(self, sent: Any) -> "OnceOnly":
        """The same for a request whose content had to be read first; `sent` is JSON that tells it from others."""
        return replace(self, sent=sent)

    def __call__(self, create: Callable[[Work], Made]) -> Made | JSONResponse:
        """What `create` returns, or the answer that was given earlier: a JSONResponse, and nothing was created.

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
                return JSONResponse(earlier.body, status_code=earlier.status_code, headers=headers)
            made = create(work)
            idempotency.keep(work.session, request, Answer(200, made.model_dump(mode="json")))
            return made


def _once_streamed(request: Request, project: CurrentProject, uow: Uow, key: Key = None) -> OnceOnly:
    return OnceOnly(uow, project.id, key, request.method, request.url.path)


# For an endpoint that reads its body itself: call `about` when the content is known.
OnceStreamed = Annotated[OnceOnly, Depends(_once_streamed, scope="function")]


async def _once(request: Request, once: OnceStreamed) -> OnceOnly:
    if once.key is None:
        return once
    content = await request.body()  # FastAPI has read it already, and keeps it
    try:
        return once.about(json.loads(content))
    except ValueError:  # no JSON, so the endpoint will not be called
        return once


# For an endpoint whose body is JSON.
Once = Annotated[OnceOnly, Depends(_once, scope="function")]
