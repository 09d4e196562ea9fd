"""Tokens of judges in requests: they count towards the project's limit, and a project at its limit uses no judge."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from api.http.deps import Service
from core.database.tables import Project
from core.jobs import usage
from core.retry import RetryPolicy
from core.tenancy import tenants
from graders.build import judge_parts
from graders.judge.usage import TokenLedger
from graders.spec import GraderSpec

log = logging.getLogger(__name__)


def refuse_judges_beyond(service: Service, project: Project, spec: GraderSpec) -> None:
    """Check the limits of the project before a request to a judge. Blocks on the database.

    Raises:
        QuotaExceeded: the grader has a judge, and GPU time or grader tokens are used up.
    """
    if not any(judge_parts(spec)):
        return
    with service.database.read() as session:
        limits = tenants.limits(project, service.settings.default_limits)
        if (beyond := tenants.used_up(session, project.id, limits)) is not None:
            raise beyond


@asynccontextmanager
async def booked_judges(service: Service, project_id: str, model: str | None) -> AsyncIterator[TokenLedger]:
    """Count what judges use during the context as usage of the project, however it ends.

    Args:
        model: of the answers; None: unknown.
    """
    ledger = TokenLedger()
    try:
        yield ledger
    finally:
        if tokens := ledger.unbooked:
            retry = RetryPolicy(service.settings.patience_seconds, log.warning)
            await asyncio.to_thread(
                usage.book_grader_tokens, service.database, project_id, model, tokens=tokens, retry=retry
            )
