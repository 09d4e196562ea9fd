"""Archiving a project ends all that runs in it."""

from sqlalchemy import select

from core.database.engine import Work
from core.database.states import EVAL_RUN, JOB
from core.database.tables import EvalRun, Job, Project, now
from core.evals import lifecycle as eval_runs
from core.jobs import lifecycle


def archive_project(work: Work, project: Project) -> None:
    """Revoke access to the project and cancel its jobs and eval runs, which no key could stop otherwise.

    Rows and files are kept.
    """
    if project.archived_at is not None:
        return
    # Jobs first, in the lock order of workers: a claim locks the job and then the project.
    unfinished = select(Job).where(Job.project_id == project.id, Job.status.not_in(JOB.final))
    for job in work.session.scalars(unfinished.order_by(Job.seq)).all():
        lifecycle.cancel(work, job)
    runs = select(EvalRun).where(EvalRun.project_id == project.id, EvalRun.status.not_in(EVAL_RUN.final))
    for run in work.session.scalars(runs.order_by(EvalRun.seq)).all():
        eval_runs.cancel(work, run)
    project.archived_at = now()
    work.record("project.archived", project.id)
