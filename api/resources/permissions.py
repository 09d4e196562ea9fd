"""/v1/fine_tuning/checkpoints/{checkpoint}/permissions: share tuned models with other projects."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from api.http.deps import AdminProject, CurrentProject, ReadSession, UnitOfWork
from api.http.openapi import refusals
from api.http.shapes import After, Body, Deleted, EndedListing, Limit, clamped, ends
from core.database.pages import Page
from core.database.tables import CheckpointPermission, Project, TunedModel
from core.errors import ModelNotFound
from core.results import tuned_models

# The path uses the model name of the checkpoint, which may contain slashes.
router = APIRouter(prefix="/fine_tuning/checkpoints/{checkpoint:path}/permissions", tags=["Fine-tuning"])


class PermissionCreate(Body):
    project_ids: Annotated[list[str], Field(min_length=1, max_length=100)]


class PermissionOut(BaseModel):
    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: int
    project_id: str

    @classmethod
    def of(cls, permission: CheckpointPermission) -> "PermissionOut":
        return cls(id=permission.id, created_at=permission.created_at, project_id=permission.project_id)


@router.post("", responses=refusals(404))
def create_permissions(
    checkpoint: str, body: PermissionCreate, project: AdminProject, uow: UnitOfWork
) -> EndedListing[PermissionOut]:
    """Allow other projects of the organization to use and retrieve the model. Its owner does not change."""
    with uow() as work:
        granted = tuned_models.share(work, _own(work.session, project, checkpoint), body.project_ids)
        return _listing(Page(granted, has_more=False))


@router.get("")
def list_permissions(
    checkpoint: str,
    project: CurrentProject,
    session: ReadSession,
    project_id: str | None = None,
    order: Literal["ascending", "descending"] = "descending",
    after: After = None,
    limit: Limit = 10,
) -> EndedListing[PermissionOut]:
    """List the other projects that may use the model."""
    page = tuned_models.permissions(
        session,
        _own(session, project, checkpoint),
        project_id=project_id,
        newest_first=order == "descending",
        after=after,
        limit=clamped(limit),
    )
    return _listing(page)


@router.delete("/{permission_id}")
def delete_permission(checkpoint: str, permission_id: str, project: AdminProject, uow: UnitOfWork) -> Deleted:
    """Revoke a permission; later requests of that project for the model return 404."""
    with uow() as work:
        tuned_models.unshare(work, _own(work.session, project, checkpoint), permission_id)
    return Deleted(id=permission_id, object="checkpoint.permission")


def _own(session: Session, project: Project, name: str) -> TunedModel:
    model = tuned_models.find_own(session, project.id, name)
    if model is None:
        raise ModelNotFound(name, [other.name for other in tuned_models.models(session, project.id)])
    return model


def _listing(page: Page[CheckpointPermission]) -> EndedListing[PermissionOut]:
    data = [PermissionOut.of(permission) for permission in page.items]
    return EndedListing(data=data, has_more=page.has_more, **ends(page))
