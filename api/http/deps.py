"""Dependencies of the endpoints: the components of the service, the caller, and database access."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import BackgroundTasks, Depends, Header, Request
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.http import sign_on
from api.http.admission import Admission
from api.http.grader_loop import GraderLoop
from api.http.rate_limits import Rates
from api.http.shutdown import Shutdown
from core.database.audit import Actor
from core.database.engine import Database, Send, Work, unit_of_work
from core.database.ids import is_tenant_id
from core.database.tables import ApiKey, Job, Project
from core.errors import InvalidApiKey, ProjectNotFound, RateLimited
from core.jobs import episode_servers
from core.jobs.episode_servers import EpisodeRun
from core.registry import Registry
from core.reloaded import Reloaded, current
from core.settings import Settings
from core.storage.self_test import RepeatedSelfTest
from core.storage.store import BlobStore
from core.tenancy import keys, sessions, tenants
from core.tenancy.keys import Scope
from graders.backends import Backends

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """The components that were passed to `create_app`."""

    settings: Settings
    database: Database
    blobs: BlobStore
    registries: Registry | Reloaded[Registry]
    all_backends: Backends | Reloaded[Backends]
    send: Send
    rates: Rates
    admission: Admission
    # Separate thread pools: writing uploads, following jobs (each stream queries the database once a second), and
    # reading whole files must not block ordinary endpoints.
    upload_threads: CapacityLimiter
    stream_readers: CapacityLimiter
    file_readers: CapacityLimiter
    graders: GraderLoop
    shutdown: Shutdown
    preview_seconds: float = 540.0
    # How long a preview waits for an inference server that starts or loads the model.
    preview_load_seconds: float = 180.0
    check_seconds: float = 540.0  # of a stored grader on all of its golden cases
    tool_servers_seconds: float = 60.0  # in which the functions of all MCP servers of a job are read
    store_test: RepeatedSelfTest = field(default_factory=RepeatedSelfTest)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # that outlive their requests

    @property
    def registry(self) -> Registry:
        return current(self.registries)

    @property
    def backends(self) -> Backends:
        return current(self.all_backends)


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


def _read_session(service: ServiceDep) -> Iterator[Session]:
    with service.database.read() as session:
        yield session


# scope="function" ends a dependency before the response is sent. The default ends it afterwards, so a slow client
# would hold the connection, and a failed commit would already have been answered with 200.
ReadSession = Annotated[Session, Depends(_read_session, scope="function")]

SESSION_COOKIES = ("__Host-regraft_session", "regraft_session")  # on https, on http
CONSOLE_HEADER = "x-regraft-console"
# All routes for which the key of an episode is good.
_OF_EPISODE = re.compile(r"/v1/regraft/episodes/([^/]+)/.*")
_HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(:(?P<port>\d{1,5}))?")

_bearer = HTTPBearer(auto_error=False, description="An API key of this service.")
_azures_header = APIKeyHeader(
    name="api-key", auto_error=False, description="The same key in the header of Azure's clients."
)


@dataclass(frozen=True)
class Caller:
    """The key and the project of a request."""

    key: ApiKey
    project: Project


def _caller(
    request: Request,
    service: ServiceDep,
    background: BackgroundTasks,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    azures_key: Annotated[str | None, Depends(_azures_header)],
    organization: Annotated[str | None, Header(alias="OpenAI-Organization", include_in_schema=False)] = None,
    project: Annotated[str | None, Header(alias="OpenAI-Project", include_in_schema=False)] = None,
) -> Caller:
    key, project_row = _authenticated(
        request, _credential(request, credentials, azures_key), organization, project
    )
    request.state.organization_id = project_row.organization_id  # for the openai-organization header
    limit_rate(request, service, project_row)
    if keys.use_is_news(key):
        background.add_task(_note_use, service.database, key.id)  # runs after the response
    return Caller(key, project_row)


@dataclass(frozen=True)
class Credential:
    token: str
    is_session: bool = False


async def key_owner(request: Request) -> str:
    """Authenticate a request before its body is read, and return the id of the key's project.

    Checks only the key, and counts no request against the rate limit.

    Raises:
        InvalidApiKey: as raised by every endpoint that requires a key.
    """
    credential = _credential(request, await _bearer(request), await _azures_header(request))
    if found := _OF_EPISODE.fullmatch(request.url.path):
        service: Service = request.app.state.service
        return (await run_in_threadpool(_of_episode, service, found[1], credential))[0].project_id
    organization, project = (request.headers.get(f"openai-{name}") for name in ("organization", "project"))
    _, owner = await run_in_threadpool(_authenticated, request, credential, organization, project)
    return owner.id


@dataclass(frozen=True)
class EpisodeAccess:
    """The episode of a request, with its job and the run of the job when the request came."""

    id: str
    job: Job
    run: EpisodeRun


def _of_episode(service: Service, episode_id: str, credential: Credential) -> tuple[Job, EpisodeRun]:
    """The job of an episode and its run. Raises InvalidApiKey: the key is not that of the episode."""
    with service.database.read() as session:
        found = episode_servers.of_episode(session, episode_id, credential.token)
    if found is None:
        raise InvalidApiKey(
            "This is not the key of this episode. Each episode that is leased has its own key."
        )
    return found


def _episode_access(
    request: Request,
    episode_id: str,
    service: ServiceDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    azures_key: Annotated[str | None, Depends(_azures_header)],
) -> EpisodeAccess:
    job, run = _of_episode(service, episode_id, _credential(request, credentials, azures_key))
    return EpisodeAccess(episode_id, job, run)


# The episode that the path names, for a request with the key of this episode.
CurrentEpisode = Annotated[EpisodeAccess, Depends(_episode_access)]


def session_token(request: Request) -> str:
    """The session of the console in the request's cookie, if the browser sends it for a page of this service.

    Browsers add a cookie to the requests of any page, so one with a cookie must show that no other site made it: by
    `Sec-Fetch-Site`, which pages cannot set, and by a header of ours where the method changes something.

    Raises:
        InvalidApiKey: there is a cookie, and another site may have made the request.
    """
    token = next((request.cookies[name] for name in SESSION_COOKIES if request.cookies.get(name)), "")
    if token:
        refuse_foreign(request)
    return token


def refuse_foreign(request: Request) -> None:
    """Raise InvalidApiKey if a page of another site may have made the request, or the host is not this service."""
    headers = request.headers
    host = host_of(headers.get("host", ""))
    if host is None:
        raise InvalidApiKey("The Host header of the request is not a host name or an address with a port.")
    if not is_own_host(host, request.app.state.service.settings.console_hosts):
        raise InvalidApiKey(
            f"The console is not served under the name {host!r}: add it to REGRAFT_CONSOLE_HOSTS."
        )
    site, has_header = headers.get("sec-fetch-site"), CONSOLE_HEADER in headers
    is_safe = request.method in ("GET", "HEAD")
    # On plain http browsers send Sec-Fetch-Site to localhost only. Another site's page cannot add the header without
    # asking first, which nothing here answers.
    if not (site == "same-origin" and (is_safe or has_header)) and not (site is None and has_header):
        raise InvalidApiKey("A session is for the pages of this service only. Use an API key.")


def host_of(header: str) -> str | None:
    """The name or the address in a Host header, in lower case; None: the header is not valid.

    Starlette falls back to the address of the socket for such a header, which is always this service's own.
    """
    match = _HOST.fullmatch(header)
    if match is None or int(match["port"] or 0) > 65535:
        return None
    return (match["address"] or match["name"]).lower()


def is_own_host(host: str, named: tuple[str, ...]) -> bool:
    """Whether the host is an address, localhost, or named by the operator: another name may have been rebound."""
    if host == "localhost" or host in named:
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _credential(
    request: Request, credentials: HTTPAuthorizationCredentials | None, azures_key: str | None
) -> Credential:
    token = credentials.credentials if credentials else azures_key
    if token:
        return Credential(token)
    token = session_token(request)
    if not token:
        raise InvalidApiKey(
            "You didn't provide an API key. You need to provide your API key in an Authorization header "
            "using Bearer auth (i.e. Authorization: Bearer YOUR_KEY), or in an api-key header."
        )
    return Credential(token, is_session=True)


def _authenticated(
    request: Request, credential: Credential, organization: str | None, project: str | None
) -> tuple[ApiKey, Project]:
    service: Service = request.app.state.service
    # A separate session: an upload keeps its request open for minutes and must not hold a connection.
    with service.database.read() as session:
        authenticate = sessions.authenticate if credential.is_session else keys.authenticate
        key, found = authenticate(session, credential.token)
        _refuse_mismatched(found, organization, project)
    sign_on.require_same_user(request, service.settings, key)
    return key, found


def _refuse_mismatched(found: Project, organization: str | None, project: str | None) -> None:
    """Raise InvalidApiKey for a header with an id of this service's form that is not the id of the key's own.

    OpenAI's client sends OPENAI_ORG_ID and OPENAI_PROJECT_ID of the environment. Ids of another form, such as those of
    an account at OpenAI, are ignored. Whether an organization or a project has the id is not looked up, so the answer
    does not show it.
    """
    if _names_another(organization, found.organization_id):
        raise InvalidApiKey(
            "OpenAI-Organization header should match organization for API key. Remove the header, or send "
            f"{found.organization_id}.",
            code="mismatched_organization",
        )
    if _names_another(project, found.id):
        raise InvalidApiKey(
            f"OpenAI-Project header should match project for API key. Remove the header, or send {found.id}.",
            code="mismatched_project",
        )


def _names_another(sent: str | None, own: str) -> bool:
    return sent is not None and sent != own and is_tenant_id(sent)


def limit_rate(request: Request, service: Service, project: Project) -> None:
    """Count the request against the rate limit of the project, and set the headers of its answer.

    Raises:
        RateLimited: the project has no request left.
    """
    per_minute = tenants.limits(project, service.settings.default_limits).requests_per_minute
    if per_minute is None:
        return
    taken = service.rates.take(project.id, per_minute)
    request.state.answer_headers = taken.headers()
    if not taken.allowed:
        raise RateLimited(per_minute=per_minute, retry_after=taken.retry_after)


def _note_use(database: Database, key_id: str) -> None:
    try:
        with database.write() as session:
            keys.note_use(session, key_id)
    except Exception as cause:  # the response was sent; a failure here must not fail the request
        log.warning("could not note the use of %s: %r", key_id, cause)


CurrentCaller = Annotated[Caller, Depends(_caller)]


def _needs(scope: Scope) -> Callable[[Caller], Project]:
    def checked(caller: CurrentCaller) -> Project:
        keys.require(caller.key, scope)
        return caller.project

    return checked


def _current_project(request: Request, caller: CurrentCaller) -> Project:
    keys.require(caller.key, "read" if request.method in ("GET", "HEAD") else "write")
    return caller.project


# The project of the request's key, which must have the scope that the HTTP method requires.
CurrentProject = Annotated[Project, Depends(_current_project)]
# For a POST that changes data at no cost.
ReadProject = Annotated[Project, Depends(_needs("read"))]
# For endpoints that require the admin scope.
AdminProject = Annotated[Project, Depends(_needs("admin"))]
# For endpoints about the service as a whole.
OperatorProject = Annotated[Project, Depends(_needs("operator"))]


def _own_project(project_id: str, project: AdminProject) -> Project:
    if project_id != project.id:
        raise ProjectNotFound(project_id)
    return project


# The project that the path names as `project_id`, if the key administers it.
OwnProject = Annotated[Project, Depends(_own_project)]


def _actor(request: Request, caller: CurrentCaller) -> Actor:
    project = caller.project
    return Actor(caller.key.id, project.organization_id, project.id, request.state.request_id)


CurrentActor = Annotated[Actor, Depends(_actor)]


def _unit_of_work(service: ServiceDep, actor: CurrentActor) -> Callable[[], AbstractContextManager[Work]]:
    return partial(unit_of_work, service.database, service.send, actor)


# For writing on behalf of the key: `with uow() as work:` in the endpoint's body commits there.
UnitOfWork = Annotated[Callable[[], AbstractContextManager[Work]], Depends(_unit_of_work, scope="function")]
