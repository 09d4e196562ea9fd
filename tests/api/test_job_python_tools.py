"""Jobs with tools whose source runs in the sandbox."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from core.database.tables import Job
from core.jobs.tools import functions_of
from graders.backends import Backends
from tests.api.conftest import House
from tests.api.test_jobs import INSIDE, JOBS, error

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
PARAMETERS = {"type": "object", "properties": {"drawer": {"type": "integer"}}}
SOURCE = "def call(arguments, item, state):\n    return 'found', state\n"


def nested(levels: int) -> Any:
    """Objects in each other."""
    value: Any = {"title": "x"}
    for _ in range(levels - 1):
        value = {"properties": value}
    return value


def python(**changed: Any) -> dict[str, Any]:
    return {"type": "python", "name": "lookup", "parameters": PARAMETERS, "source": SOURCE} | changed


def test_a_job_stores_and_shows_its_python_tools(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    tool = python(description="The digit in a drawer.")

    shown = create_job(reinforcement={"tools": [tool]})["method"]["reinforcement"]["tools"]

    assert shown == [tool]
    with house.database.read() as session:
        [function] = functions_of(session.scalars(select(Job)).one().body)
    described = {"name": "lookup", "description": "The digit in a drawer.", "parameters": PARAMETERS}
    assert function == {"type": "function", "function": described}


@pytest.mark.parametrize(
    ("changed", "where", "code"),
    [
        ({"source": "def grade(sample, item): return 1"}, "source", "invalid_value"),
        ({"source": "def call(arguments): return 1"}, "source", "invalid_value"),
        ({"source": "def call("}, "source", "invalid_value"),
        ({"parameters": "none"}, "parameters", "invalid_type"),
        ({"parameters": {"type": "nothing"}}, "parameters", "invalid_value"),
        ({"parameters": nested(65)}, "parameters", "invalid_value"),
        ({"name": "two words"}, "name", "invalid_value"),
        ({"server_url": "https://a.example"}, "server_url", "unknown_parameter"),
    ],
)
def test_a_python_tool_that_is_refused_is_named(
    api: TestClient,
    job_request: Callable[..., dict[str, Any]],
    changed: dict[str, Any],
    where: str,
    code: str,
) -> None:
    answer = api.post(JOBS, json=job_request(reinforcement={"tools": [python(**changed)]}))

    assert error(answer) == (f"{INSIDE}.tools[0].{where}", code)


@pytest.mark.parametrize("levels", [64, 65, 240])
def test_a_schema_of_any_depth_leaves_the_list_of_jobs_readable(
    api: TestClient, job_request: Callable[..., dict[str, Any]], levels: int
) -> None:
    schema = {"type": "object", "default": nested(levels - 1)}
    answer = api.post(JOBS, json=job_request(reinforcement={"tools": [python(parameters=schema)]}))

    assert (answer.status_code == 200) == (levels <= 64), answer.text
    assert api.get(JOBS).status_code == 200


@pytest.mark.parametrize("where", ["response_format", "hyperparameters"])
def test_any_part_of_a_request_has_a_limit_of_levels(
    api: TestClient, job_request: Callable[..., dict[str, Any]], where: str
) -> None:
    answer = api.post(JOBS, json=job_request(reinforcement={where: nested(240)}))

    assert answer.status_code == 400
    assert "in more than 200 levels" in answer.json()["error"]["message"]


def test_functions_of_more_than_256_kib_are_refused(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    tools = [python(name=f"t{number}", description="x" * 90_000) for number in range(3)]
    answer = api.post(JOBS, json=job_request(reinforcement={"tools": tools}))

    assert error(answer)[0] == f"{INSIDE}.tools"
    assert "at most 262,144" in answer.json()["error"]["message"]


def test_an_environment_that_is_not_built_is_named_as_for_graders(
    api: TestClient, house: House, job_request: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    house.app.state.service = replace(
        house.app.state.service, all_backends=Backends({}, environments=tmp_path)
    )
    answer = api.post(JOBS, json=job_request(reinforcement={"tools": [python()]}))

    assert error(answer, 503)[1] == "grader_environment_missing"


def test_a_python_tool_without_a_source_is_refused(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    tool = {name: value for name, value in python().items() if name != "source"}
    answer = api.post(JOBS, json=job_request(reinforcement={"tools": [tool]}))

    assert error(answer) == (f"{INSIDE}.tools[0].source", "missing_required_parameter")
