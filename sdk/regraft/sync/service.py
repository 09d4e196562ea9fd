"""Written by .ci/sync_client.py from regraft.resources.service; do not edit."""

from openai import OpenAI

from regraft.literals import Projects
from regraft.resources.service import QUEUES, WORKERS, Queues, Workers, _usage
from regraft.types import Queue, UsageReport, Worker


class Service:
    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def usage(self, *, by: str = "day", days: int = 30, projects: Projects = "own") -> UsageReport:
        """Sum usage by day, model or project, or several of them: `day,model`.

        Args:
            days: Today and the days before, in UTC.
            projects: `all` requires a key with the scope `operator`.
        """
        return self._client.get(_usage(by, days, projects), cast_to=UsageReport)

    def workers(self) -> list[Worker]:
        """List the workers of the service. Requires a key with the scope `operator`."""
        return self._client.get(WORKERS, cast_to=Workers).data

    def queues(self) -> list[Queue]:
        """List the queues of the service. Requires a key with the scope `operator`."""
        return self._client.get(QUEUES, cast_to=Queues).data
