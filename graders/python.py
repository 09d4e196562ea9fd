"""python: the user's own `grade(sample, item)`, run where it can do no harm."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from graders.environments.catalog import Environment
from graders.sandbox.pool import Pool, SandboxFailed, SandboxUnavailable, shared
from graders.types import ErrorKind, Grade, Item, Sample


@dataclass(frozen=True)
class PythonGrader:
    """Every call runs the whole source anew, in a process of its own: nothing is kept from one to the next.

    What the source raises or returns wrongly is its author's to mend, and `reason` has the traceback. Trouble
    with the sandbox is ours and says nothing about the sample.
    """

    name: str
    source: str
    pool: Pool = field(default_factory=shared, repr=False, compare=False)
    environment: Environment | None = None  # the default one
    owner: str = ""  # the project, which shares its processes with no other
    type: ClassVar[str] = "python"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            coming = self.pool.submit(self.source, sample.as_namespace(), item, self.environment, self.owner)
            outcome = await asyncio.wrap_future(coming)
        except (SandboxUnavailable, SandboxFailed) as trouble:
            return Grade(None, str(trouble), ErrorKind.python_grader_server_error)
        if outcome.score is None:
            kind = ErrorKind.python_grader_runtime_error
            return Grade(None, outcome.reason, kind, output=outcome.output)
        reason = f"grade() returned {outcome.score:g}"
        return Grade(outcome.score, reason, output=outcome.output, steps=outcome.steps)
