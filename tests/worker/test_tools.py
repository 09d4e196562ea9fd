"""Calls of the user's tools over HTTP: what is sent, what the model reads, and what discards an episode."""

import asyncio
import json
import runpy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graders.calls import CallRetryPolicy
from graders.endpoint import Endpoints, checked_headers
from graders.hazards import table
from graders.tools.http import HttpTools
from graders.tools.protocol import (
    MAX_BYTES,
    WINDOW,
    ToolFailed,
    ToolRequest,
    ToolResult,
    ToolsFail,
    call_problem,
)
from tests.graders.servers import Reply, ScriptedServer, Time, serving

ROW = {"messages": [], "city": "Oslo"}
SHORT_S = 0.1  # the limit of an answer that never ends
HEADERS = {"X-Api-Key": "very-secret", "X-Region": "norway"}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}


def call(number: int = 0, item: Mapping[str, Any] = ROW) -> ToolRequest:
    return ToolRequest(f"call_{number}", f"key_{number}", "search", '{"q":"rain"}', "trace_1", item)


def tools(url: str, time: Time, *, timeout_s: float = 5.0) -> HttpTools:
    patience = CallRetryPolicy(retries=3, retries_after_silence=0, sleep=time.sleep, jitter=lambda: 0.5)
    tool = {"name": "search", "server_url": f"{url}/search", "headers": HEADERS}
    endpoints = Endpoints(("127.0.0.1",))
    return HttpTools([tool], endpoints, patience=patience, timeout_s=timeout_s, clock=time.clock)


async def replied(
    *replies: Reply, calls: Sequence[ToolRequest] = (call(),)
) -> tuple[ScriptedServer, list[Any]]:
    """The server, and what becomes of the calls, one after the other."""
    server = ScriptedServer(replies)
    async with server as url:
        client = tools(url, Time())
        return server, [(await asyncio.gather(client.call(one), return_exceptions=True))[0] for one in calls]


def outcome(*replies: Reply) -> Any:
    return asyncio.run(replied(*replies))[1][0]


def test_a_call_is_sent_in_azures_format_with_the_key_of_its_repetitions() -> None:
    server, [result] = asyncio.run(replied(Reply(200, '{"output": "wet"}')))

    assert result.output == "wet"
    assert server.requests == [
        {
            "type": "function_call",
            "id": "call_0",
            "call_id": "call_0",
            "name": "search",
            "arguments": '{"q":"rain"}',
            "trace_id": "trace_1",
            "item": ROW,
        }
    ]
    assert server.headers[0]["idempotency-key"] == "key_0"
    assert server.headers[0]["x-api-key"] == "very-secret"


@pytest.mark.parametrize(
    ("reply", "output"),
    [
        (Reply(200, '{"output": {"t": 3}}'), '{"t": 3}'),
        (Reply(200, '{"output": "a\\ud800b"}'), "a?b"),
        (Reply(404, "no such page"), "no such page"),
        (Reply(422, '{"output": "say where"}'), "say where"),
        (Reply(400, "key very-secret is old"), "key *** is old"),
        (Reply(200, '{"output": "rain in norway"}'), "rain in norway"),
    ],
)
def test_the_model_reads_outputs_and_what_is_wrong_with_its_call(reply: Reply, output: str) -> None:
    assert outcome(reply).output == output


@pytest.mark.parametrize("body", ["fine", "[]", '{"output": null}', "[" * 50_000])
def test_the_model_reads_that_an_answer_has_no_output(body: str) -> None:
    result = outcome(Reply(200, body))

    assert json.loads(result.output) == {"error": {"message": result.error}}
    assert "no 'output'" in result.error


def test_the_model_reads_that_a_request_or_an_answer_is_too_large() -> None:
    server, [sent] = asyncio.run(
        replied(Reply(200, "{}"), calls=[call(item={"text": "x" * (MAX_BYTES + 1)})])
    )
    received = outcome(Reply(200, json.dumps({"output": "x" * MAX_BYTES})))

    assert server.requests == []
    assert [json.loads(one.output)["error"]["code"] for one in (sent, received)] == [413, 413]


def test_the_model_reads_that_an_answer_is_not_utf_8() -> None:
    async def ask(url: str) -> ToolResult:
        return await tools(url, Time()).call(call())

    with serving(lambda path, body: (200, b'{"output": "\xff"}')) as url:
        result = asyncio.run(ask(url))

    assert "not UTF-8" in result.error


@pytest.mark.parametrize("status", [500, 503, 302])
def test_a_server_that_fails_discards_the_episode_and_quotes_no_secret(status: int) -> None:
    server, [failed] = asyncio.run(replied(Reply(status, "very-secret", {"location": "http://10.0.0.1/"})))

    assert isinstance(failed, ToolFailed)
    assert str(failed) == f"HTTP {status}: '***'"
    assert len(server.requests) == (1 if status == 302 else 4)
    assert {request["id"] for request in server.requests} == {"call_0"}


def test_a_failure_with_a_long_body_is_a_failure() -> None:
    server, [failed] = asyncio.run(replied(Reply(500, "x" * (MAX_BYTES + 1))))

    assert isinstance(failed, ToolFailed)
    assert str(failed).startswith("HTTP 500: ")
    assert len(server.requests) == 4


def test_the_reason_of_a_header_that_cannot_be_sent_is_without_its_value() -> None:
    async def ask() -> ToolResult:
        async with ScriptedServer([Reply(200, "{}")]) as url:
            tool = {"name": "search", "server_url": url, "headers": {"X-Api-Key": "topsecret\t"}}
            return await HttpTools([tool], Endpoints(("127.0.0.1",))).call(call())

    with pytest.raises(ToolFailed) as failed:
        asyncio.run(ask())

    assert str(failed.value) == "no answer: a header cannot be sent"


@pytest.mark.parametrize("value", ["topsecret\t", " topsecret", "topsecret "])
def test_a_header_with_space_around_its_value_is_refused_without_quoting_it(value: str) -> None:
    with pytest.raises(ValueError, match="without spaces around it") as refused:
        checked_headers({"X-Api-Key": value})

    assert "topsecret" not in str(refused.value)


@pytest.mark.parametrize("name", ["Accept-Encoding", "Expect", "TE", "Upgrade"])
def test_headers_that_change_how_a_request_is_sent_are_reserved(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be set"):
        checked_headers({name: "x"})


def test_a_server_that_recovers_within_three_retries_discards_nothing() -> None:
    down = Reply(500, "")

    assert outcome(down, down, down, Reply(200, '{"output": "1"}')).output == "1"


def test_an_answer_that_drips_is_ended_at_its_limit() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

    async def ask() -> ToolResult:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await tools(url, Time(), timeout_s=SHORT_S).call(call())

    with pytest.raises(ToolFailed, match="no response within"):
        asyncio.run(ask())


def test_a_tool_of_which_most_calls_fail_pauses_the_job_with_its_evidence() -> None:
    good, bad = Reply(200, '{"output": ""}'), Reply(302, "moved")
    half = WINDOW // 2
    calls = [call(number) for number in range(WINDOW + 1)]
    _, results = asyncio.run(replied(*[good] * half, *[bad] * (half + 1), calls=calls))

    assert [type(one) for one in results[:-1]] == [ToolResult] * half + [ToolFailed] * half
    paused = results[-1]
    assert isinstance(paused, ToolsFail)
    assert "33 of the newest 64 calls of the tool 'search' failed" in str(paused)
    assert paused.data["reasons"] == ["HTTP 302: 'moved'"] * 8


def test_requests_to_one_tool_start_at_most_fifty_times_a_second() -> None:
    async def ask() -> Time:
        time, server = Time(), ScriptedServer([Reply(200, '{"output": ""}')])
        async with server as url:
            client = tools(url, time)
            for number in range(3):
                await client.call(call(number))
        return time

    assert asyncio.run(ask()).now == pytest.approx(2 / 50)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("search", '{"q": "x"}', ""),
        ("find", "{}", "there is no function 'find'; there are search"),
        ("search", "{", "the arguments are not JSON"),
        ("search", '{"q": NaN}', "the arguments are not JSON"),
        ("search", '["x"]', "the arguments are not a JSON object"),
        ("search", "{}", "the arguments do not fit the schema: 'q' is a required property"),
    ],
)
def test_a_call_that_does_not_fit_its_function_has_a_problem(name: str, arguments: str, problem: str) -> None:
    assert asyncio.run(call_problem(name, arguments, [SEARCH])) == problem


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"q": {"type": "dict"}}}, "'dict' is no type of JSON schemas"),
        ({"properties": {"q": {"pattern": "\\p{L}+"}}}, "bad escape"),
    ],
)
def test_the_model_reads_that_a_schema_cannot_be_applied_to_its_call(
    schema: Mapping[str, Any], problem: str
) -> None:
    function = {"type": "function", "function": {"name": "search", "parameters": schema}}

    assert problem in asyncio.run(call_problem("search", '{"q": "x"}', [function]))


def test_the_model_reads_that_its_call_cannot_be_checked_while_the_checks_fail() -> None:
    broken = replace(table.ITEMS, name="broken", function="core.evals.schemas:schema_problem", warm_up=())

    problem = asyncio.run(call_problem("search", '{"q": "x"}', [SEARCH], broken))

    assert problem.startswith("the arguments cannot be checked: broken: ")


def test_the_tool_of_the_example_says_the_digits_of_its_rows() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/digit_tool.py"))

    for drawer, row in enumerate(example["rows"]()):
        said = example["output_of"]({"arguments": json.dumps({"drawer": float(drawer)}), "item": row})
        assert said == f"The digit in drawer {drawer} is {row['digit']}."
