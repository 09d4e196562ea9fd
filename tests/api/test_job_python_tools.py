"""Jobs with tools whose source runs in the sandbox."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from core.database.tables import Job
from core.jobs.tools import functions_of
from tests.api.conftest import House
from tests.api.test_jobs import INSIDE, JOBS, error

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
PARAMETERS = {"type": "object", "properties": {"drawer": {"type": "integer"}}}
SOURCE = "def call(arguments, item, state):\n    return 'found', state\n"


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


def test_a_python_tool_without_a_source_is_refused(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    tool = {name: value for name, value in python().items() if name != "source"}
    answer = api.post(JOBS, json=job_request(reinforcement={"tools": [tool]}))

    assert error(answer) == (f"{INSIDE}.tools[0].source", "missing_required_parameter")
