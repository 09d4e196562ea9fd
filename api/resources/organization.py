"""/v1/organization: keys, limits, usage and audit log of a project, for its administrators."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.http.deps import AdminProject, CurrentCaller, OwnProject, ReadSession, ServiceDep, UnitOfWork
from api.http.openapi import refusals
from api.http.shapes import After, Body, Deleted, EndedListing, Limit, Listing, clamped, ends
from core.database import audit
from core.database.audit import OPERATOR
from core.database.tables import ApiKey, AuditEntry, now
from core.tenancy import keys, tenants
from core.tenancy.keys import NewKey, ProjectScope
from core.tenancy.limits import Limits

# 403 also on reading: everything here requires the admin scope.
router = APIRouter(prefix="/organization", tags=["Organization"], responses=refusals(403))
KEYS = "/projects/{project_id}/api_keys"

Text = Annotated[str, Field(max_length=128, pattern=r"^[^\x00]*$")]
A_YEAR = 365 * 24


class KeyCreate(Body):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00]*$")]
    scope: ProjectScope = "write"
    owner: Text = ""  # the person who uses the key
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
    last_used_at: int | None  # with a resolution of one minute

    @classmethod
    def of(cls, key: ApiKey) -> "KeyOut":
        return cls(**_fields(key))


class NewKeyOut(KeyOut):
    value: str  # shown only in this response

    @classmethod
    def of_key(cls, created: NewKey) -> "NewKeyOut":
        return cls(**_fields(created.key), value=created.token)


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
    """The effective limits, including the operator's defaults; null: unlimited."""

    object: Literal["organization.project.limits"] = "organization.project.limits"


class UsageOut(BaseModel):
    """Current usage by the name of the limit."""

    object: Literal["organization.project.usage"] = "organization.project.usage"
    running_jobs: int
    queued_jobs: int
    running_eval_runs: int
    queued_eval_runs: int
    storage_bytes: int
    gpu_seconds_per_30_days: float
    grader_tokens_per_30_days: int


@router.get("/audit_logs")
def list_audit_logs(
    project: AdminProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> EndedListing[AuditOut]:
    """List the audit log of the key's project, newest first."""
    page = audit.page(session, project.id, after=after, limit=clamped(limit))
    data = [AuditOut.of(entry) for entry in page.items]
    return EndedListing(data=data, has_more=page.has_more, **ends(page))


@router.get("/projects/{project_id}/limits")
def retrieve_limits(project: OwnProject, service: ServiceDep) -> LimitsOut:
    """Retrieve the effective limits of the project."""
    return LimitsOut(**tenants.limits(project, service.settings.default_limits).set_limits())


@router.get("/projects/{project_id}/usage")
def retrieve_usage(project: OwnProject, session: ReadSession) -> UsageOut:
    """Retrieve current usage and that of the last 30 days."""
    return UsageOut(**tenants.in_use(session, project.id))


@router.get(KEYS)
def list_keys(project: OwnProject, session: ReadSession) -> Listing[KeyOut]:
    """List the project's API keys, newest first, including expired and revoked ones."""
    return Listing(data=[KeyOut.of(key) for key in keys.of_project(session, project.id)])


@router.post(KEYS)
def create_key(body: KeyCreate, project: OwnProject, uow: UnitOfWork) -> NewKeyOut:
    """Create an API key. Its value is shown only in this response."""
    expires_at = None if body.expires_in_days is None else now() + body.expires_in_days * tenants.DAY
    with uow() as work:
        made = keys.create_key(
            work, project, body.name, scope=body.scope, owner=body.owner, expires_at=expires_at
        )
    return NewKeyOut.of_key(made)


@router.get(KEYS + "/{key_id}")
def retrieve_key(key_id: str, project: OwnProject, session: ReadSession) -> KeyOut:
    """Retrieve an API key."""
    return KeyOut.of(keys.get(session, key_id, project.id))


@router.post(KEYS + "/{key_id}/rotate")
def rotate_key(
    key_id: str, project: OwnProject, caller: CurrentCaller, uow: UnitOfWork, body: KeyRotate = KeyRotate()
) -> NewKeyOut:
    """Replace an API key. The old key is revoked at once or after `grace_hours`."""
    with uow() as work:
        key = keys.get(work.session, key_id, project.id)
        keys.require_scope_of(caller.key, key)
        made = keys.rotate(work, key, grace_hours=body.grace_hours)
    return NewKeyOut.of_key(made)


@router.delete(KEYS + "/{key_id}")
def revoke_key(key_id: str, project: OwnProject, uow: UnitOfWork) -> Deleted:
    """Revoke an API key."""
    with uow() as work:
        keys.revoke(work, keys.get(work.session, key_id, project.id))
    return Deleted(id=key_id, object="organization.project.api_key.deleted")


def _fields(key: ApiKey) -> dict[str, Any]:
    names = ("id", "name", "scope", "owner", "created_at", "expires_at", "revoked_at", "last_used_at")
    return {name: getattr(key, name) for name in names} | {"redacted_value": f"rg-...{key.last4}"}
