"""Tools on the user's web server, in Azure's format (docs/howto/agents.md)."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.masking import hide_in_error, mask_values, secrets_of, secrets_of_headers
from graders.calls import AnswerTooLong, CallRetryPolicy, NoAnswer, RateLimit, Reply, post, quoted_reply
from graders.endpoint import Endpoints
from graders.tools.protocol import (
    MAX_BYTES,
    PATIENCE,
    PER_SECOND,
    TIMEOUT_S,
    Outcomes,
    ToolFailed,
    ToolRequest,
    ToolResult,
)


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


class HttpTools:
    """Implements ToolsOfOneKind: a POST for each call, which may be repeated with the same `Idempotency-Key`."""

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
        self._outcomes = {name: Outcomes() for name in self._tools}

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]], endpoints: Endpoints | None) -> "HttpTools":
        """`rows`: tools of a job, whose servers this installation calls."""
        assert endpoints is not None, "url_problem refuses such tools"
        return cls([HttpTool.of(row) for row in rows], endpoints)

    @property
    def names(self) -> Sequence[str]:
        return list(self._tools)

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

    async def end(self, trace_id: str) -> None:
        """Calls of an episode have nothing in common on this side."""

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
