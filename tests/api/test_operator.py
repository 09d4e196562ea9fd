"""What only the operator of the service sees."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.jobs import lifecycle
from core.service import workers
from tests.api.conftest import House
from tests.core.test_workers import REPORT


def test_an_operator_sees_workers_with_what_they_work_on(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    with house.database.write() as session:
        workers.begin(session, REPORT)

    [worker] = api.get("/v1/regraft/workers").json()["data"]

    assert (worker["name"], worker["host"], worker["gpu_class"], worker["version"]) == (
        "a/1",
        "a",
        "cpu",
        "0.1.0",
    )
    assert (worker["status"], worker["tasks"]) == ("idle", [])
    assert worker["gpus"][0]["memory_total_bytes"] == 140 << 30
    assert worker["last_seen_at"] >= worker["started_at"] > 0
    queues = {one["kind"]: one for one in api.get("/v1/regraft/queues").json()["data"]}
    assert queues["validations"]["length"] == 1, job["id"]
    assert queues["validations"]["reason"] == "a free worker is about to start the next one"


@pytest.mark.parametrize("scope", ["read", "write", "admin"])
def test_a_tenant_sees_neither_workers_nor_queues(house: House, scope: Any) -> None:
    client = house.client(house.new_key(scope))

    for path in ("/v1/regraft/workers", "/v1/regraft/queues"):
        refused = client.get(path)
        assert refused.status_code == 403
        assert "scope 'operator'" in refused.json()["error"]["message"]


def test_no_request_makes_a_key_of_an_operator(house: House, api: TestClient) -> None:
    path = f"/v1/organization/projects/{house.project.id}/api_keys"

    refused = api.post(path, json={"name": "mine", "scope": "operator"})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "scope")


def test_an_administrator_does_not_get_the_key_of_an_operator_by_rotating_it(
    house: House, api: TestClient
) -> None:
    path = f"/v1/organization/projects/{house.project.id}/api_keys"
    admin = house.client(house.new_key("admin"))

    refused = admin.post(f"{path}/{house.key_id()}/rotate")

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
    assert api.get("/v1/regraft/workers").status_code == 200, "the key is still valid"
    rotated = api.post(f"{path}/{house.key_id()}/rotate").json()
    assert rotated["scope"] == "operator"
    assert house.client(rotated["value"]).get("/v1/regraft/workers").status_code == 200


def test_the_session_of_an_operator_says_so(api: TestClient) -> None:
    assert api.get("/v1/regraft/session").json()["scope"] == "operator"


def test_the_job_that_a_worker_validates_is_shown_with_its_project(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    with house.database.write() as session:
        workers.begin(session, REPORT)
        lifecycle.claim_validation(session, owner=REPORT.name, lease_seconds=60)

    [worker] = api.get("/v1/regraft/workers").json()["data"]

    tasks = [(task["kind"], task["id"], task["project_id"]) for task in worker["tasks"]]
    assert tasks == [("validation", job["id"], house.project.id)]
