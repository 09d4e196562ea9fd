"""A file of a job that it cannot learn from."""

from core.database.engine import Database, WakeMessage
from core.jobs import lifecycle
from core.jobs.claim import Claim
from core.jobs.job_files import BadFile


def failed(database: Database, claim: Claim, bad: BadFile) -> list[WakeMessage]:
    """Fail the job; there is nothing to notify."""
    with lifecycle.fenced(database, claim) as (session, job):
        lifecycle.fail(session, job, code=bad.code, message=bad.message, param=bad.param)
    return []
