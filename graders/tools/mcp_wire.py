"""Requests to an MCP server over streamable HTTP, in the revisions 2026-07-28 and 2025-11-25 of the protocol.

A server of 2026-07-28 has no sessions: each request has all that it needs in `_meta`. An older one has a session, which
`open` begins and `close` ends. https://modelcontextprotocol.io/specification
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx

from core.outbound.http import UrlNotAllowed, is_passing
from graders.calls import (
    AnswerTooLong,
    CallRetryPolicy,
    NoAnswer,
    RateLimit,
    Reply,
    post,
)
from graders.endpoint import Endpoints
from graders.tools.protocol import MAX_BYTES, PATIENCE, PER_SECOND, TIMEOUT_S
from graders.tools.server import ToolServer

STATELESS = "2026-07-28"
WITH_SESSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")  # calls of tools are the same in these
CLOSE_S = 10.0
MAX_PAGES = 100
MAX_LISTED = 1024  # tools on all pages: each page may have a megabyte
CLIENT = {"name": "regraft", "version": "1"}
META = "io.modelcontextprotocol/"


# The answers of a server that does not know the method or the revision. Others, such as 401, say nothing of either.
_OF_OLDER = (400, 404, 405, 415)


class McpRefused(Exception):
    """The server has refused a request; the message may be shown to the model."""

    def __init__(self, message: str, status: int) -> None:
        """`status`: of the HTTP response, which may be 200 for an error of JSON-RPC."""
        super().__init__(message)
        self.status = status


class McpTooLong(McpRefused):
    """The answer has more bytes than are read."""


class McpGone(Exception):
    """The server gave no answer to a request, or none that can be read."""


class McpUnusable(McpGone):
    """The server has answered, and not as a server that is supported here. It does not pass by itself."""


@dataclass(frozen=True)
class McpSession:
    """What requests to a server have in common: the revision, and the id of the session of an older one."""

    revision: str
    id: str | None = None

    @property
    def is_stateless(self) -> bool:
        return self.revision == STATELESS

    def headers(self, method: str, name: str | None) -> dict[str, str]:
        sent = {"mcp-protocol-version": self.revision}
        if self.is_stateless:
            sent["mcp-method"] = method
            if name is not None:
                sent["mcp-name"] = name
        elif self.id is not None:
            sent["mcp-session-id"] = self.id
        return sent

    def meta(self, trace_id: str) -> dict[str, Any]:
        """`_meta` of a request. `trace_id`: of the episode; "": there is none."""
        own: dict[str, Any] = {"trace_id": trace_id} if trace_id else {}
        if not self.is_stateless:
            return own
        return own | {
            f"{META}protocolVersion": self.revision,
            f"{META}clientInfo": CLIENT,
            f"{META}clientCapabilities": {},
        }


class McpWire:
    """Sends requests to one server."""

    def __init__(
        self,
        server: ToolServer,
        endpoints: Endpoints,
        *,
        patience: CallRetryPolicy = PATIENCE,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`endpoints`: the hosts that the operator allows, and the HTTP client that checks their addresses."""
        self.server = server
        self._endpoints, self._patience, self._timeout_s = endpoints, patience, timeout_s
        self._pace = RateLimit(PER_SECOND, patience.sleep, clock)
        self._numbers = count(1)
        self._is_stateless: bool | None = None  # not known yet

    async def open(self, trace_id: str = "") -> McpSession:
        """Agree on a revision, and begin a session with a server that has sessions.

        Raises:
            McpGone, McpRefused: there is no session.
        """
        if self._is_stateless is None:
            self._is_stateless = await self._discover()
        if self._is_stateless:
            return McpSession(STATELESS)
        asked = {"protocolVersion": WITH_SESSIONS[0], "capabilities": {}, "clientInfo": CLIENT}
        reply = await self._post(self._request("initialize", asked), {})
        agreed = self._result(reply).get("protocolVersion")
        if agreed not in WITH_SESSIONS:
            revision = self.server.quoted(str(agreed)[:64])
            raise McpUnusable(f"it speaks the revision {revision} of MCP, which is not supported")
        session = McpSession(str(agreed), reply.headers.get("mcp-session-id"))
        told = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        try:
            await self._post(told, session.headers("notifications/initialized", None))
        except BaseException:  # also cancelled: no other caller knows the session
            await self.close(session)
            raise
        return session

    async def close(self, session: McpSession) -> None:
        """End a session. It is a courtesy to the server, so a failure raises nothing."""
        if session.id is None:
            return
        headers = {**self.server.headers, **session.headers("", None)}
        with suppress(TimeoutError, httpx.HTTPError, httpx.InvalidURL, UrlNotAllowed, UnicodeError):
            async with asyncio.timeout(CLOSE_S), self._endpoints.connect() as client:
                # Streamed, because the body may be of any length and is not needed.
                answer = await client.send(
                    client.build_request("DELETE", self.server.url, headers=headers), stream=True
                )
                await answer.aclose()

    async def tools(self, session: McpSession, trace_id: str = "") -> list[dict[str, Any]]:
        """All tools of the server, as it lists them. Each has a text as its name. Raises McpGone and McpRefused."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = await self.request(session, "tools/list", cursor, trace_id)
            tools = page.get("tools")
            if not isinstance(tools, list) or not all(map(_has_name, tools)):
                raise McpUnusable("its list of tools is not one")
            found += tools
            if len(found) > MAX_LISTED:
                raise McpUnusable(f"it has more than {MAX_LISTED:,} tools")
            if not isinstance(page.get("nextCursor"), str):
                return found
            cursor = {"cursor": page["nextCursor"]}
        raise McpUnusable(f"its list of tools has more than {MAX_PAGES} pages")

    async def request(
        self,
        session: McpSession,
        method: str,
        params: Mapping[str, Any],
        trace_id: str = "",
        *,
        key: str = "",
    ) -> dict[str, Any]:
        """The result of a request.

        Args:
            key: the `Idempotency-Key` of a call, which may be repeated.

        Raises:
            McpRefused: the server answers with an error.
            McpTooLong: the answer is longer than MAX_BYTES.
            McpGone: it does not answer.
        """
        sent = self._request(method, {**params, "_meta": session.meta(trace_id)})
        headers = session.headers(method, params.get("name"))
        if key:
            headers["idempotency-key"] = key
        reply = await self._post(sent, headers)
        if reply.status == 404 and session.id is not None:
            raise McpGone("it has ended the session")
        return self._result(reply)

    async def _discover(self) -> bool:
        """Whether the server speaks 2026-07-28. Older ones refuse the request, each in its way.

        Raises:
            McpGone, McpRefused: the answer does not tell, such as that to a client without the right key.
        """
        session = McpSession(STATELESS)
        try:
            found = await self.request(session, "server/discover", {})
        except McpRefused as refused:
            if refused.status in _OF_OLDER or 200 <= refused.status < 300:
                return False
            if is_passing(refused.status):
                raise McpGone(str(refused)) from None
            raise
        versions = found.get("supportedVersions")
        return isinstance(versions, list) and STATELESS in versions

    def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": dict(params)}

    async def _post(self, message: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
        """Raises McpGone: there was no answer. McpTooLong: a longer one than is read."""
        sent = {**self.server.headers, **headers, "accept": "application/json, text/event-stream"}
        try:
            async with self._endpoints.connect() as client:
                return await post(
                    client,
                    self.server.url,
                    json.dumps(message).encode(),
                    sent,
                    patience=self._patience,
                    pace=self._pace,
                    timeout_s=self._timeout_s,
                    max_bytes=MAX_BYTES,
                )
        except AnswerTooLong as long:
            raise McpTooLong(str(long), 413) from None
        except NoAnswer as silence:
            raise McpGone(self.server.no_answer(silence)) from None

    def _result(self, reply: Reply) -> dict[str, Any]:
        message = _message(reply.text)
        if message is not None and isinstance(error := message.get("error"), dict):
            raise McpRefused(self.server.quoted(str(error.get("message"))), reply.status)
        if not reply.ok and 400 <= reply.status < 500:
            raise McpRefused(f"HTTP {reply.status}: {self.server.quoted(reply.text)}", reply.status)
        if not reply.ok:
            kind = McpGone if reply.status >= 500 else McpUnusable
            raise kind(f"HTTP {reply.status}: {self.server.quoted(reply.text)}")
        result = None if message is None else message.get("result")
        if not isinstance(result, dict):
            raise McpUnusable(f"the answer is no response of JSON-RPC: {self.server.quoted(reply.text)}")
        return result


def _has_name(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("name"), str)


def _message(text: str) -> dict[str, Any] | None:
    """The response of JSON-RPC in a body, which is JSON or a stream of events; None: there is none."""
    for data in [text, *_events(text)]:
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            continue
        if isinstance(message, dict) and ("result" in message or "error" in message):
            return message
    return None


def _events(text: str) -> list[str]:
    """The data of each server-sent event."""
    blocks = text.replace("\r\n", "\n").split("\n\n")
    return [
        "\n".join(line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
        for block in blocks
    ]
