"""/v1/organization: what the administrator of a project needs of its keys, limits, usage and log."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.deps import AdminProject, OwnProject, Parts, ReadSession, Uow
from api.document import refusals
from api.wire import After, Body, Deleted, EndedListing, Limit, Listing, clamped, ends
from core import audit, keys, tenants
from core.audit import OPERATOR
from core.keys import NewKey, Scope
from core.limits import Limits
from core.models import ApiKey, AuditEntry, now

# 403 also for reading: all of it is for administrators.
router = APIRouter(prefix="/organization", tags=["Organization"], responses=refusals(403))
KEYS = "/projects/{project_id}/api_keys"

Text = Annotated[str, Field(max_length=128, pattern=r"^[^\x00]*$")]
A_YEAR = 365 * 24


class KeyCreate(Body):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00]*$")]
    scope: Scope = "write"
    owner: Text = ""  # the person it is made for
    expires_in_days: Annotated[int, Field(ge=1, le=3650)] | None = None


class KeyRotate(Body):
    grace_hours: Annotated[float, Field(ge=0, le=A_YEAR, strict=False)] = 0


class KeyOut(BaseModel):
    id: str
    object: Literal["organization.project.api_key"] = "organization.project.api_key"
    name: str
    redacted_value: str
    scope: str
    owner: str
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None  # to the minute

    @classmethod
    def of(cls, key: ApiKey) -> "KeyOut":
        return cls(**_fields(key))


class NewKeyOut(KeyOut):
    value: str  # the key itself, this once

    @classmethod
    def made(cls, made: NewKey) -> "NewKeyOut":
        return cls(**_fields(made.key), value=made.token)


class AuditOut(BaseModel):
    """One change, in the shape of OpenAI's audit log."""

    id: str
    object: Literal["organization.audit_log"] = "organization.audit_log"
    type: str
    effective_at: int
    actor: dict[str, Any]
    project: dict[str, str | None]
    target: str
    request_id: str | None
    data: dict[str, Any]

    @classmethod
    def of(cls, entry: AuditEntry) -> "AuditOut":
        by_key = {"type": "api_key", "api_key": {"id": entry.actor}}
        return cls(
            id=entry.id,
            type=entry.action,
            effective_at=entry.created_at,
            actor={"type": "operator"} if entry.actor == OPERATOR.id else by_key,
            project={"id": entry.project_id},
            target=entry.target,
            request_id=entry.request_id,
            data=entry.data,
        )


class LimitsOut(Limits):
    """Those that hold, the operator's defaults among them; null: no such limit."""

    object: Literal["organization.project.limits"] = "organization.project.limits"


class UsageOut(BaseModel):
    """What is used of each limit, by the limit's name."""

    object: Literal["organization.project.usage"] = "organization.project.usage"
    running_jobs: int
    queued_jobs: int
    storage_bytes: int
    gpu_seconds_per_30_days: float
    grader_tokens_per_30_days: int


@router.get("/audit_logs")
def list_audit_logs(
    project: AdminProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> EndedListing[AuditOut]:
    """Every change in the project of the key, newest first."""
    page = audit.page(session, project.id, after=after, limit=clamped(limit))
    data = [AuditOut.of(entry) for entry in page.items]
    return EndedListing(data=data, has_more=page.has_more, **ends(page))


@router.get("/projects/{project_id}/limits")
def retrieve_limits(project: OwnProject, service: Parts) -> LimitsOut:
    """What the project may use at most."""
    return LimitsOut(**tenants.limits(project, service.settings.default_limits).given())


@router.get("/projects/{project_id}/usage")
def retrieve_usage(project: OwnProject, session: ReadSession) -> UsageOut:
    """What the project uses now, and used in the last 30 days."""
    return UsageOut(**tenants.in_use(session, project.id))


@router.get(KEYS)
def list_keys(project: OwnProject, session: ReadSession) -> Listing[KeyOut]:
    """The project's API keys, newest first, those that expired or were revoked too."""
    return Listing(data=[KeyOut.of(key) for key in keys.of_project(session, project.id)])


@router.post(KEYS)
def create_key(body: KeyCreate, project: OwnProject, uow: Uow) -> NewKeyOut:
    """Make an API key. Its value is in this answer and nowhere else."""
    expires_at = None if body.expires_in_days is None else now() + body.expires_in_days * tenants.DAY
    with uow() as work:
        made = keys.create_key(
            work, project, body.name, scope=body.scope, owner=body.owner, expires_at=expires_at
        )
    return NewKeyOut.made(made)


@router.get(KEYS + "/{key_id}")
def retrieve_key(key_id: str, project: OwnProject, session: ReadSession) -> KeyOut:
    """Describe an API key."""
    return KeyOut.of(keys.get(session, key_id, project.id))


@router.post(KEYS + "/{key_id}/rotate")
def rotate_key(key_id: str, project: OwnProject, uow: Uow, body: KeyRotate = KeyRotate()) -> NewKeyOut:
    """Make a new API key in the place of this one, which dies at once or after `grace_hours`."""
    with uow() as work:
        made = keys.rotate(work, keys.get(work.session, key_id, project.id), grace_hours=body.grace_hours)
    return NewKeyOut.made(made)


@router.delete(KEYS + "/{key_id}")
def revoke_key(key_id: str, project: OwnProject, uow: Uow) -> Deleted:
    """Refuse an API key from now on."""
    with uow() as work:
        keys.revoke(work, keys.get(work.session, key_id, project.id))
    return Deleted(id=key_id, object="organization.project.api_key.deleted")


def _fields(key: ApiKey) -> dict[str, Any]:
    names = ("id", "name", "scope", "owner", "created_at", "expires_at", "revoked_at", "last_used_at")
    return {name: getattr(key, name) for name in names} | {"redacted_value": f"rg-...{key.last4}"}
