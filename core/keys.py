"""API keys: made once, shown once, kept as a hash."""

import hashlib
import secrets

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.models import ApiKey, Organization, Project


def create_key(session: Session, project: Project, name: str) -> str:
    """A new key of the project. Nothing can show it again: only its hash and last characters are stored."""
    token = "rg-" + secrets.token_urlsafe(32)
    session.add(ApiKey(project_id=project.id, name=name, sha256=_sha256(token), last4=token[-4:]))
    session.flush()
    return token


def find_project(session: Session, token: str) -> Project | None:
    """The project whose key this is."""
    mine = (
        select(Project).join(ApiKey, ApiKey.project_id == Project.id).where(ApiKey.sha256 == _sha256(token))
    )
    return session.scalar(mine)


def bootstrap(session: Session) -> str | None:
    """Make an empty service usable: an organization, a project and a key. None if it is not empty."""
    if session.scalar(select(Organization.id).limit(1)) is not None:
        return None
    organization = Organization(name="default")
    session.add(organization)
    session.flush()
    project = Project(organization_id=organization.id, name="default")
    session.add(project)
    session.flush()
    return create_key(session, project, "default")


def _sha256(token: str) -> str:
    # No salt and no slow hash: the key is 256 random bits, which nobody can guess from its hash.
    return hashlib.sha256(token.encode()).hexdigest()
