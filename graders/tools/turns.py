"""The tools of one episode of a job or a preview: the calls of an answer run at once, until the episode ends."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from graders.tools.episode import StopReason, ToolUse
from graders.tools.protocol import ToolFailed, ToolRequest, ToolResult, Tools, call_problem
from graders.types import Item

MAX_CALLS = 32  # of one answer, each of which may have a result of a megabyte
TOO_MANY_CALLS = f"not executed: an answer may have at most {MAX_CALLS} calls"
CALL_LEFT = "another call of the answer failed before this one had ended"

Message = Mapping[str, Any]
ToolCall = Mapping[str, Any]
"""In OpenAI's format."""


@dataclass(frozen=True)
class EpisodeTools:
    """The tools of one episode."""

    tools: Tools
    functions: Sequence[Mapping[str, Any]]  # in OpenAI's format, with the schemas of their arguments
    item: Item  # the row
    trace_id: str

    async def play(self, turns: Callable[[asyncio.Timeout], Awaitable[StopReason]]) -> tuple[StopReason, str]:
        """Run the turns of the episode, and free what belongs to it when it has ended.

        Args:
            turns: gets the timeout of the episode, and sets its deadline after the first answer.

        Returns:
            The end of the episode, and the reason if it was discarded, else "".

        Raises:
            ToolsFail: the job pauses.
        """
        try:
            async with asyncio.timeout(None) as limit:
                return await turns(limit), ""
        except TimeoutError:
            if not limit.expired():
                raise
            return "time", ""
        except ToolFailed as failed:
            return "discarded", str(failed)
        finally:
            await self.tools.end(self.trace_id)

    async def use(
        self, calls: Sequence[ToolCall], turn: int, uses: list[ToolUse], *, unreadable: str = ""
    ) -> list[Message]:
        """Execute the calls of an answer at once.

        Args:
            turn: the number of the answer in its episode.
            uses: gets one use for each call, in their order, also if this raises an error.
            unreadable: the reason why the calls could not be read, which is their result. "": they could.

        Returns:
            The messages with the results, in the order of the calls.

        Raises:
            ToolFailed: the episode is discarded.
            ToolsFail: the job pauses, whatever other calls of the answer did.
        """
        running: list[asyncio.Task[ToolResult]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for place, call in enumerate(calls):
                    running.append(tasks.create_task(self._result(call, turn, place, unreadable)))
        except BaseExceptionGroup as several:
            uses += map(_use_of, calls, running)
            errors = several.exceptions
            raise next((one for one in errors if not isinstance(one, ToolFailed)), errors[0]) from None
        uses += map(_use_of, calls, running)
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": task.result().output}
            for call, task in zip(calls, running, strict=True)
        ]

    async def _result(self, call: ToolCall, turn: int, place: int, unreadable: str) -> ToolResult:
        if unreadable:
            return ToolResult.of_error(unreadable)
        if place >= MAX_CALLS:
            return ToolResult.of_error(TOO_MANY_CALLS)
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if problem := await call_problem(name, arguments, self.functions):
            return ToolResult.of_error(problem)
        key = f"{self.trace_id}/{turn}/{place}/{name}/{arguments}"
        digest = sha256(key.encode(errors="replace")).hexdigest()[:32]
        return await self.tools.call(
            ToolRequest(call["id"], digest, name, arguments, self.trace_id, self.item)
        )


def _use_of(call: ToolCall, task: asyncio.Task[ToolResult]) -> ToolUse:
    """The use of a tool, whose task has ended."""
    if task.cancelled():
        return ToolUse(call, None, CALL_LEFT)
    if (error := task.exception()) is not None:
        return ToolUse(call, None, str(error))
    result = task.result()
    return ToolUse(call, result.output, result.error, result.seconds)
