"""Usage, and for operators the workers and queues of the service."""

from urllib.parse import quote

from openai import AsyncOpenAI, BaseModel

from regraft.literals import Projects
from regraft.types import Queue, UsageReport, Worker

WORKERS, QUEUES = "/regraft/workers", "/regraft/queues"


class Workers(BaseModel):
    data: list[Worker]


class Queues(BaseModel):
    data: list[Queue]


class AsyncService:
    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    async def usage(self, *, by: str = "day", days: int = 30, projects: Projects = "own") -> UsageReport:
        """Sum usage by day, model or project, or several of them: `day,model`.

        Args:
            days: Today and the days before, in UTC.
            projects: `all` requires a key with the scope `operator`.
        """
        return await self._client.get(_usage(by, days, projects), cast_to=UsageReport)

    async def workers(self) -> list[Worker]:
        """List the workers of the service. Requires a key with the scope `operator`."""
        return (await self._client.get(WORKERS, cast_to=Workers)).data

    async def queues(self) -> list[Queue]:
        """List the queues of the service. Requires a key with the scope `operator`."""
        return (await self._client.get(QUEUES, cast_to=Queues)).data


def _usage(by: str, days: int, projects: Projects) -> str:
    return f"/regraft/usage?by={quote(by)}&days={days}&projects={projects}"
