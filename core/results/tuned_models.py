"""Checkpoints of a job, and the names of tuned models."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select
from sqlalchemy import delete as delete_from
from sqlalchemy.orm import Session

from core.database import pages
from core.database.engine import Work
from core.database.pages import Page
from core.database.states import JOB
from core.database.tables import Checkpoint, CheckpointPermission, Job, ModelAlias, Project, TunedModel
from core.errors import InvalidRequest, PermissionNotFound
from core.jobs.methods import REWARD_MODEL


def models(session: Session, project_id: str) -> Sequence[TunedModel]:
    """All tuned models that the project may use, its own and those shared with it, newest first."""
    callable_ = select(TunedModel).where(_callable_by(project_id))
    return session.scalars(callable_.order_by(TunedModel.seq.desc())).all()


def find(session: Session, project_id: str, name: str) -> TunedModel | None:
    """The tuned model of this name, if the project may use it."""
    return session.scalar(select(TunedModel).where(TunedModel.name == name, _callable_by(project_id)))


def find_own(session: Session, project_id: str, name: str) -> TunedModel | None:
    """The project's own tuned model of this name."""
    return session.scalar(select(TunedModel).where(TunedModel.name == name, _own(project_id)))


def _own(project_id: str) -> ColumnElement[bool]:
    return TunedModel.project_id == project_id


def _callable_by(project_id: str) -> ColumnElement[bool]:
    shared = select(CheckpointPermission.model).where(CheckpointPermission.project_id == project_id)
    return or_(_own(project_id), TunedModel.name.in_(shared))


def checkpoint_of(session: Session, model: TunedModel) -> Checkpoint | None:
    return session.scalar(select(Checkpoint).where(Checkpoint.id == model.checkpoint_id))


def reward_models(session: Session, models: Sequence[TunedModel]) -> set[str]:
    """The names of those that are reward models."""
    jobs = select(Job.id).where(Job.method == REWARD_MODEL, Job.id.in_({model.job_id for model in models}))
    found = set(session.scalars(jobs))
    return {model.name for model in models if model.job_id in found}


def is_reward_model(session: Session, model: TunedModel) -> bool:
    return session.scalar(select(Job.method).where(Job.id == model.job_id)) == REWARD_MODEL


def only_scores(name: str, param: str) -> InvalidRequest:
    """The refusal of a reward model where a model is to give answers."""
    return InvalidRequest(
        f"'{name}' is a reward model: it scores answers, and gives none. Use it as a grader "
        '{"type": "reward_model", "model": "..."} of a reinforcement job.',
        param=param,
        code="invalid_model",
    )


def delete(work: Work, project_id: str, name: str) -> bool:
    """Delete the name; its checkpoint is kept. False: the project has no such model.

    Raises InvalidRequest: an alias of the project points at it, or a job that has not ended needs it.
    """
    pages.keep_order(work.session, project_id)  # no alias may be pointed at it meanwhile
    if find_own(work.session, project_id, name) is None:
        return False
    pointing = select(ModelAlias.name).where(ModelAlias.project_id == project_id, ModelAlias.model == name)
    if aliases := work.session.scalars(pointing.order_by(ModelAlias.name)).all():
        raise InvalidRequest(
            f"The alias '{aliases[0]}' points at '{name}': point it at another model, or delete it, first.",
            param="model",
            code="model_in_use",
        )
    if (job_id := _needing(work.session, project_id, name)) is not None:
        raise InvalidRequest(
            f"The job '{job_id}' has not ended and is taught or graded by '{name}': cancel it first.",
            param="model",
            code="model_in_use",
        )
    deleted = delete_from(TunedModel).where(TunedModel.project_id == project_id, TunedModel.name == name)
    if work.session.scalar(deleted.returning(TunedModel.seq)) is None:
        return False
    _revoke_all(work.session, [name])
    work.record("model.deleted", name)
    return True


def _needing(session: Session, project_id: str, name: str) -> str | None:
    """A job of the project that has not ended, with this model as its teacher or as a reward model.

    The model that a job started from is not needed by name: its checkpoint is kept.
    """
    unfinished = select(Job.id, Job.body).where(
        Job.project_id == project_id,
        Job.status.not_in(JOB.final),
        Job.method.in_(("reinforcement", "distillation")),
    )
    return next((job_id for job_id, body in session.execute(unfinished) if name in _read_by(body)), None)


def _read_by(method: Any) -> Iterator[str]:
    """The models that the object of a method names: those of reward models, and of the teacher."""
    match method:
        case {"type": "reward_model", "model": str(model)} | {"teacher": {"model": str(model)}}:
            yield model
        case dict():
            for part in method.values():
                yield from _read_by(part)


def delete_names_of(session: Session, checkpoint_id: str) -> None:
    """Delete the names of a checkpoint before its deletion, with their permissions."""
    deleted = delete_from(TunedModel).where(TunedModel.checkpoint_id == checkpoint_id)
    _revoke_all(session, session.scalars(deleted.returning(TunedModel.name)).all())


def _revoke_all(session: Session, names: Sequence[str]) -> None:
    session.execute(delete_from(CheckpointPermission).where(CheckpointPermission.model.in_(names)))


# Permissions for other projects of the organization to use a model.


def share(work: Work, model: TunedModel, project_ids: Sequence[str]) -> list[CheckpointPermission]:
    """Permit these projects to use the model. Existing permissions are returned unchanged.

    Raises:
        InvalidRequest: a project is not in the organization, or is archived.
    """
    session = work.session
    owner = session.get_one(Project, model.project_id)
    pages.keep_order(session, owner.id)  # concurrent requests grant a permission once
    granted = []
    for project_id in dict.fromkeys(project_ids):
        project = session.get(Project, project_id)
        if project is None or project.organization_id != owner.organization_id or project.archived_at:
            message = f"No such project in this organization: {project_id}"
            raise InvalidRequest(message, param="project_ids")
        this = CheckpointPermission.model == model.name, CheckpointPermission.project_id == project_id
        permission = session.scalar(select(CheckpointPermission).where(*this))
        if permission is None:
            permission = CheckpointPermission(model=model.name, project_id=project_id)
            session.add(permission)
            session.flush()
            work.record("checkpoint.permission.created", model.name, {"project": project_id})
        granted.append(permission)
    return granted


def permissions(
    session: Session,
    model: TunedModel,
    *,
    project_id: str | None,
    newest_first: bool,
    after: str | None,
    limit: int,
) -> Page[CheckpointPermission]:
    """List the permissions of the model."""
    listed = everything = select(CheckpointPermission).where(CheckpointPermission.model == model.name)
    if project_id is not None:
        listed = listed.where(CheckpointPermission.project_id == project_id)
    read = pages.newest_first if newest_first else pages.oldest_first
    return read(
        session,
        listed,
        CheckpointPermission,
        after=after,
        limit=limit,
        cursors=everything,
        owner=model.project_id,
    )


def unshare(work: Work, model: TunedModel, permission_id: str) -> None:
    """Delete a permission; raise PermissionNotFound if the model has no such one."""
    this = CheckpointPermission.id == permission_id, CheckpointPermission.model == model.name
    permission = work.session.scalar(select(CheckpointPermission).where(*this))
    if permission is None:
        raise PermissionNotFound(permission_id)
    pages.delete_row(work.session, permission, owner=model.project_id)
    work.record("checkpoint.permission.deleted", model.name, {"project": permission.project_id})


def checkpoints(session: Session, job: Job, *, after: str | None = None, limit: int) -> Page[Checkpoint]:
    """List checkpoints newest first: those that were validated, and those with a name (the result, a pause's).

    The others exist only for resuming, and are replaced by the next one.
    """
    cursors = select(Checkpoint).where(Checkpoint.job_id == job.id)
    return pages.newest_first(
        session, _kept_checkpoints(job), Checkpoint, after=after, limit=limit, cursors=cursors, owner=job.id
    )


def _kept_checkpoints(job: Job) -> Select[Checkpoint]:
    named = select(TunedModel.checkpoint_id).where(TunedModel.job_id == job.id)
    kept = or_(Checkpoint.valid_reward.is_not(None), Checkpoint.id.in_(named))
    return select(Checkpoint).where(Checkpoint.job_id == job.id, kept)


def names(session: Session, checkpoints: Sequence[Checkpoint]) -> Mapping[str, str]:
    """The model name of each checkpoint by its id: its own name, or else the job's."""
    statement = select(TunedModel).where(
        TunedModel.checkpoint_id.in_([checkpoint.id for checkpoint in checkpoints])
    )
    # Names with a step sort last, so they win.
    ordered = sorted(session.scalars(statement), key=lambda model: ":ckpt-step-" in model.name)
    return {model.checkpoint_id: model.name for model in ordered}
