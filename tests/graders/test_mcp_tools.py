"""Tools of MCP servers of both revisions: sessions, what the model reads, and what discards an episode."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from graders.calls import CallRetryPolicy
from graders.endpoint import Endpoints
from graders.tools.mcp import McpTools, function_of, functions_of, text_of
from graders.tools.mcp_wire import McpGone, McpSession, McpWire
from graders.tools.protocol import ToolFailed, ToolRequest, ToolResult, ToolsFail
from graders.tools.server import ToolServer
from tests.graders.mcp_servers import TOOLS, Drawers, serving_mcp
from tests.graders.servers import Reply, ScriptedServer, Time, serving

LOCAL = Endpoints(("127.0.0.1",))
FUNCTIONS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"{name} of a drawer", "parameters": schema},
    }
    for name, schema in TOOLS.items()
]
BOTH = pytest.mark.parametrize("has_sessions", [False, True], ids=["2026-07-28", "2025-11-25"])


def tools(url: str, endpoints: Endpoints = LOCAL) -> McpTools:
    time = Time()
    patience = CallRetryPolicy(retries=1, retries_after_silence=0, sleep=time.sleep, jitter=lambda: 0.5)
    row = {
        "type": "mcp",
        "server_label": "drawers",
        "server_url": url,
        "headers": {"X-Api-Key": "very-secret"},
        "functions": FUNCTIONS,
    }
    return McpTools([row], endpoints, patience=patience, timeout_s=30.0, clock=time.clock)


def call(name: str, trace: str = "trace_1", **arguments: Any) -> ToolRequest:
    return ToolRequest("c", f"key-{name}", name, json.dumps(arguments), trace, {})


def outcome(url: str, *calls: ToolRequest) -> list[Any]:
    """What becomes of the calls, one after the other, before their episodes end."""

    async def run() -> list[Any]:
        mcp = tools(url)
        results = [(await asyncio.gather(mcp.call(one), return_exceptions=True))[0] for one in calls]
        for trace in {one.trace_id for one in calls}:
            await mcp.end(trace)
        return results

    return asyncio.run(run())


@BOTH
def test_the_model_reads_the_texts_of_results_and_the_errors_of_tools(has_sessions: bool) -> None:
    with serving_mcp(has_sessions=has_sessions) as (url, requests):
        found, failed = outcome(url, call("lookup", drawer=3), call("broken"))

    assert (found.output, found.error) == ("the digit is 1", "")
    assert (failed.output, failed.error) == ("the drawer is stuck", "the tool reports an error")
    assert all(sent["x-api-key"] == "very-secret" for sent in requests.headers)
    assert requests.headers[-1 - has_sessions]["idempotency-key"] == "key-broken"


@BOTH
def test_a_server_gets_the_id_of_the_episode(has_sessions: bool) -> None:
    with serving_mcp(has_sessions=has_sessions) as (url, _):
        results = outcome(url, call("trace", "trace_a"), call("trace", "trace_b"))

    assert [result.output for result in results] == ["trace_a", "trace_b"]


def test_an_older_server_has_a_session_for_each_episode_which_ends_with_it() -> None:
    with serving_mcp(has_sessions=True) as (url, requests):
        outcome(url, call("trace", "trace_a"), call("trace", "trace_a"), call("trace", "trace_b"))

    assert len(requests.begun) == 2
    assert requests.ended == requests.begun


def test_a_newer_server_has_no_sessions() -> None:
    with serving_mcp() as (url, requests):
        outcome(url, call("trace"))

    assert requests.begun == set()
    assert set(requests.methods) == {"POST"}
    assert {sent["mcp-protocol-version"] for sent in requests.headers} == {"2026-07-28"}
    assert requests.headers[-1]["mcp-name"] == "trace"


def test_calls_of_one_answer_share_the_session_of_their_episode() -> None:
    async def both(url: str) -> tuple[ToolResult, ToolResult]:
        mcp = tools(url)
        results = await asyncio.gather(mcp.call(call("lookup", drawer=1)), mcp.call(call("lookup", drawer=2)))
        await mcp.end("trace_1")
        return results

    with serving_mcp(has_sessions=True) as (url, requests):
        first, second = asyncio.run(both(url))

    assert (first.output, second.output) == ("the digit is 7", "the digit is 4")
    assert len(requests.begun) == 1


@BOTH
def test_an_answer_of_more_than_a_megabyte_is_shown_as_413(has_sessions: bool) -> None:
    with serving_mcp(has_sessions=has_sessions) as (url, _):
        [result] = outcome(url, call("large"))

    assert json.loads(result.output)["error"]["code"] == 413


@BOTH
def test_a_server_that_has_changed_a_schema_pauses_the_job(has_sessions: bool) -> None:
    changed = Drawers({**TOOLS, "lookup": {"type": "object", "properties": {"door": {"type": "integer"}}}})
    with serving_mcp(changed, has_sessions=has_sessions) as (url, _):
        [result] = outcome(url, call("trace"))

    assert isinstance(result, ToolsFail)
    assert str(result).startswith("The MCP server 'drawers' has changed lookup since the job was created.")


def test_a_server_with_further_tools_is_the_same() -> None:
    with serving_mcp(Drawers({**TOOLS, "new": {"type": "object"}})) as (url, _):
        [result] = outcome(url, call("lookup", drawer=3))

    assert result.output == "the digit is 1"


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (500, "very-secret", "HTTP 500"),
        (302, "", "HTTP 302"),
        (200, "<html>very-secret", "no response of JSON-RPC"),
        (200, '{"result": {"protocolVersion": "1999-01-01"}}', "the revision '1999-01-01'"),
        (401, "very-secret", "HTTP 401"),
    ],
)
def test_a_server_without_a_session_discards_the_episode(status: int, text: str, reason: str) -> None:
    with serving(lambda path, sent: (status, text)) as url:
        [failed] = outcome(url, call("lookup", drawer=3))

    assert isinstance(failed, ToolFailed)
    assert reason in str(failed)
    assert "very-secret" not in str(failed)


@pytest.mark.parametrize("status", [401, 403, 429, 503])
def test_a_refusal_that_does_not_tell_the_revision_is_no_older_server(status: int) -> None:
    asked: list[str] = []

    def answer(path: str, sent: Any) -> tuple[int, str]:
        asked.append(sent["method"])
        return status, '{"error": {"message": "no"}}'

    with serving(answer) as url:
        [discarded] = outcome(url, call("lookup", drawer=3))

    assert isinstance(discarded, ToolFailed)
    assert set(asked) == {"server/discover"}


class Closing:
    """An older server on a socket whose answer to DELETE never ends, and that may refuse to be initialized."""

    def __init__(self, initialized: int = 202) -> None:
        self.initialized = initialized
        self.ended: list[str] = []  # the sessions
        self.sent = 0  # chunks of the answers to DELETE

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        with suppress(ConnectionError):
            if head.startswith("delete"):
                self.ended += re.findall(r"mcp-session-id: (\w+)", head)
                writer.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n")
                while not writer.is_closing():
                    writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                    await writer.drain()
                    self.sent += 1
            length = int(re.findall(r"content-length: (\d+)", head)[0])
            method = json.loads(await reader.readexactly(length))["method"]
            status, body = self.answer(method)
            said = f"HTTP/1.1 {status} X\r\nconnection: close\r\nmcp-session-id: s1\r\n"
            writer.write(f"{said}content-length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
        writer.close()

    def answer(self, method: str) -> tuple[int, str]:
        if method == "initialize":
            return 200, '{"result": {"protocolVersion": "2025-11-25"}}'
        return (400, "") if method == "server/discover" else (self.initialized, "")


def opened(server: Closing) -> list[Any]:
    """The sessions that were opened, and closed again; or the error."""

    async def run() -> list[Any]:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            patience = CallRetryPolicy(retries=0, sleep=Time().sleep)
            wire = McpWire(ToolServer(url, {}), LOCAL, patience=patience)
            [session] = await asyncio.gather(wire.open(), return_exceptions=True)
            if isinstance(session, McpSession):
                await wire.close(session)
            return [session]

    return asyncio.run(run())


def test_an_endless_answer_to_the_end_of_a_session_is_not_read() -> None:
    server = Closing()

    [session] = opened(server)

    assert server.ended == [session.id]
    assert server.sent < 1000  # what fits into the buffers of the connection


def test_a_session_whose_beginning_fails_is_ended() -> None:
    server = Closing(initialized=302_000)  # no status, so there is no answer

    [error] = opened(server)

    assert isinstance(error, McpGone)
    assert server.ended == ["s1"]


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ({"tools": [{"name": ["a"]}]}, "its list of tools is not one"),
        ({"tools": [{}]}, "its list of tools is not one"),
        ({"tools": [{"name": f"t{n}"} for n in range(600)], "nextCursor": "more"}, "more than 1,024 tools"),
    ],
)
def test_a_list_of_tools_that_is_none_or_too_long_is_refused(page: dict[str, Any], reason: str) -> None:
    asked: list[str] = []

    def answer(path: str, sent: Any) -> tuple[int, str]:
        asked.append(sent["method"])
        listing = sent["method"] == "tools/list"
        return 200, json.dumps({"result": page if listing else {"supportedVersions": ["2026-07-28"]}})

    with serving(answer) as url, pytest.raises(McpGone, match=reason):
        asyncio.run(read(url))

    assert asked.count("tools/list") <= 2


def test_a_revision_with_a_secret_is_quoted_without_it() -> None:
    said = '{"result": {"protocolVersion": "very-secret"}}'
    with serving(lambda path, sent: (200, said)) as url:
        [discarded] = outcome(url, call("lookup", drawer=3))

    assert "the revision" in str(discarded)
    assert "very-secret" not in str(discarded)


def test_a_session_that_the_server_has_lost_discards_the_episode() -> None:
    async def run(url: str, forget: Callable[[], Awaitable[None]]) -> None:
        mcp = tools(url)
        await mcp.call(call("lookup", drawer=3))
        await forget()
        with pytest.raises(ToolFailed, match="it has ended the session"):
            await mcp.call(call("lookup", drawer=3))

    with serving_mcp(has_sessions=True) as (url, requests):

        async def forget() -> None:
            async with LOCAL.connect() as client:
                [session] = requests.begun
                await client.delete(url, headers={"mcp-session-id": session})

        asyncio.run(run(url, forget))


def test_the_response_in_a_stream_of_events_is_read() -> None:
    note, listed = '{"method": "notifications/message"}', '{"result": {"tools": []}}'
    events = f"event: message\r\ndata: {note}\r\n\r\ndata: {listed}\r\n\r\n"
    server = ScriptedServer(
        [Reply(200, '{"result": {"supportedVersions": ["2026-07-28"]}}'), Reply(200, events)]
    )

    async def run() -> list[dict[str, Any]]:
        async with server as url:
            wire = McpWire(ToolServer(url, {}), LOCAL)
            return await wire.tools(await wire.open())

    assert asyncio.run(run()) == []


def test_a_host_that_the_operator_does_not_allow_is_not_called() -> None:
    private = Endpoints(("tools.example",), resolve=lambda host: ["10.0.0.1"])
    wire = McpWire(ToolServer("https://tools.example/mcp", {}), private)

    with pytest.raises(McpGone, match="not on the public internet"):
        asyncio.run(wire.open())


def test_only_allowed_tools_become_functions() -> None:
    listed: list[dict[str, Any]] = [{"name": "a", "inputSchema": {"type": "object"}}, {"name": "b"}]

    assert functions_of(listed, ["b"]) == [function_of({"name": "b"})]
    assert function_of({"name": "b"})["function"] == {"name": "b", "parameters": {}}


def test_parts_of_a_result_that_are_no_texts_are_named() -> None:
    parts = [
        {"type": "text", "text": "a\ud800"},
        {"type": "image", "data": "..."},
        {"type": "resource", "resource": {"uri": "x:y", "text": "inner"}},
        {"type": "resource_link", "uri": "x:z"},
    ]

    assert text_of({"content": parts}) == "a?\n[image is left out]\ninner\nx:z"
    assert text_of({"content": [], "structuredContent": {"n": 1}}) == '{"n": 1}'


def test_the_example_is_a_server_whose_tools_are_called() -> None:
    example = Path(__file__).parents[2] / "examples/mcp_tools.py"
    command = [sys.executable, str(example), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            [port] = next(
                found for line in process.stderr if (found := re.findall(r"127\.0\.0\.1:(\d+)", line))
            )
            functions = asyncio.run(read(f"http://127.0.0.1:{port}/mcp"))
        finally:
            process.kill()

    assert [one["function"]["name"] for one in functions] == ["lookup"]


async def read(url: str) -> list[dict[str, Any]]:
    """The functions of a server."""
    wire = McpWire(ToolServer(url, {}), LOCAL)
    session = await wire.open()
    try:
        return functions_of(await wire.tools(session), None)
    finally:
        await wire.close(session)
