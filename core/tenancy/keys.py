"""API keys: shown once, stored as a hash, scoped to read, write or administer one project.

The scope `operator` adds what concerns the service as a whole. Only the operator gives it, on a machine of the service:
no request makes a key with it from one without it.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import ColumnElement, or_, select, text, update
from sqlalchemy.orm import Session

from core.database.audit import operator_of
from core.database.engine import Work
from core.database.tables import ApiKey, Organization, Project, now
from core.errors import InsufficientPermissions, InvalidApiKey, InvalidRequest, KeyNotFound

ProjectScope = Literal["read", "write", "admin"]  # that administrators of a project may give
Scope = Literal["read", "write", "admin", "operator"]
SCOPES: tuple[Scope, ...] = get_args(Scope)  # each includes those before it

# Resolution of `last_used_at`, so that authentication rarely writes.
USE_NOTED_EVERY = 60
EXPIRED = "expired_api_key"


@dataclass(frozen=True)
class NewKey:
    """A key and its text, which is not stored."""

    key: ApiKey
    token: str


def create_key(
    work: Work,
    project: Project,
    name: str,
    *,
    scope: Scope = "admin",
    owner: str = "",
    expires_at: int | None = None,
    token: str = "",
    sso_user: str | None = None,
) -> NewKey:
    """Create a key of the project. Only its hash and last characters are stored.

    Args:
        token: Its text; empty: random.
        owner: The person who uses it.
        expires_at: Unix seconds; None: never.
        sso_user: The user of single sign-on (core/tenancy/single_sign_on.py).
    """
    made = _new(work, project.id, name, scope=scope, owner=owner, expires_at=expires_at, token=token)
    made.key.sso_user = sso_user
    work.record("api_key.created", made.key.id, _described(made.key))
    return made


def rotate(work: Work, key: ApiKey, *, grace_hours: float = 0) -> NewKey:
    """Replace a key. The old one is revoked at once or after `grace_hours`.

    The new key has the same name, scope and owner. If the old one had a lifetime, the new one gets the same.

    Raises:
        InvalidRequest: the old key has expired or was revoked, or is that of a user of single sign-on.
    """
    if key.sso_user is not None:
        raise InvalidRequest(
            f"The key {key.id} stands for the single sign-on of {key.sso_user} and has no text; revoke it to end the "
            "sessions.",
            param="key_id",
        )
    if state(key) != "active":
        raise InvalidRequest(f"The key {key.id} is {state(key)}; create a new one.", param="key_id")
    lifetime = None if key.expires_at is None else key.expires_at - key.created_at
    made = _new(
        work,
        key.project_id,
        key.name,
        scope=_scope(key),
        owner=key.owner,
        expires_at=None if lifetime is None else now() + lifetime,
    )
    if grace_hours > 0:
        end = now() + round(grace_hours * 3600)
        key.expires_at = end if key.expires_at is None else min(end, key.expires_at)
    else:
        key.revoked_at = now()
    work.record("api_key.rotated", key.id, {"new_key": made.key.id, "old_until": key.expires_at or now()})
    return made


def revoke(work: Work, key: ApiKey) -> None:
    """Revoke the key for all later requests. Idempotent."""
    if key.revoked_at is None:
        key.revoked_at = now()
        work.record("api_key.revoked", key.id, {"name": key.name})


def get(session: Session, key_id: str, project_id: str | None = None) -> ApiKey:
    """Return the key or raise KeyNotFound; with a project, also for another project's key."""
    key = session.get(ApiKey, key_id)
    if key is None or project_id not in (None, key.project_id):
        raise KeyNotFound(key_id)
    return key


def of_project(session: Session, project_id: str) -> Sequence[ApiKey]:
    """List all keys newest first, including expired and revoked ones."""
    mine = select(ApiKey).where(ApiKey.project_id == project_id)
    return session.scalars(mine.order_by(ApiKey.created_at.desc(), ApiKey.id)).all()


def state(key: ApiKey) -> Literal["active", "expired", "revoked"]:
    if key.revoked_at is not None:
        return "revoked"
    return "active" if key.expires_at is None or key.expires_at > now() else "expired"


def authenticate(session: Session, token: str) -> tuple[ApiKey, Project]:
    """Return the key and its project.

    Raises:
        InvalidApiKey: the key is unknown, expired or revoked, or its project is archived. The message says which, since
        the caller has the whole key.
    """
    return usable(session, ApiKey.sha256 == _sha256(token), _masked(token))


def usable(session: Session, where: ColumnElement[bool], name: str) -> tuple[ApiKey, Project]:
    """Return the key that `where` selects, and its project. `name` is that of the key in messages.

    Raises:
        InvalidApiKey: as `authenticate`.
    """
    whose = select(ApiKey, Project).join(Project, Project.id == ApiKey.project_id).where(where)
    found = session.execute(whose).one_or_none()
    if found is None:
        hint = "Contact the operator of this service to get one."
        raise InvalidApiKey(f"Incorrect API key provided: {name}. {hint}")
    key, project = found
    if state(key) == "revoked":
        raise InvalidApiKey(f"The API key {name} was revoked.")
    if state(key) == "expired":
        raise InvalidApiKey(f"The API key {name} has expired.", code=EXPIRED)
    if project.archived_at is not None:
        raise InvalidApiKey(f"The project of the API key {name} is archived.")
    return key, project


def require(key: ApiKey, needed: Scope) -> None:
    """Raise InsufficientPermissions unless the key has the scope."""
    if SCOPES.index(_scope(key)) < SCOPES.index(needed):
        raise InsufficientPermissions(needed=needed, scope=key.scope)


def require_scope_of(key: ApiKey, other: ApiKey) -> None:
    """Raise InsufficientPermissions unless `key` has the scope of `other`, whose text it is about to see."""
    require(key, _scope(other))


def use_is_news(key: ApiKey) -> bool:
    """Whether `note_use` would change the row."""
    return key.last_used_at is None or key.last_used_at <= now() - USE_NOTED_EVERY


def note_use(session: Session, key_id: str) -> None:
    """Record the use of the key, at most once a minute."""
    old = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= now() - USE_NOTED_EVERY)
    session.execute(update(ApiKey).where(ApiKey.id == key_id, old).values(last_used_at=now()))


def bootstrap(session: Session, token: str = "") -> str | None:
    """Create an organization, a project and a key with this text (default: random) in an empty database.

    Returns the key's text, or None if the database is not empty.
    """
    empty = select(Organization.id).limit(1)
    if session.scalar(empty) is not None:
        return None
    if (
        session.get_bind().dialect.name == "postgresql"
    ):  # concurrent starts of API processes; SQLite has one writer
        session.execute(text("LOCK TABLE organizations IN SHARE ROW EXCLUSIVE MODE"))
        if session.scalar(empty) is not None:
            return None
    organization = Organization(name="default")
    session.add(organization)
    session.flush()
    project = Project(organization_id=organization.id, name="default")
    session.add(project)
    session.flush()
    work = Work(session, operator_of(project))
    return create_key(work, project, "default", scope="operator", token=token).token


def _new(
    work: Work,
    project_id: str,
    name: str,
    *,
    scope: Scope,
    owner: str,
    expires_at: int | None,
    token: str = "",
) -> NewKey:
    token = token or "rg-" + secrets.token_urlsafe(32)
    key = ApiKey(
        project_id=project_id,
        name=name,
        sha256=_sha256(token),
        last4=token[-4:],
        scope=scope,
        owner=owner,
        expires_at=expires_at,
    )
    work.session.add(key)
    work.session.flush()
    return NewKey(key, token)


def _described(key: ApiKey) -> dict[str, str | int | None]:
    return {"name": key.name, "scope": key.scope, "owner": key.owner, "expires_at": key.expires_at}


def _scope(key: ApiKey) -> Scope:
    return next(scope for scope in SCOPES if scope == key.scope)


def _sha256(token: str) -> str:
    # No salt and no slow hash: the key is 256 random bits, so its hash cannot be brute-forced.
    return hashlib.sha256(token.encode()).hexdigest()


def _masked(key: str) -> str:
    """Show enough to recognize the key, but not to use it: a typo here may be a valid key elsewhere."""
    if len(key) < 16:
        return "*" * len(key)
    return f"{key[:3]}{'*' * 8}{key[-4:]}"
