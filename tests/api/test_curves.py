"""The curves of a list of jobs."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database.tables import Job
from tests import factories
from tests.api.conftest import House


def test_curves_are_in_the_order_of_the_jobs(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    first, second = create_job()["id"], create_job()["id"]
    with house.database.write() as session:
        row = session.query(Job).where(Job.id == first).one()
        factories.step(session, row, 0, total_steps=4, full_valid_mean_reward=0.5)

    found = api.get("/v1/regraft/curves", params={"jobs": f"{second}, {first}"}).json()["data"]

    assert [(one["job_id"], one["values"]) for one in found] == [(second, []), (first, [0.5])]
    assert (found[1]["steps"], found[1]["step"], found[1]["total_steps"]) == ([0], 0, 4)


def test_jobs_of_others_have_no_curves(
    house: House, create_job: Callable[..., dict[str, Any]], api: TestClient
) -> None:
    mine = create_job()["id"]

    refused = house.client(house.other_key).get("/v1/regraft/curves", params={"jobs": mine})

    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "fine_tune_not_found"


@pytest.mark.parametrize("jobs", ["", "a,", ",".join("a" * 101)])
def test_one_to_a_hundred_jobs_have_curves(api: TestClient, jobs: str) -> None:
    refused = api.get("/v1/regraft/curves", params={"jobs": jobs})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "jobs")
