"""/v1/models: base models and tuned models."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ReadSession, ServiceDep, UnitOfWork
from api.http.openapi import refusals
from api.http.shapes import Deleted, Listing
from core.database.tables import ModelAlias, Project, TunedModel
from core.errors import InvalidRequest, ModelNotFound
from core.registry import Registry
from core.results import lineage, model_aliases, tuned_models

router = APIRouter(prefix="/models", tags=["Models"])


class ModelOut(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: Annotated[str, Field(description="The base model, or the model that an alias points at.")]
    parent: Annotated[
        str | None,
        Field(
            description="The model that a tuned model was trained from: a base model or another tuned model."
        ),
    ]
    shutdown_date: None = None
    kind: Literal["base", "alias", "tuned", "reward_model"]  # extension
    checkpoint_id: Annotated[
        str | None,
        Field(description="Of the archive. Null for base models, aliases and models of other projects."),
    ] = None  # extension

    @classmethod
    def base(cls, name: str, registry: Registry) -> "ModelOut":
        """A base model, or an alias of the registry with its target as `root`."""
        return cls(
            id=name, created=0, owned_by="regraft", root=registry.resolve(name), parent=None, kind="base"
        )

    @classmethod
    def alias(cls, alias: ModelAlias, project: Project) -> "ModelOut":
        """An alias of the project, with its target as `root`."""
        return cls(
            id=alias.name,
            created=alias.created_at,
            owned_by=project.organization_id,
            root=alias.model,
            parent=None,
            kind="alias",
        )

    @classmethod
    def tuned(
        cls, model: TunedModel, project: Project, *, trained_from: str, is_reward_model: bool
    ) -> "ModelOut":
        return cls(
            id=model.name,
            created=model.created_at,
            owned_by=project.organization_id,
            root=model.base_model,
            parent=trained_from,
            kind="reward_model" if is_reward_model else "tuned",
            checkpoint_id=model.checkpoint_id if model.project_id == project.id else None,
        )


# The name is the rest of the path after /models/: base models contain slashes, tuned ones colons.


@router.get("")
def list_models(project: CurrentProject, session: ReadSession, service: ServiceDep) -> Listing[ModelOut]:
    """List the base models and their aliases, the project's aliases, then its tuned models, newest first."""
    base = [ModelOut.base(name, service.registry) for name in service.registry.names]
    aliases = [
        ModelOut.alias(one, project)
        for one in model_aliases.everything(session, project.id)
        if not model_aliases.is_hidden(one.name, service.registry)
    ]
    found = tuned_models.models(session, project.id)
    rewards = tuned_models.reward_models(session, found)
    parents = lineage.trained_from(session, project.id, found)
    made = [
        ModelOut.tuned(
            model, project, trained_from=parents[model.name], is_reward_model=model.name in rewards
        )
        for model in found
    ]
    return Listing(data=[*base, *aliases, *made])


@router.get("/{model:path}")
def retrieve_model(
    model: str, project: CurrentProject, session: ReadSession, service: ServiceDep
) -> ModelOut:
    """Retrieve a model."""
    if model in service.registry.names:
        return ModelOut.base(model, service.registry)
    alias = model_aliases.find(session, project.id, model)
    if alias is not None:
        return ModelOut.alias(alias, project)
    tuned_model = tuned_models.find(session, project.id, model)
    if tuned_model is None:
        raise ModelNotFound(model, model_aliases.callable_names(session, project.id, service.registry))
    parents = lineage.trained_from(session, project.id, [tuned_model])
    is_reward_model = tuned_models.is_reward_model(session, tuned_model)
    return ModelOut.tuned(
        tuned_model, project, trained_from=parents[tuned_model.name], is_reward_model=is_reward_model
    )


@router.delete("/{model:path}", responses=refusals(400))
def delete_model(model: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> Deleted:
    """Delete the name of a tuned model. Its job and checkpoints are kept."""
    if model in service.registry.names:
        raise InvalidRequest(f"'{model}' is a base model; only tuned models can be deleted.", param="model")
    with uow() as work:
        if model_aliases.find(work.session, project.id, model) is not None:
            raise InvalidRequest(
                f"'{model}' is an alias: DELETE /v1/regraft/aliases/{model} deletes it.", param="model"
            )
        if not tuned_models.delete(work, project.id, model):
            made = [other.name for other in tuned_models.models(work.session, project.id)]
            raise ModelNotFound(model, made)
    return Deleted(id=model, object="model")
