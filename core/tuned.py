"""What training has made: the checkpoints of a job, and the model names that can be called."""

from collections.abc import Mapping, Sequence

from sqlalchemy import Select, or_, select
from sqlalchemy import delete as delete_from
from sqlalchemy.orm import Session

from core import pages
from core.db import Work
from core.models import Checkpoint, Job, TunedModel
from core.pages import Page


def models(session: Session, project_id: str) -> Sequence[TunedModel]:
    """All of the project's tuned models, newest first."""
    mine = select(TunedModel).where(TunedModel.project_id == project_id)
    return session.scalars(mine.order_by(TunedModel.seq.desc())).all()


def find(session: Session, project_id: str, name: str) -> TunedModel | None:
    mine = select(TunedModel).where(TunedModel.project_id == project_id, TunedModel.name == name)
    return session.scalar(mine)


def checkpoint_of(session: Session, model: TunedModel) -> Checkpoint | None:
    return session.scalar(select(Checkpoint).where(Checkpoint.id == model.checkpoint_id))


def delete(work: Work, project_id: str, name: str) -> bool:
    """Take the name away; the checkpoint behind it stays. False: the project has no such model."""
    gone = delete_from(TunedModel).where(TunedModel.project_id == project_id, TunedModel.name == name)
    if work.session.scalar(gone.returning(TunedModel.seq)) is None:
        return False
    work.record("model.deleted", name)
    return True


def checkpoints(session: Session, job: Job, *, after: str | None = None, limit: int) -> Page[Checkpoint]:
    """The kept ones, newest first: those that were validated, and those that have a name (the result, a pause's).

    The others are only there for resuming, and are replaced by the next one.
    """
    return pages.newest_first(session, _kept(job), Checkpoint, after=after, limit=limit)


def _kept(job: Job) -> Select[Checkpoint]:
    named = select(TunedModel.checkpoint_id).where(TunedModel.job_id == job.id)
    kept = or_(Checkpoint.valid_reward.is_not(None), Checkpoint.id.in_(named))
    return select(Checkpoint).where(Checkpoint.job_id == job.id, kept)


def names(session: Session, checkpoints: Sequence[Checkpoint]) -> Mapping[str, str]:
    """How to call each checkpoint, by its id: its own name, or the job's if it only has that one."""
    found = select(TunedModel).where(
        TunedModel.checkpoint_id.in_([checkpoint.id for checkpoint in checkpoints])
    )
    # Names with a step sort last here, so they are the ones that stay.
    ordered = sorted(session.scalars(found), key=lambda model: ":ckpt-step-" in model.name)
    return {model.checkpoint_id: model.name for model in ordered}
