"""A file of a job that it cannot learn from."""

from core.database.engine import Database
from core.jobs import lifecycle
from core.jobs.claim import Claim


class BadFile(Exception):
    """The job fails with this message and code; `param` names the file."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.message = param, message
        self.code = code or f"invalid_{param}"


def failed(database: Database, claim: Claim, bad: BadFile) -> list[tuple[str, str]]:
    """Fail the job; there is nothing to notify."""
    with lifecycle.fenced(database, claim) as (session, job):
        lifecycle.fail(session, job, code=bad.code, message=bad.message, param=bad.param)
    return []
