"""Aliases: names that a project gives to models, so that another model answers without a change in its clients.

The audit log has every change of an alias: its author, its time, and the models before and after.
"""

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.database import audit, pages
from core.database.engine import Work
from core.database.pages import Page
from core.database.tables import AuditEntry, ModelAlias, TunedModel, now
from core.errors import AliasIsNoTarget, AliasNotFound, InvalidRequest, ModelNotFound
from core.registry import Registry
from core.results import tuned_models

# No colon and no slash: the names of tuned models and of most base models have one.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
MAX_ALIASES = 1_000  # in a project
# Of the audit log.
CHANGED, DELETED = "model_alias.changed", "model_alias.deleted"


def find(session: Session, project_id: str, name: str) -> ModelAlias | None:
    """The alias of this name, if the project has it."""
    mine = ModelAlias.project_id == project_id, ModelAlias.name == name
    return session.scalar(select(ModelAlias).where(*mine))


def get(session: Session, project_id: str, name: str) -> ModelAlias:
    """Return the alias of this name, or raise AliasNotFound."""
    alias = find(session, project_id, name)
    if alias is None:
        raise AliasNotFound(name)
    return alias


def everything(session: Session, project_id: str) -> Sequence[ModelAlias]:
    """All aliases of the project, newest first."""
    mine = select(ModelAlias).where(ModelAlias.project_id == project_id)
    return session.scalars(mine.order_by(ModelAlias.seq.desc())).all()


def page(session: Session, project_id: str, *, after: str | None = None, limit: int) -> Page[ModelAlias]:
    """Newest first."""
    mine = select(ModelAlias).where(ModelAlias.project_id == project_id)
    return pages.newest_first(session, mine, ModelAlias, after=after, limit=limit, owner=project_id)


def history(
    session: Session, project_id: str, name: str, *, after: str | None = None, limit: int
) -> Page[AuditEntry]:
    """The changes of an alias in the audit log, newest first, also those of one that was deleted.

    Raises AliasNotFound: the project has never had an alias of this name.
    """
    found = audit.page_of(session, project_id, (CHANGED, DELETED), name, after=after, limit=limit)
    if not found.items and after is None:
        get(session, project_id, name)
    return found


def resolve(session: Session, project_id: str, name: str) -> str:
    """Resolve an alias of the project to the id of its model; other names are returned unchanged."""
    alias = find(session, project_id, name)
    return name if alias is None else alias.model


def promote(work: Work, project_id: str, name: str, model: str, registry: Registry) -> ModelAlias:
    """Point the alias of this name at a model. The alias is created if there is none.

    Raises:
        ModelNotFound: the project may use no model of this name.
        InvalidRequest: the registry has the name, it differs from another one by case only, the model gives no
            answers, or there are too many aliases.
    """
    if is_hidden(name, registry):
        raise InvalidRequest(
            f"'{name}' is a base model: choose another name for the alias.",
            param="name",
            code="invalid_value",
        )
    session = work.session
    _keep(session, project_id, model)
    target = _target(session, project_id, model, registry)
    alias = find(session, project_id, name)
    if alias is None:
        _refuse_other_case(session, project_id, name, registry)
        mine = select(func.count()).select_from(ModelAlias).where(ModelAlias.project_id == project_id)
        if session.scalars(mine).one() >= MAX_ALIASES:
            raise InvalidRequest(
                f"The project has {MAX_ALIASES:,} aliases, the most that are supported: delete some of them.",
                param="name",
            )
        alias = ModelAlias(project_id=project_id, name=name, model=target)
        session.add(alias)
        session.flush()
        work.record(CHANGED, name, {"from": None, "to": target})
    elif alias.model != target:
        _point(work, alias, target)
    return alias


def roll_back(work: Work, project_id: str, name: str, registry: Registry) -> ModelAlias:
    """Point the alias at its previous model. The models change places, so that a second call undoes the first.

    Raises:
        AliasNotFound: the project has no alias of this name.
        InvalidRequest: it has no previous model.
        ModelNotFound: the project may not use the previous model any more.
    """
    session = work.session
    mine = ModelAlias.project_id == project_id, ModelAlias.name == name
    before = session.scalar(select(ModelAlias.previous_model).where(*mine))
    _keep(session, project_id, before)
    alias = get(session, project_id, name)
    if alias.previous_model is None:
        raise InvalidRequest(f"The alias '{name}' has no previous model.", param="alias")
    _point(work, alias, _target(session, project_id, alias.previous_model, registry))
    return alias


def remove(work: Work, project_id: str, name: str) -> ModelAlias:
    """Delete the alias of this name, and return it. Its model is kept.

    Raises AliasNotFound: the project has none of this name.
    """
    pages.keep_order(work.session, project_id)  # a concurrent change waits, or has come before
    alias = get(work.session, project_id, name)
    pages.delete_row(work.session, alias, owner=alias.project_id)
    work.record(DELETED, alias.name, {"from": alias.model})
    return alias


def refuse(session: Session, project_id: str, name: str, param: str) -> None:
    """Reject an alias where a record names the model, which would change its meaning with the alias.

    Raises InvalidRequest: the name is an alias of the project.
    """
    alias = find(session, project_id, name)
    if alias is not None:
        raise InvalidRequest(
            f"'{name}' is an alias, whose model may change: name the model '{alias.model}'.",
            param=param,
            code="invalid_model",
        )


def _keep(session: Session, project_id: str, model: str | None) -> None:
    """Lock the project's aliases and the model, if there is one.

    Its deletion, and the end of its checkpoint, then wait for the commit: those who delete lock the project of the
    model. The order is that of the ids, so that no two requests wait for each other.
    """
    found = None if model is None else tuned_models.find(session, project_id, model)
    for one in sorted({project_id} | ({found.project_id} if found is not None else set())):
        pages.keep_order(session, one)


def _point(work: Work, alias: ModelAlias, model: str) -> None:
    work.record(CHANGED, alias.name, {"from": alias.model, "to": model})
    alias.previous_model, alias.model, alias.updated_at = alias.model, model, now()


def _target(session: Session, project_id: str, name: str, registry: Registry) -> str:
    base = registry.resolve(name)
    if base in registry.models:
        return base
    model = tuned_models.find(session, project_id, name)
    if model is None and (alias := find(session, project_id, name)) is not None:
        raise AliasIsNoTarget(name, alias.model)
    if model is None:
        raise ModelNotFound(name, callable_names(session, project_id, registry))
    if tuned_models.is_reward_model(session, model):
        raise tuned_models.only_scores(name, "model")
    return model.name


def is_hidden(name: str, registry: Registry) -> bool:
    """Whether requests for the name are answered by a model of the registry, which the operator may add later."""
    return name in registry.names


def _refuse_other_case(session: Session, project_id: str, name: str, registry: Registry) -> None:
    same = ModelAlias.project_id == project_id, func.lower(ModelAlias.name) == name.lower()
    alias = session.scalar(select(ModelAlias.name).where(*same))
    taken = next((other for other in registry.names if other.lower() == name.lower()), alias)
    if taken is not None:
        kind = "the alias" if taken == alias else "the model"
        raise InvalidRequest(
            f"'{name}' differs from {kind} '{taken}' by case only: choose another name.",
            param="name",
            code="invalid_value",
        )


def callable_names(session: Session, project_id: str, registry: Registry) -> list[str]:
    """Every name that the project may call: the registry's, its aliases, its tuned models."""
    aliases = [alias.name for alias in everything(session, project_id) if not is_hidden(alias.name, registry)]
    return [*registry.names, *aliases, *(model.name for model in tuned_models.models(session, project_id))]


def checkpoints_in_use(session: Session, job_id: str) -> set[str]:
    """The ids of the checkpoints of a job at which an alias of any project points."""
    names = select(ModelAlias.model)
    mine = select(TunedModel.checkpoint_id).where(TunedModel.job_id == job_id, TunedModel.name.in_(names))
    return set(session.scalars(mine))
