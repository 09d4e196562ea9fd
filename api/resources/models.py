"""/v1/models: base models and tuned models."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from api.http.deps import CurrentProject, ReadSession, ServiceDep, UnitOfWork
from api.http.openapi import refusals
from api.http.shapes import Deleted, Listing
from core.database.tables import Project, TunedModel
from core.errors import InvalidRequest, ModelNotFound
from core.registry import Registry
from core.results import tuned_models

router = APIRouter(prefix="/models", tags=["Models"])


class ModelOut(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None
    shutdown_date: None = None
    kind: Literal["base", "tuned", "reward_model"]  # extension

    @classmethod
    def base(cls, name: str, registry: Registry) -> "ModelOut":
        """A base model, or an alias of one with its target as `root`."""
        return cls(
            id=name, created=0, owned_by="regraft", root=registry.resolve(name), parent=None, kind="base"
        )

    @classmethod
    def tuned(cls, model: TunedModel, project: Project, *, is_reward_model: bool) -> "ModelOut":
        return cls(
            id=model.name,
            created=model.created_at,
            owned_by=project.organization_id,
            root=model.base_model,
            parent=model.base_model,
            kind="reward_model" if is_reward_model else "tuned",
        )


# The name is the rest of the path after /models/: base models contain slashes, tuned ones colons.


@router.get("")
def list_models(project: CurrentProject, session: ReadSession, service: ServiceDep) -> Listing[ModelOut]:
    """List the base models and their aliases, then the project's tuned models, newest first."""
    base = [ModelOut.base(name, service.registry) for name in service.registry.names]
    found = tuned_models.models(session, project.id)
    rewards = tuned_models.reward_models(session, found)
    made = [ModelOut.tuned(model, project, is_reward_model=model.name in rewards) for model in found]
    return Listing(data=[*base, *made])


@router.get("/{model:path}")
def retrieve_model(
    model: str, project: CurrentProject, session: ReadSession, service: ServiceDep
) -> ModelOut:
    """Retrieve a model."""
    if model in service.registry.names:
        return ModelOut.base(model, service.registry)
    tuned_model = tuned_models.find(session, project.id, model)
    if tuned_model is None:
        made = [other.name for other in tuned_models.models(session, project.id)]
        raise ModelNotFound(model, [*service.registry.names, *made])
    is_reward_model = tuned_models.is_reward_model(session, tuned_model)
    return ModelOut.tuned(tuned_model, project, is_reward_model=is_reward_model)


@router.delete("/{model:path}", responses=refusals(400))
def delete_model(model: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> Deleted:
    """Delete the name of a tuned model. Its job and checkpoints are kept."""
    if model in service.registry.names:
        raise InvalidRequest(f"'{model}' is a base model; only tuned models can be deleted.", param="model")
    with uow() as work:
        if not tuned_models.delete(work, project.id, model):
            made = [other.name for other in tuned_models.models(work.session, project.id)]
            raise ModelNotFound(model, made)
    return Deleted(id=model, object="model")
