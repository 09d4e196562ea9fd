"""Tools on the user's web server, in Azure's format (docs/howto/agents.md)."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graders.calls import AnswerTooLong, CallRetryPolicy, NoAnswer, RateLimit, Reply, post
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
    as_text,
)
from graders.tools.server import ToolServer


class HttpTools:
    """Implements ToolsOfOneKind: a POST for each call, which may be repeated with the same `Idempotency-Key`."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        endpoints: Endpoints,
        *,
        patience: CallRetryPolicy = PATIENCE,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        rows: tools of a job.
        endpoints: the hosts that the operator allows, and the HTTP client that checks their addresses.
        """
        self._servers = {row["name"]: ToolServer.of(row) for row in rows}
        self._endpoints, self._patience, self._timeout_s, self._clock = endpoints, patience, timeout_s, clock
        self._pace = {name: RateLimit(PER_SECOND, patience.sleep, clock) for name in self._servers}
        self._outcomes = {name: Outcomes() for name in self._servers}

    @property
    def names(self) -> Sequence[str]:
        return list(self._servers)

    async def call(self, call: ToolRequest) -> ToolResult:
        server, body = self._servers[call.name], call.body()
        if len(body) > MAX_BYTES:
            return ToolResult.of_error(f"the request is {len(body)} bytes, more than {MAX_BYTES}", code=413)
        began = self._clock()
        try:
            result = self._result(server, await self._post(server, call, body), began)
        except ToolFailed as failed:
            self._outcomes[call.name].add(call.name, str(failed))
            raise
        self._outcomes[call.name].add(call.name, "")
        return result

    async def end(self, trace_id: str) -> None:
        """Calls of an episode have nothing in common on this side."""

    async def _post(self, server: ToolServer, call: ToolRequest, body: bytes) -> Reply | AnswerTooLong:
        """Raises ToolFailed: there was no answer."""
        try:
            async with self._endpoints.connect() as client:
                return await post(
                    client,
                    server.url,
                    body,
                    {**server.headers, "idempotency-key": call.key},
                    patience=self._patience,
                    pace=self._pace[call.name],
                    timeout_s=self._timeout_s,
                    max_bytes=MAX_BYTES,
                )
        except AnswerTooLong as long:
            return long
        except NoAnswer as silence:
            raise ToolFailed(server.no_answer(silence)) from None

    def _result(self, server: ToolServer, reply: Reply | AnswerTooLong, began: float) -> ToolResult:
        seconds = self._clock() - began
        if isinstance(reply, AnswerTooLong):
            return ToolResult.of_error(str(reply), seconds, code=413)
        if not reply.ok and not 400 <= reply.status < 500:
            raise ToolFailed(f"HTTP {reply.status}: {server.quoted(reply.text)}")
        output = _output(reply.text)
        if not reply.is_utf8:
            return ToolResult.of_error("the answer of the tool is not UTF-8", seconds)
        if output is not None:
            return ToolResult(server.for_model(output), "" if reply.ok else f"HTTP {reply.status}", seconds)
        if not reply.ok:
            return ToolResult(server.for_model(reply.text), f"HTTP {reply.status}", seconds)
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
    return as_text(output if isinstance(output, str) else json.dumps(output, ensure_ascii=False))
