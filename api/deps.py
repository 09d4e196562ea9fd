"""What an endpoint can ask for: the parts of the service, whose request it is, and ways to the database."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.orm import Session

from core import keys
from core.blobs import BlobStore
from core.db import Database, Send, Work, unit_of_work
from core.errors import InvalidApiKey
from core.models import Project
from core.registry import Registry
from core.settings import Settings
from graders.backends import Backends


@dataclass(frozen=True)
class Service:
    """The parts that `create_app` was given."""

    settings: Settings
    database: Database
    blobs: BlobStore
    registry: Registry
    backends: Backends
    send: Send
    # Uploads have threads of their own: slow clients must not take those that answer everybody else.
    upload_threads: CapacityLimiter


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Parts = Annotated[Service, Depends(_service)]


def _read_session(service: Parts) -> Iterator[Session]:
    with service.database.read() as session:
        yield session


def _unit_of_work(service: Parts) -> Callable[[], AbstractContextManager[Work]]:
    return partial(unit_of_work, service.database, service.send)


# scope="function" ends a dependency before the answer is sent. The default ends it afterwards, where a slow
# client keeps the connection busy, and where a commit that fails has already been answered with 200.
ReadSession = Annotated[Session, Depends(_read_session, scope="function")]
# For writing: `with uow() as work:` in the endpoint's body commits there.
Uow = Annotated[Callable[[], AbstractContextManager[Work]], Depends(_unit_of_work, scope="function")]

_bearer = HTTPBearer(auto_error=False, description="An API key of this service.")


def _current_project(
    request: Request,
    service: Parts,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    organization: Annotated[str | None, Header(alias="OpenAI-Organization", include_in_schema=False)] = None,
    project: Annotated[str | None, Header(alias="OpenAI-Project", include_in_schema=False)] = None,
) -> Project:
    if credentials is None:
        raise InvalidApiKey(
            "You didn't provide an API key. You need to provide your API key in an Authorization header "
            "using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
        )
    # A session of its own: an upload holds its request open for minutes, and must not hold a connection.
    with service.database.read() as session:
        found = keys.find_project(session, credentials.credentials)
    if found is None:
        hint = "You can get one from whoever runs this service."
        raise InvalidApiKey(f"Incorrect API key provided: {_masked(credentials.credentials)}. {hint}")
    if organization and organization != found.organization_id:
        message = "OpenAI-Organization header should match organization for API key."
        raise InvalidApiKey(message, code="mismatched_organization")
    if project and project != found.id:
        raise InvalidApiKey(
            "OpenAI-Project header should match project for API key.", code="mismatched_project"
        )
    request.state.organization_id = found.organization_id  # for the openai-organization header
    return found


CurrentProject = Annotated[Project, Depends(_current_project)]


def _masked(key: str) -> str:
    """Enough to recognise one's own key, nothing to use: what is wrong here may be right elsewhere."""
    if len(key) < 16:
        return "*" * len(key)
    return f"{key[:3]}{'*' * 8}{key[-4:]}"
