"""`method.reinforcement.shadow_grader` in requests and responses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select
from starlette.testclient import TestClient

from core.database.tables import Job
from graders.backends import Backends
from graders.endpoint import Endpoints
from tests.api.conftest import GRADER, House

JOBS = "/v1/fine_tuning/jobs"
STRICT = GRADER | {"name": "strict", "operation": "eq"}


def test_a_job_shows_its_shadow_grader_and_its_request_has_it_again(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    made = create_job(reinforcement={"shadow_grader": STRICT})

    again = api.get(f"/v1/regraft/jobs/{made['id']}/request").json()

    assert made["method"]["reinforcement"]["shadow_grader"] == STRICT
    assert again["method"]["reinforcement"]["shadow_grader"] == STRICT
    assert api.post(JOBS, json=again).status_code == 200


def test_a_job_without_one_has_no_such_field(create_job: Callable[..., dict[str, Any]]) -> None:
    made = create_job(reinforcement={"shadow_grader": None})

    assert "shadow_grader" not in made["method"]["reinforcement"]


def test_a_stored_grader_may_be_the_shadow(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    api.post("/v1/regraft/graders", json={"name": "close", "grader": STRICT})

    made = create_job(reinforcement={"shadow_grader": {"type": "stored", "name": "close"}})

    assert made["method"]["reinforcement"]["shadow_grader"] == STRICT
    assert "stored_grader" not in made["method"]["reinforcement"]


def test_the_secrets_of_a_shadow_grader_are_masked(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    backends = Backends({}, Endpoints(("8.8.8.8",)))
    house.app.state.service = replace(house.app.state.service, all_backends=backends)
    secret = {"type": "endpoint", "name": "e", "url": "https://8.8.8.8/s", "headers": {"X-Key": "secret"}}
    made = create_job(reinforcement={"shadow_grader": secret})

    assert made["method"]["reinforcement"]["shadow_grader"]["headers"] == {"X-Key": "***"}
    with house.database.read() as session:
        assert session.scalars(select(Job)).one().body["shadow_grader"]["headers"] == {"X-Key": "secret"}


@pytest.mark.parametrize(
    ("shadow", "param"),
    [
        (GRADER | {"operation": "about"}, "method.reinforcement.shadow_grader.operation"),
        (
            {"type": "reward_model", "name": "r", "model": "ft:tiny:x"},
            "method.reinforcement.shadow_grader.type",
        ),
    ],
)
def test_a_shadow_grader_that_cannot_be_used_is_refused_by_its_path(
    api: TestClient, job_request: Callable[..., dict[str, Any]], shadow: dict[str, Any], param: str
) -> None:
    answer = api.post(JOBS, json=job_request(reinforcement={"shadow_grader": shadow}))

    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["param"] == param
