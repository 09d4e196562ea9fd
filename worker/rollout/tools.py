"""The tools that answers call during training: the user's HTTP servers, in Azure's format (docs/howto/agents.md)."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.evals.schemas import MAX_PROBLEM
from core.masking import hide_in_error, mask_values, secrets_of, secrets_of_headers
from graders.calls import AnswerTooLong, CallRetryPolicy, NoAnswer, RateLimit, Reply, post, quoted_reply
from graders.endpoint import Endpoints
from graders.hazards import table
from graders.hazards.pool import HazardFailed, LimitExceeded, shared
from graders.hazards.table import Hazard
from graders.types import Item

MAX_BYTES = 1_000_000  # of a request, and of an answer
TIMEOUT_S = 600.0  # of one attempt, from its start to the last byte of the answer
PER_SECOND = 50.0  # requests to one tool
WINDOW = 64  # the newest calls of a tool, of which at most half may fail
# The server of a tool that hangs would otherwise hold an episode for four times TIMEOUT_S.
PATIENCE = CallRetryPolicy(retries=3, retries_after_silence=0)


@dataclass(frozen=True)
class HttpTool:
    """A tool on the user's web server, as a job's body has it."""

    name: str
    server_url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "HttpTool":
        return cls(row["name"], row["server_url"], row.get("headers") or {})

    @property
    def values(self) -> list[str]:
        """Every value that only the user may see. A reason for an error is without them."""
        return [*self.headers.values(), *secrets_of(self.server_url)]

    def output(self, text: str) -> str:
        """The text with keys masked, for the model. Other headers may have words that occur in any text."""
        return mask_values(text, [*secrets_of_headers(self.headers), *secrets_of(self.server_url)])


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


class ToolFailed(Exception):
    """A tool gave no answer that the model could read, so the episode that called it has no reward."""


class ToolsFail(Exception):
    """Most of the newest calls of a tool failed, or most episodes were discarded, so the job pauses."""

    def __init__(
        self, what: str, failures: Sequence[str], data: Mapping[str, Any], repair: str = "the tool"
    ) -> None:
        super().__init__(
            f"{what}, the last one with: {failures[-1]}. Repair {repair} and resume the job, which repeats the "
            "unfinished step."
        )
        self.data: dict[str, Any] = {**data, "failed": len(failures), "reasons": list(failures[-8:])}

    @classmethod
    def of_calls(cls, tool: str, calls: int, failures: Sequence[str]) -> "ToolsFail":
        what = f"{len(failures)} of the newest {calls} calls of the tool '{tool}' failed"
        return cls(what, failures, {"tool": tool, "calls": calls})

    @classmethod
    def of_episodes(cls, episodes: int, failures: Sequence[str]) -> "ToolsFail":
        """Args:
        episodes: of a step or validation.
        failures: of those that were discarded.
        """
        what = f"{len(failures)} of {episodes} episodes were discarded because a tool failed"
        return cls(what, failures, {"episodes": episodes})

    @classmethod
    def of_agent(cls, episodes: int, failures: Sequence[str]) -> "ToolsFail":
        """As `of_episodes`, of episodes that the user's agent has played."""
        what = f"{len(failures)} of {episodes} episodes were discarded because the agent failed"
        return cls(what, failures, {"episodes": episodes}, "the agent")


class Tools(Protocol):
    """Executes the calls of an episode. HttpTools, and fakes in the tests."""

    async def call(self, call: ToolRequest) -> ToolResult:
        """Return what the model reads next.

        Raises:
            ToolFailed: the episode is discarded.
            ToolsFail: the job pauses.
        """
        ...


@dataclass
class _Outcomes:
    """Of the newest calls of one tool: "" for an answer, or why there was none."""

    newest: deque[str] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, tool: str, failure: str) -> None:
        """Raise ToolsFail if more than half of WINDOW calls failed."""
        self.newest.append(failure)
        failures = [one for one in self.newest if one]
        if 2 * len(failures) > WINDOW:
            raise ToolsFail.of_calls(tool, len(self.newest), failures)


class HttpTools:
    """Implements Tools: a POST for each call, which may be repeated with the same `Idempotency-Key`."""

    def __init__(
        self,
        tools: Sequence[HttpTool],
        endpoints: Endpoints,
        *,
        patience: CallRetryPolicy = PATIENCE,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`endpoints`: the hosts that the operator allows, and the HTTP client that checks their addresses."""
        self._tools = {tool.name: tool for tool in tools}
        self._endpoints, self._patience, self._timeout_s, self._clock = endpoints, patience, timeout_s, clock
        self._pace = {name: RateLimit(PER_SECOND, patience.sleep, clock) for name in self._tools}
        self._outcomes = {name: _Outcomes() for name in self._tools}

    async def call(self, call: ToolRequest) -> ToolResult:
        tool, body = self._tools[call.name], call.body()
        if len(body) > MAX_BYTES:
            return ToolResult.of_error(f"the request is {len(body)} bytes, more than {MAX_BYTES}", code=413)
        began = self._clock()
        try:
            result = self._result(tool, await self._post(tool, call, body), began)
        except ToolFailed as failed:
            self._outcomes[call.name].add(call.name, str(failed))
            raise
        self._outcomes[call.name].add(call.name, "")
        return result

    async def _post(self, tool: HttpTool, call: ToolRequest, body: bytes) -> Reply | AnswerTooLong:
        """Raises ToolFailed: there was no answer."""
        try:
            async with self._endpoints.connect() as client:
                return await post(
                    client,
                    tool.server_url,
                    body,
                    {**tool.headers, "idempotency-key": call.key},
                    patience=self._patience,
                    pace=self._pace[tool.name],
                    timeout_s=self._timeout_s,
                    max_bytes=MAX_BYTES,
                )
        except AnswerTooLong as long:
            return long
        except NoAnswer as silence:
            raise ToolFailed(f"no answer: {mask_values(hide_in_error(str(silence)), tool.values)}") from None

    def _result(self, tool: HttpTool, reply: Reply | AnswerTooLong, began: float) -> ToolResult:
        seconds = self._clock() - began
        if isinstance(reply, AnswerTooLong):
            return ToolResult.of_error(str(reply), seconds, code=413)
        if not reply.ok and not 400 <= reply.status < 500:
            raise ToolFailed(f"HTTP {reply.status}: {quoted_reply(reply.text, *tool.values)}")
        output = _output(reply.text)
        if not reply.is_utf8:
            return ToolResult.of_error("the answer of the tool is not UTF-8", seconds)
        if output is not None:
            return ToolResult(tool.output(output), "" if reply.ok else f"HTTP {reply.status}", seconds)
        if not reply.ok:
            return ToolResult(tool.output(reply.text), f"HTTP {reply.status}", seconds)
        return ToolResult.of_error("the answer of the tool has no 'output'", seconds)


def _output(text: str) -> str | None:
    """`output` of an answer in Azure's format, as JSON unless it is a text; None: there is none."""
    try:
        answer = json.loads(text)
        output = answer["output"] if isinstance(answer, dict) else None
    except (ValueError, KeyError, RecursionError):
        return None
    if output is None:
        return None
    written = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    return written.encode(errors="replace").decode()  # a lone surrogate is no character


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
