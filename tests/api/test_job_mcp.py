"""Jobs with the tools of an MCP server, whose functions the API reads when the job is created."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from core.database.tables import Job
from tests.api.conftest import House
from tests.api.test_job_python_tools import nested
from tests.api.test_jobs import INSIDE, JOBS, allowing_tools, error, tool
from tests.graders.mcp_servers import LOOKUP, Drawers, Requests, serving_mcp
from tests.graders.servers import serving


@pytest.fixture(params=[False, True], ids=["2026-07-28", "2025-11-25"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Requests]]:
    with serving_mcp(has_sessions=request.param) as served:
        yield served


def mcp(url: str, **changed: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "drawers", "server_url": url} | changed


def test_a_job_stores_and_shows_the_functions_of_its_mcp_server(
    house: House, create_job: Callable[..., dict[str, Any]], server: tuple[str, Requests]
) -> None:
    url, requests = server
    allowing_tools(house, "127.0.0.1")
    asked = mcp(url, allowed_tools=["lookup"], require_approval="never", headers={"X-Key": "secret"})

    [shown] = create_job(reinforcement={"tools": [asked]})["method"]["reinforcement"]["tools"]

    function = {"name": "lookup", "description": "lookup of a drawer", "parameters": LOOKUP}
    assert shown["functions"] == [{"type": "function", "function": function}]
    assert shown["headers"] == {"X-Key": "***"}
    assert requests.begun == requests.ended
    with house.database.read() as session:
        [stored] = session.scalars(select(Job)).one().body["tools"]
    assert stored == shown | {"headers": {"X-Key": "secret"}}


def test_functions_in_a_request_have_no_effect(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    allowing_tools(house, "127.0.0.1")
    with serving_mcp() as (url, _):
        made = create_job(reinforcement={"tools": [mcp(url, functions=[{"name": "forged"}])]})

    names = [one["function"]["name"] for one in made["method"]["reinforcement"]["tools"][0]["functions"]]
    assert names == ["lookup", "broken", "trace", "large"]  # of both pages


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"allowed_tools": ["lookup", "gone"]}, "tools[0].allowed_tools"),
        ({"allowed_tools": []}, "tools[0].allowed_tools"),
        ({"server_url": "https://elsewhere.example/x"}, "tools[0].server_url"),
        ({"server_url": "https://10.0.0.1/mcp"}, "tools[0].server_url"),
        ({"server_url": "http://a.example/mcp"}, "tools[0].server_url"),
        ({"headers": {"Mcp-Session-Id": "very-secret"}}, "tools[0].headers"),
        ({"headers": {"Accept": "very-secret"}}, "tools[0].headers"),
        ({"headers": {"X": "***"}}, "tools[0].headers.X"),
        ({"require_approval": "always"}, "tools[0].require_approval"),
        ({"server_label": "two words"}, "tools[0].server_label"),
        ({"name": "x"}, "tools[0].name"),
    ],
)
def test_a_server_that_is_refused_is_named_and_its_secrets_are_not_quoted(
    api: TestClient,
    house: House,
    job_request: Callable[..., dict[str, Any]],
    changed: dict[str, Any],
    where: str,
) -> None:
    allowing_tools(house, "127.0.0.1", "10.0.0.*")
    with serving_mcp() as (url, _):
        answer = api.post(JOBS, json=job_request(reinforcement={"tools": [mcp(url, **changed)]}))

    assert error(answer)[0] == f"{INSIDE}.{where}"
    assert "very-secret" not in answer.text


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ({"has.dot": {"type": "object"}}, "must be 1 to 64 letters"),
        ({}, "has no tools"),
        ({"a": {"type": "object", "properties": {"b": {"x-mcp-header": "B"}}}}, "x-mcp-header"),
        ({"a": {"type": "object", "properties": {"b": {"type": "nothing"}}}}, "a is not a JSON schema"),
        ({"a": {"type": "object", "default": nested(64)}}, "in more than 64 levels"),
        ({f"t{n}": {"type": "object", "title": "x" * 90_000} for n in range(3)}, "at most 262,144"),
    ],
)
def test_tools_that_a_model_cannot_have_are_refused(
    api: TestClient,
    house: House,
    job_request: Callable[..., dict[str, Any]],
    tools: dict[str, dict[str, Any]],
    problem: str,
) -> None:
    allowing_tools(house, "127.0.0.1")
    with serving_mcp(Drawers(tools)) as (url, _):
        answer = api.post(JOBS, json=job_request(reinforcement={"tools": [mcp(url)]}))

    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_two_tools_of_one_name_are_refused(
    api: TestClient, house: House, job_request: Callable[..., dict[str, Any]]
) -> None:
    allowing_tools(house, "127.0.0.1", "tools.example")
    with serving_mcp() as (url, _):
        both = [tool(name="lookup"), mcp(url)]
        of_one_name = api.post(JOBS, json=job_request(reinforcement={"tools": both}))
        of_one_label = api.post(JOBS, json=job_request(reinforcement={"tools": [mcp(url), mcp(url)]}))

    assert error(of_one_name)[0] == f"{INSIDE}.tools[1]"
    assert error(of_one_label)[0] == f"{INSIDE}.tools[1].server_label"


def test_a_server_that_is_no_mcp_server_is_refused(
    api: TestClient, house: House, job_request: Callable[..., dict[str, Any]]
) -> None:
    allowing_tools(house, "127.0.0.1")
    with serving(lambda path, sent: (302, "")) as url:
        answer = api.post(JOBS, json=job_request(reinforcement={"tools": [mcp(url)]}))

    assert error(answer)[0] == f"{INSIDE}.tools[0].server_url"
    assert "HTTP 302" in answer.json()["error"]["message"]


def of_raw_tool(listed: str) -> Callable[[str, Any], tuple[int, str]]:
    """A server of the newest revision whose list of tools is this text."""

    def answer(path: str, sent: Any) -> tuple[int, str]:
        if sent["method"] == "tools/list":
            return 200, f'{{"result": {{"tools": {listed}}}}}'
        return 200, '{"result": {"supportedVersions": ["2026-07-28"]}}'

    return answer


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ('[{"name": ["a"]}]', "its list of tools is not one"),
        ('[{"name": "a", "inputSchema": {"maximum": NaN}}]', "a number that is none in JSON"),
        ('[{"name": "a", "inputSchema": {"maximum": 1e999}}]', "a number that is none in JSON"),
        ('[{"name": "a", "description": "\\ud83d"}]', "a lone surrogate"),
        ('[{"name": "a", "inputSchema": ' + '{"not":' * 248 + "{}" + "}" * 248 + "}]", "more than 64 levels"),
    ],
)
def test_a_list_of_tools_that_could_not_be_stored_as_it_is_is_refused(
    api: TestClient,
    house: House,
    job_request: Callable[..., dict[str, Any]],
    listed: str,
    problem: str,
) -> None:
    allowing_tools(house, "127.0.0.1")
    with serving(of_raw_tool(listed)) as url:
        answer = api.post(JOBS, json=job_request(reinforcement={"tools": [mcp(url)]}))

    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]["message"]
    assert api.get(JOBS).json()["data"] == []


@pytest.mark.parametrize(("status", "answered"), [(503, 503), (401, 400), (429, 503)])
def test_a_server_that_may_answer_later_is_unavailable_and_one_that_refuses_is_a_mistake(
    api: TestClient,
    house: House,
    job_request: Callable[..., dict[str, Any]],
    status: int,
    answered: int,
) -> None:
    allowing_tools(house, "127.0.0.1")
    with serving(lambda path, sent: (status, "")) as url:
        answer = api.post(JOBS, json=job_request(reinforcement={"tools": [mcp(url)]}))

    assert error(answer, answered)[0] == f"{INSIDE}.tools[0].server_url"


def test_the_servers_of_a_job_have_one_limit_of_time(
    api: TestClient, house: House, job_request: Callable[..., dict[str, Any]]
) -> None:
    allowing_tools(house, "127.0.0.1")
    house.app.state.service = replace(house.app.state.service, tool_servers_seconds=0.0)
    with serving_mcp() as (url, _):
        answer = api.post(JOBS, json=job_request(reinforcement={"tools": [mcp(url)]}))

    assert error(answer, 503) == (None, "unavailable")
