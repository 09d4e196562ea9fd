"""MCP servers of the reference implementation, which speaks both revisions of the protocol."""

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOKUP: dict[str, Any] = {
    "type": "object",
    "properties": {"drawer": {"type": "integer"}},
    "required": ["drawer"],
}
TOOLS: Mapping[str, dict[str, Any]] = {
    "lookup": LOOKUP,
    "broken": {"type": "object"},
    "trace": {"type": "object"},
    "large": {"type": "object"},
}
Context = ServerRequestContext[Any, Any]


@dataclass
class Drawers:
    """A server whose tools look into a drawer, fail, tell the episode, and say more than is read."""

    tools: Mapping[str, dict[str, Any]] = field(default_factory=lambda: dict(TOOLS))
    page: int = 2  # tools of one page of the list

    def server(self) -> Server[Any]:
        return Server[Any]("drawers", on_list_tools=self.listed, on_call_tool=self.called)

    async def listed(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        first = 0 if params is None or params.cursor is None else int(params.cursor)
        names = list(self.tools)
        return types.ListToolsResult(
            tools=[
                types.Tool(name=name, description=f"{name} of a drawer", input_schema=self.tools[name])
                for name in names[first : first + self.page]
            ],
            next_cursor=str(first + self.page) if first + self.page < len(names) else None,
        )

    async def called(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        said = _said(params.name, params.arguments or {}, dict(context.meta or {}))
        parts: Sequence[types.ContentBlock] = [types.TextContent(type="text", text=said)]
        return types.CallToolResult(content=list(parts), is_error=params.name == "broken")


def _said(tool: str, arguments: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    if tool == "lookup":
        return f"the digit is {7 * arguments['drawer'] % 10}"
    return {"broken": "the drawer is stuck", "large": "x" * 1_100_000}.get(tool) or str(meta.get("trace_id"))


@dataclass
class Requests:
    """An ASGI application before a server: notes the requests, and may refuse those of the newer revision."""

    app: ASGIApp
    has_sessions: bool
    methods: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)  # sessions
    ended: set[str] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.methods.append(scope["method"])
        self.headers.append(headers)
        if scope["method"] == "DELETE":
            self.ended.add(headers["mcp-session-id"])
        if self.has_sessions and headers.get("mcp-protocol-version") == "2026-07-28":
            await send({"type": "http.response.start", "status": 400, "headers": []})
            return await send({"type": "http.response.body", "body": b"Bad Request: no session"})

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = [value for name, value in message["headers"] if name == b"mcp-session-id"]
                self.begun |= {value.decode() for value in named}
            await send(message)

        return await self.app(scope, receive, noting)


@contextmanager
def serving_mcp(
    drawers: Drawers | None = None, *, has_sessions: bool = False
) -> Iterator[tuple[str, Requests]]:
    """The address of a server in a thread of its own, and what it was asked for.

    Args:
        has_sessions: whether it speaks 2025-11-25 only.
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # so that requests wait until the server is there
        port = listening.getsockname()[1]
        app = Requests((drawers or Drawers()).server().streamable_http_app(), has_sessions)
        config = uvicorn.Config(app, log_level="error", lifespan="on", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/mcp", app
        finally:
            server.should_exit = True
            thread.join()
