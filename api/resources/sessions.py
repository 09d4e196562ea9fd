"""/v1/regraft/session: log in to the console with an API key or a login address, and out again."""

from dataclasses import replace
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, model_validator
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.http import sign_on
from api.http.deps import (
    SESSION_COOKIES,
    CurrentCaller,
    Service,
    ServiceDep,
    UnitOfWork,
    limit_rate,
    refuse_foreign,
    session_token,
)
from api.http.openapi import FOR_ANY_KEY, refusals
from api.http.shapes import Body
from core.database.audit import Actor
from core.database.engine import unit_of_work
from core.database.tables import ApiKey, Project
from core.tenancy import keys, sessions, single_sign_on

router = APIRouter(prefix="/regraft/session", tags=["Console"])


class SessionCreate(Body):
    api_key: str | None = Field(default=None, max_length=512)
    login_token: str | None = Field(
        default=None, max_length=512
    )  # of the address that `regraft-server up` prints
    single_sign_on: Literal[True] | None = None  # the user that the proxy names

    @model_validator(mode="after")
    def _exactly_one_credential(self) -> "SessionCreate":
        if [self.api_key, self.login_token, self.single_sign_on].count(None) != 2:
            raise ValueError("give one of api_key, login_token and single_sign_on")
        return self


class SessionOut(BaseModel):
    object: Literal["regraft.session"] = "regraft.session"
    key_id: str
    key_name: str
    user: str | None  # of single sign-on; null: the session or the request has a key
    scope: str
    project_id: str
    project_name: str
    expires_at: int | None  # of the key


@router.post("", responses=refusals(401, 429))
async def create_session(
    body: SessionCreate, request: Request, response: Response, service: ServiceDep
) -> SessionOut:
    """Exchange an API key, a login address or the user of single sign-on for a cookie. Only the console calls it."""
    refuse_foreign(request)
    identity = sign_on.identify(request, service.settings) if body.single_sign_on else None
    token, shown = await run_in_threadpool(_begun, body, identity, request, service)
    is_https = request.url.scheme == "https"
    response.set_cookie(
        SESSION_COOKIES[0] if is_https else SESSION_COOKIES[1],
        token,
        max_age=sessions.SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=is_https,
    )
    return shown


def _begun(
    body: SessionCreate, identity: sign_on.Identity | None, request: Request, service: Service
) -> tuple[str, SessionOut]:
    # Checked in a read session first: a request without a valid credential opens no write transaction.
    with service.database.read() as session:
        if identity is not None:
            project = single_sign_on.project_of(session, identity.rule)
        else:
            project = _presented(session, body, use_up=False)[1]
    limit_rate(request, service, project)
    with unit_of_work(service.database, service.send) as work:
        if identity is not None:
            key = single_sign_on.key_of(work, identity.user, identity.rule)
        else:
            key, project = _presented(work.session, body, use_up=True)
        actor = Actor(key.id, project.organization_id, project.id, request.state.request_id)
        _, token = sessions.begin(replace(work, actor=actor), key)
        return token, _session_of_key(key, project)


def _presented(session: Session, body: SessionCreate, *, use_up: bool) -> tuple[ApiKey, Project]:
    """The key of the body's credential and its project. With `use_up`, a login token works only this once."""
    if body.login_token is not None:
        return sessions.key_of_login(session, body.login_token, use_up=use_up)
    return keys.authenticate(session, body.api_key or "")


@router.get("")
def retrieve_session(caller: CurrentCaller) -> SessionOut:
    """Retrieve the key and the project of the request, whether it has a session or a key."""
    return _session_of_key(caller.key, caller.project)


@router.delete("", status_code=204, openapi_extra=FOR_ANY_KEY)
def delete_session(request: Request, uow: UnitOfWork) -> Response:
    """End the session of the request's cookie."""
    with uow() as work:
        sessions.end(work, session_token(request))
    response = Response(status_code=204)
    for name in SESSION_COOKIES:
        if name in request.cookies:
            response.delete_cookie(name, httponly=True, samesite="strict", secure=name.startswith("__Host-"))
    return response


def _session_of_key(key: ApiKey, project: Project) -> SessionOut:
    return SessionOut(
        key_id=key.id,
        key_name=key.name,
        user=key.sso_user,
        scope=key.scope,
        project_id=project.id,
        project_name=project.name,
        expires_at=key.expires_at,
    )
