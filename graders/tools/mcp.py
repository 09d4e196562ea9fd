"""Tools of MCP servers (docs/howto/agents.md): a session for each episode, where the server has sessions."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graders.calls import CallRetryPolicy
from graders.endpoint import Endpoints
from graders.tools.mcp_wire import McpGone, McpRefused, McpSession, McpTooLong, McpWire
from graders.tools.protocol import (
    MAX_BYTES,
    PATIENCE,
    TIMEOUT_S,
    Outcomes,
    ToolFailed,
    ToolRequest,
    ToolResult,
    ToolsFail,
    as_text,
)
from graders.tools.server import ToolServer

Function = Mapping[str, Any]
"""In OpenAI's format."""


@dataclass
class _Opening:
    """The session of an episode with one server. The first call opens it, and others wait for that."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: McpSession | None = None


class McpTools:
    """Implements ToolsOfOneKind."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        endpoints: Endpoints,
        *,
        patience: CallRetryPolicy = PATIENCE,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rows`: tools of a job, with their `functions`."""
        self._clock = clock
        self._functions: dict[str, list[Function]] = {row["server_label"]: row["functions"] for row in rows}
        self._wires = {
            row["server_label"]: McpWire(
                ToolServer.of(row), endpoints, patience=patience, timeout_s=timeout_s, clock=clock
            )
            for row in rows
        }
        self._label_of = {
            tool["function"]["name"]: label for label, tools in self._functions.items() for tool in tools
        }
        self._outcomes = {label: Outcomes() for label in self._wires}
        self._sessions: dict[tuple[str, str], _Opening] = {}  # by episode and server

    @property
    def names(self) -> Sequence[str]:
        return list(self._label_of)

    async def call(self, call: ToolRequest) -> ToolResult:
        label = self._label_of[call.name]
        params = {"name": call.name, "arguments": json.loads(call.arguments)}
        if (size := len(json.dumps(params))) > MAX_BYTES:
            return ToolResult.of_error(f"the request is {size} bytes, more than {MAX_BYTES}", code=413)
        began = self._clock()
        try:
            session = await self._session(label, call.trace_id)
            result = await self._called(self._wires[label], session, call, params, began)
        except McpGone as gone:
            self._outcomes[label].add(label, str(gone))
            raise ToolFailed(f"the MCP server '{label}': {gone}") from None
        self._outcomes[label].add(label, "")
        return result

    async def end(self, trace_id: str) -> None:
        for key in [key for key in self._sessions if key[0] == trace_id]:
            session = self._sessions.pop(key).session
            if session is not None:
                await self._wires[key[1]].close(session)

    async def _called(
        self, wire: McpWire, session: McpSession, call: ToolRequest, params: Mapping[str, Any], began: float
    ) -> ToolResult:
        try:
            result = await wire.request(session, "tools/call", params, call.trace_id, key=call.key)
        except McpTooLong as long:
            return ToolResult.of_error(str(long), self._clock() - began, code=413)
        except McpRefused as refused:
            return ToolResult.of_error(str(refused), self._clock() - began)
        seconds = self._clock() - began
        if result.get("resultType", "complete") != "complete":
            return ToolResult.of_error(
                "the tool asks for further input, which no client can give here", seconds
            )
        error = "the tool reports an error" if result.get("isError") is True else ""
        return ToolResult(wire.server.for_model(text_of(result)), error, seconds)

    async def _session(self, label: str, trace_id: str) -> McpSession:
        """The session of the episode.

        Raises:
            McpGone: there is none.
            ToolsFail: the server has other functions than the job.
        """
        opening = self._sessions.setdefault((trace_id, label), _Opening())
        async with opening.lock:
            if opening.session is None:
                wire = self._wires[label]
                try:
                    session = await wire.open(trace_id)
                    # Known before the next request, so that `end` closes it.
                    opening.session = session
                    listed = await wire.tools(session, trace_id)
                except McpRefused as refused:
                    raise McpGone(str(refused)) from None
                self._refuse_others(label, listed)
        return opening.session

    def _refuse_others(self, label: str, listed: Sequence[Mapping[str, Any]]) -> None:
        """Raise ToolsFail if a function of the job is another one now. New ones do not matter."""
        now = {tool.get("name"): function_of(tool) for tool in listed}
        changed = [
            name for tool in self._functions[label] if now.get(name := tool["function"]["name"]) != tool
        ]
        if changed:
            raise ToolsFail.of_schemas(label, changed)


def functions_of(listed: Sequence[Mapping[str, Any]], allowed: Sequence[str] | None) -> list[dict[str, Any]]:
    """The functions of a server's tools, in OpenAI's format and the order of the server.

    Args:
        allowed: `allowed_tools` of the job; None: all.
    """
    return [function_of(tool) for tool in listed if allowed is None or tool.get("name") in allowed]


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of a server as a function in OpenAI's format."""
    described = {"description": tool["description"]} if tool.get("description") else {}
    function = {"name": tool.get("name"), **described, "parameters": tool.get("inputSchema") or {}}
    return {"type": "function", "function": function}


def text_of(result: Mapping[str, Any]) -> str:
    """The result of a call as the model reads it: its texts, or else its JSON."""
    parts = result.get("content")
    texts = [_text_of(part) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    if not texts and result.get("structuredContent") is not None:
        texts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
    return as_text("\n".join(texts))


def _text_of(part: Mapping[str, Any]) -> str:
    """A part of a result. Pictures and sounds are named, as the model cannot see or hear them."""
    if part.get("type") == "text":
        return str(part.get("text"))
    inner = part.get("resource")
    if isinstance(inner, dict) and isinstance(inner.get("text"), str):
        return str(inner["text"])
    if isinstance(part.get("uri"), str):
        return str(part["uri"])
    return f"[{str(part.get('type'))[:32]} is left out]"
