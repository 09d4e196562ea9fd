"""Usage by day, model and project."""

import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.jobs import usage
from core.tenancy import keys
from tests.api.conftest import House

TODAY = time.strftime("%Y-%m-%d", time.gmtime())


@pytest.fixture
def used(house: House) -> None:
    """Of both projects."""
    with house.database.write() as session:
        _, theirs = keys.authenticate(session, house.other_key)
        for model, seconds in (("tiny", 60.0), ("org/large", 120.0)):
            usage.add_usage(session, house.project.id, model=model, gpu_seconds=seconds, sampled_tokens=10)
        usage.add_usage(session, theirs.id, model="tiny", gpu_seconds=600.0)


@pytest.mark.both_databases
@pytest.mark.usefixtures("used")
def test_the_usage_of_the_project_is_reported_by_day_and_model(api: TestClient) -> None:
    days = api.get("/v1/regraft/usage").json()
    models = api.get("/v1/regraft/usage", params={"by": "day, model", "days": 1}).json()["data"]

    assert (days["last_day"], days["by"]) == (TODAY, ["day"])
    [day] = days["data"]
    assert (day["day"], day["gpu_seconds"], day["sampled_tokens"], day["cost"]) == (TODAY, 180.0, 20, None)
    assert [(one["model"], one["gpu_seconds"]) for one in models] == [("org/large", 120.0), ("tiny", 60.0)]


@pytest.mark.usefixtures("used")
def test_an_operator_reports_all_projects_and_others_do_not(house: House, api: TestClient) -> None:
    asked = {"by": "project", "projects": "all"}

    rows = api.get("/v1/regraft/usage", params=asked).json()["data"]
    refused = house.client(house.new_key("admin")).get("/v1/regraft/usage", params=asked)
    theirs = house.client(house.other_key).get("/v1/regraft/usage", params={"by": "project"}).json()["data"]

    assert [(row["project_name"], row["gpu_seconds"]) for row in rows] == [
        ("others", 600.0),
        ("default", 180.0),
    ]
    assert refused.status_code == 403
    assert [row["gpu_seconds"] for row in theirs] == [600.0]


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"by": "hour"}, "by"), ({"by": ""}, "by"), ({"days": 0}, "days"), ({"days": 400}, "days")],
)
def test_an_unknown_grouping_and_too_many_days_are_refused(
    api: TestClient, asked: dict[str, Any], param: str
) -> None:
    refused = api.get("/v1/regraft/usage", params=asked)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
