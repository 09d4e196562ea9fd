"""/v1/regraft/aliases: names that a project gives to models (docs/howto/serving.md, Aliases)."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.http.deps import CurrentProject, ReadSession, ServiceDep, UnitOfWork
from api.http.openapi import refusals
from api.http.shapes import After, Body, Limit, Listing, clamped
from core.database.tables import AuditEntry, ModelAlias
from core.registry import Registry
from core.results import model_aliases

router = APIRouter(prefix="/regraft/aliases", tags=["regraft"])


class AliasSave(Body):
    name: Annotated[str, Field(pattern=model_aliases.NAME)]
    model: Annotated[str, Field(description="A base model, a tuned model or a checkpoint.")]


class AliasOut(BaseModel):
    """A name of the project's own for a model."""

    id: str
    object: Literal["regraft.alias"] = "regraft.alias"
    name: str
    model: Annotated[str, Field(description="The model that answers.")]
    previous_model: Annotated[str | None, Field(description="The model that a rollback restores.")]
    created_at: int
    updated_at: Annotated[int, Field(description="When it was last pointed at another model.")]
    hidden: Annotated[
        bool, Field(description="Whether a model of the registry has the name, and answers in its place.")
    ]

    @classmethod
    def of(cls, alias: ModelAlias, registry: Registry) -> "AliasOut":
        return cls(
            id=alias.id,
            name=alias.name,
            model=alias.model,
            previous_model=alias.previous_model,
            created_at=alias.created_at,
            updated_at=alias.updated_at,
            hidden=model_aliases.is_hidden(alias.name, registry),
        )


class AliasChangeOut(BaseModel):
    """A change of an alias."""

    id: str
    object: Literal["regraft.alias.change"] = "regraft.alias.change"
    name: str
    previous_model: Annotated[str | None, Field(description="Null: the alias was created.")]
    model: Annotated[
        str | None, Field(description="The model that answered from then on. Null: it was deleted.")
    ]
    changed_at: int
    changed_by: Annotated[str, Field(description="The id of an API key or a login, or `operator`.")]

    @classmethod
    def of(cls, entry: AuditEntry) -> "AliasChangeOut":
        return cls(
            id=entry.id,
            name=entry.target,
            previous_model=entry.data["from"],
            model=entry.data.get("to"),
            changed_at=entry.created_at,
            changed_by=entry.actor,
        )


class AliasDeleted(BaseModel):
    object: Literal["regraft.alias.deleted"] = "regraft.alias.deleted"
    deleted: Literal[True] = True
    id: str
    name: str


@router.post("", responses=refusals(404))
def save_alias(body: AliasSave, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> AliasOut:
    """Point an alias at a model. An alias that does not exist is created."""
    with uow() as work:
        alias = model_aliases.promote(work, project.id, body.name, body.model, service.registry)
        return AliasOut.of(alias, service.registry)


@router.get("")
def list_aliases(
    project: CurrentProject, session: ReadSession, service: ServiceDep, after: After = None, limit: Limit = 20
) -> Listing[AliasOut]:
    """List the aliases, newest first."""
    page = model_aliases.page(session, project.id, after=after, limit=clamped(limit))
    shown = [AliasOut.of(alias, service.registry) for alias in page.items]
    return Listing(data=shown, has_more=page.has_more)


@router.get("/{alias}")
def retrieve_alias(
    alias: str, project: CurrentProject, session: ReadSession, service: ServiceDep
) -> AliasOut:
    """Retrieve an alias."""
    return AliasOut.of(model_aliases.get(session, project.id, alias), service.registry)


@router.get("/{alias}/history")
def list_alias_history(
    alias: str, project: CurrentProject, session: ReadSession, after: After = None, limit: Limit = 20
) -> Listing[AliasChangeOut]:
    """List who pointed an alias from which model at which, and when, newest first; also of a deleted one."""
    page = model_aliases.history(session, project.id, alias, after=after, limit=clamped(limit))
    return Listing(data=[AliasChangeOut.of(entry) for entry in page.items], has_more=page.has_more)


@router.post("/{alias}/rollback", responses=refusals(400))
def roll_back_alias(alias: str, project: CurrentProject, service: ServiceDep, uow: UnitOfWork) -> AliasOut:
    """Point an alias at its previous model again. A second rollback undoes the first."""
    with uow() as work:
        row = model_aliases.roll_back(work, project.id, alias, service.registry)
        return AliasOut.of(row, service.registry)


@router.delete("/{alias}")
def delete_alias(alias: str, project: CurrentProject, uow: UnitOfWork) -> AliasDeleted:
    """Delete an alias. Its model is kept."""
    with uow() as work:
        row = model_aliases.remove(work, project.id, alias)
        return AliasDeleted(id=row.id, name=row.name)
