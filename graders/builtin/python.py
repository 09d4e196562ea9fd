"""python: run the user's `grade(sample, item)` in the sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from graders.deadline import once_begun
from graders.environments.catalog import Environment
from graders.sandbox.pool import Pool, SandboxFailed, SandboxUnavailable, shared
from graders.types import ErrorKind, Grade, Item, Sample


@dataclass(frozen=True)
class PythonGrader:
    """Each call runs the whole source in a new process, without state from earlier calls.

    Errors of the source are reported to its author, with the traceback in `reason`. Errors of the sandbox are server
    errors and leave the sample ungraded.
    """

    name: str
    source: str
    pool: Pool = field(default_factory=shared, repr=False, compare=False)
    environment: Environment | None = None  # None means the default environment
    owner: str = ""  # the project; processes are not shared between projects
    type: ClassVar[str] = "python"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            coming = self.pool.submit(self.source, sample.as_namespace(), item, self.environment, self.owner)
            outcome = await once_begun(coming.began, coming)
        except (SandboxUnavailable, SandboxFailed) as trouble:
            return Grade(None, str(trouble), ErrorKind.python_grader_server_error)
        if outcome.score is None:
            kind = ErrorKind.python_grader_runtime_error
            return Grade(None, outcome.reason, kind, output=outcome.output)
        reason = f"grade() returned {outcome.score:g}"
        return Grade(outcome.score, reason, output=outcome.output, steps=outcome.steps)
