"""What every kind of tool has in common: a call in an episode, its result, its failures, and the checks before it."""

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from graders.calls import CallRetryPolicy
from graders.hazards import table
from graders.hazards.pool import HazardFailed, LimitExceeded, shared
from graders.hazards.table import Hazard
from graders.types import Item

MAX_BYTES = 1_000_000  # of a request, and of an answer
TIMEOUT_S = 600.0  # of one attempt, from its start to the last byte of the answer
PER_SECOND = 50.0  # requests to one tool
# The server of a tool that hangs would otherwise hold an episode for four times TIMEOUT_S.
PATIENCE = CallRetryPolicy(retries=3, retries_after_silence=0)
WINDOW = 64  # the newest calls of a tool, of which at most half may fail
MAX_PROBLEM = 300  # characters of what is wrong with a call


@dataclass(frozen=True)
class ToolRequest:
    """A call whose arguments fit the schema of its function."""

    id: str  # of the call in its episode, for the template: those of Mistral have 9 characters
    # The `Idempotency-Key`, the same in each attempt, also after a restart of the job. No other call has it, nor the
    # same one with other arguments, which a repeated step may sample.
    key: str
    name: str
    arguments: str  # a JSON object
    trace_id: str  # of the episode
    item: Item  # the row

    def body(self) -> bytes:
        """The request in Azure's format."""
        sent = {
            "type": "function_call",
            "id": self.id,
            "call_id": self.id,
            "name": self.name,
            "arguments": self.arguments,
            "trace_id": self.trace_id,
            "item": self.item,
        }
        return json.dumps(sent, default=dict, separators=(",", ":")).encode()


@dataclass(frozen=True)
class ToolResult:
    """The text that the model reads after a call."""

    output: str
    error: str = ""  # the reason why `output` is not the output of the tool; it says so to the model
    seconds: float = 0.0

    @classmethod
    def of_error(cls, error: str, seconds: float = 0.0, *, code: int | None = None) -> "ToolResult":
        """A result that tells the model of an error."""
        numbered = {} if code is None else {"code": code}
        return cls(json.dumps({"error": {**numbered, "message": error}}, ensure_ascii=False), error, seconds)


def as_text(output: str) -> str:
    """The output of a tool with a question mark for each lone surrogate, which is no character."""
    return output.encode(errors="replace").decode()


class ToolFailed(Exception):
    """A tool gave no answer that the model could read, so the episode that called it has no reward."""


class ToolsFail(Exception):
    """Most of the newest calls of a tool failed, or most episodes were discarded, so the job pauses."""

    def __init__(
        self, what: str, failures: Sequence[str], data: Mapping[str, Any], repair: str = "the tool"
    ) -> None:
        """`repair`: what the user has to repair."""
        self.what = what
        super().__init__(f"{what}. Repair {repair} and resume the job, which repeats the unfinished step.")
        self.data: dict[str, Any] = {**data, "failed": len(failures), "reasons": list(failures[-8:])}

    @classmethod
    def of_calls(cls, tool: str, calls: int, failures: Sequence[str]) -> "ToolsFail":
        what = f"{len(failures)} of the newest {calls} calls of the tool '{tool}' failed"
        return cls(_with_last(what, failures), failures, {"tool": tool, "calls": calls})

    @classmethod
    def of_schemas(cls, label: str, changed: Sequence[str]) -> "ToolsFail":
        """`changed`: the functions that the MCP server does not have, or has with another schema."""
        what = f"The MCP server '{label}' has changed {', '.join(changed)} since the job was created"
        return cls(what, changed, {"tool": label}, "the server")

    @classmethod
    def of_episodes(cls, episodes: int, failures: Sequence[str]) -> "ToolsFail":
        """Args:
        episodes: of a step or validation.
        failures: of those that were discarded.
        """
        what = f"{len(failures)} of {episodes} episodes were discarded because a tool failed"
        return cls(_with_last(what, failures), failures, {"episodes": episodes})

    @classmethod
    def of_agent(cls, episodes: int, failures: Sequence[str]) -> "ToolsFail":
        """As `of_episodes`, of episodes that the user's agent has played."""
        what = f"{len(failures)} of {episodes} episodes were discarded because the agent failed"
        return cls(_with_last(what, failures), failures, {"episodes": episodes}, "the agent")


def _with_last(what: str, failures: Sequence[str]) -> str:
    return f"{what}, the last one with: {failures[-1]}"


class Tools(Protocol):
    """Executes the calls of episodes: of one kind of tool, or of all tools of a job."""

    async def call(self, call: ToolRequest) -> ToolResult:
        """Return what the model reads next.

        Raises:
            ToolFailed: the episode is discarded.
            ToolsFail: the job pauses.
        """
        ...

    async def end(self, trace_id: str) -> None:
        """Free what belongs to an episode that has ended, such as a session. Raises nothing."""
        ...


@dataclass
class Outcomes:
    """Of the newest calls of one tool: "" for an answer, or why there was none."""

    newest: deque[str] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, tool: str, failure: str) -> None:
        """Raise ToolsFail if more than half of WINDOW calls failed."""
        self.newest.append(failure)
        failures = [one for one in self.newest if one]
        if 2 * len(failures) > WINDOW:
            raise ToolsFail.of_calls(tool, len(self.newest), failures)


async def call_problem(
    name: str, arguments: str, functions: Sequence[Mapping[str, Any]], check: Hazard = table.ITEMS
) -> str:
    """The reason why a call of the model is not sent to its tool; "" if it is.

    Args:
        functions: `tools` of the row.
        check: applies a schema to a list of arguments.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in functions}
    if name not in schemas:
        return f"there is no function {name[:64]!r}; there are {', '.join(sorted(schemas))}"
    try:
        given = json.loads(arguments)
        if not isinstance(given, dict):
            return "the arguments are not a JSON object"
        json.dumps(given, allow_nan=False)
    except (ValueError, RecursionError):
        return "the arguments are not JSON"
    try:
        checked = shared().submit(check, json.dumps(schemas[name]), json.dumps([given]))
        [problem] = await asyncio.wrap_future(checked)
    except (LimitExceeded, HazardFailed) as cause:
        return f"the arguments cannot be checked: {cause}"[:MAX_PROBLEM]
    return f"the arguments do not fit the schema: {problem}" if problem else ""
