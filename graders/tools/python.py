"""Tools whose source runs in the sandbox of python graders: `def call(arguments, item, state) -> (output, state)`."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graders.deadline import once_begun
from graders.environments.catalog import Environment
from graders.sandbox.pool import CallOutcome, Pool, SandboxFailed, SandboxUnavailable, shared
from graders.tools.protocol import MAX_BYTES, Outcomes, ToolFailed, ToolRequest, ToolResult, as_text


class PythonTools:
    """Implements ToolsOfOneKind. All python tools of an episode share its state, which is null at its start."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        environment: Environment | None = None,
        owner: str = "",
        *,
        pool: Pool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        rows: tools of a job.
        environment: of the python that runs them; None: the default one.
        owner: the project; processes are not shared between projects.
        pool: default: that of this process.
        """
        self._sources = {row["name"]: row["source"] for row in rows}
        self._environment, self._owner, self._clock = environment, owner, clock
        self._pool = pool or shared()
        self._outcomes = {name: Outcomes() for name in self._sources}
        self._states: dict[str, str] = {}  # by episode
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def names(self) -> Sequence[str]:
        return list(self._sources)

    async def call(self, call: ToolRequest) -> ToolResult:
        # One call after the other, each with the state that the one before has left.
        async with self._locks[call.trace_id]:
            began = self._clock()
            try:
                outcome = await self._called(call)
                output = _output(outcome)
            except ToolFailed as failed:
                self._outcomes[call.name].add(call.name, str(failed))
                raise
            self._states[call.trace_id] = outcome.state
        self._outcomes[call.name].add(call.name, "")
        seconds = self._clock() - began
        if (size := len(output.encode())) > MAX_BYTES:
            return ToolResult.of_error(
                f"the output is {size} bytes, more than {MAX_BYTES}", seconds, code=413
            )
        return ToolResult(output, seconds=seconds)

    async def end(self, trace_id: str) -> None:
        self._states.pop(trace_id, None)
        self._locks.pop(trace_id, None)

    async def _called(self, call: ToolRequest) -> CallOutcome:
        state = self._states.get(call.trace_id, "null")
        source = self._sources[call.name]
        try:
            coming = self._pool.call(source, call.arguments, call.item, state, self._environment, self._owner)
            return await once_begun(coming.began, coming)
        except (SandboxUnavailable, SandboxFailed) as trouble:
            raise ToolFailed(str(trouble)) from None


def _output(outcome: CallOutcome) -> str:
    """The output that the model reads. Raises ToolFailed: there is none, or the state cannot be kept."""
    if outcome.kind != "ok":
        raise ToolFailed(outcome.reason)
    if (size := len(outcome.state.encode(errors="replace"))) > MAX_BYTES:
        raise ToolFailed(f"the state is {size} bytes of JSON, more than {MAX_BYTES}")
    return as_text(outcome.output)
