"""Every change is in the log of its project, with whose key it was and in which request."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select
from starlette.testclient import TestClient

from core.database.tables import AuditEntry, Job, TunedModel
from core.tenancy.keys import Scope
from tests.api.conftest import House

JOBS = "/v1/fine_tuning/jobs"
LOG = "/v1/organization/audit_logs"


def log(api: TestClient, **params: Any) -> Any:
    answer = api.get(LOG, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def types(api: TestClient) -> list[Any]:
    """Oldest first, without the key that was made before the service was up."""
    return [entry["type"] for entry in reversed(log(api, limit=100)["data"])][1:]


@pytest.mark.both_databases
def test_an_entry_says_who_did_what_to_what_and_in_which_request(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    answer = api.post(JOBS, json=job_request(), headers={"x-request-id": "req_mine"})

    newest = log(api, limit=1)["data"][0]
    assert newest == {
        "id": newest["id"],
        "object": "organization.audit_log",
        "type": "job.created",
        "effective_at": newest["effective_at"],
        "actor": {"type": "api_key", "api_key": {"id": house.key_id()}},
        "project": {"id": house.project.id},
        "target": answer.json()["id"],
        "request_id": "req_mine",
        "data": {"model": "tiny", "training_file": answer.json()["training_file"]},
    }


@pytest.mark.both_databases
def test_every_change_through_the_api_is_logged(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]], upload: Callable[..., str]
) -> None:
    job = create_job()
    with house.database.write() as session:
        session.query(Job).one().status = "queued"
        model = {"name": "ft:tiny:x::1", "job_id": job["id"], "base_model": "tiny", "checkpoint_id": "c"}
        session.add(TunedModel(project_id=house.project.id, **model))
    for verb in ("pause", "resume", "cancel"):
        api.post(f"{JOBS}/{job['id']}/{verb}")
    api.delete(f"/v1/files/{job['training_file']}")
    api.delete("/v1/models/ft:tiny:x::1")
    path = f"/v1/organization/projects/{house.project.id}/api_keys"
    made = api.post(path, json={"name": "ci"}).json()
    rotated = api.post(f"{path}/{made['id']}/rotate").json()
    api.delete(f"{path}/{rotated['id']}")

    assert types(api) == [
        "file.created",
        "file.created",
        "job.created",
        "job.paused",
        "job.resumed",
        "job.cancelled",
        "file.deleted",
        "model.deleted",
        "api_key.created",
        "api_key.rotated",
        "api_key.revoked",
    ]


@pytest.mark.both_databases
def test_files_in_parts_are_logged_when_they_begin_and_end(api: TestClient) -> None:
    announced = {"filename": "a", "mime_type": "text/jsonl", "purpose": "fine-tune", "bytes": 2}
    kept, dropped = (api.post("/v1/uploads", json=announced).json()["id"] for _ in range(2))
    part = api.post(f"/v1/uploads/{kept}/parts", files={"data": b"{}"}).json()
    for _ in range(2):
        api.post(f"/v1/uploads/{kept}/complete", json={"part_ids": [part["id"]]})
        api.post(f"/v1/uploads/{dropped}/cancel")

    assert types(api) == ["upload.created", "upload.created", "file.created", "upload.cancelled"]
    assert {entry["actor"]["type"] for entry in log(api, limit=4)["data"]} == {"api_key"}


@pytest.mark.both_databases
def test_webhook_endpoints_and_budgets_are_logged_without_secrets(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    url = "https://8.8.8.8/hook-of-our-own"
    asked = {"name": "a", "url": url, "event_types": ["fine_tuning.job.succeeded"]}
    endpoint = api.post("/v1/webhook_endpoints", json=asked).json()
    path = f"/v1/webhook_endpoints/{endpoint['id']}"
    api.post(path, json={"name": "b"})
    rotated = api.post(f"{path}/rotate_secret").json()
    api.delete(path)
    api.post(f"{JOBS}/{create_job()['id']}/budget", json={"budget": {"gpu_seconds": 60}})

    changes = [type for type in types(api) if type.startswith("webhook") or type == "job.budget_changed"]
    assert changes == [
        "webhook_endpoint.created",
        "webhook_endpoint.updated",
        "webhook_endpoint.secret_rotated",
        "webhook_endpoint.deleted",
        "job.budget_changed",
    ]
    text = api.get(LOG).text
    assert not [
        secret for secret in (url, endpoint["signing_secret"], rotated["signing_secret"]) if secret in text
    ]


def test_what_changes_nothing_is_not_logged(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    api.post(f"{JOBS}/{job['id']}/cancel")
    before = types(api)

    api.post(f"{JOBS}/{job['id']}/cancel")
    api.post(f"{JOBS}/{job['id']}/pause")
    api.get(f"{JOBS}/{job['id']}")
    api.delete("/v1/files/file-none")
    api.post(JOBS, json={"model": "tiny"})

    assert types(api) == before


def test_no_key_is_ever_in_the_log(house: House, api: TestClient) -> None:
    path = f"/v1/organization/projects/{house.project.id}/api_keys"
    made = api.post(path, json={"name": "ci"}).json()
    rotated = api.post(f"{path}/{made['id']}/rotate").json()

    text = api.get(LOG).text

    assert made["id"] in text
    assert made["value"] not in text
    assert rotated["value"] not in text


@pytest.mark.both_databases
def test_the_log_is_read_page_by_page_newest_first(api: TestClient, upload: Callable[..., str]) -> None:
    for _ in range(4):
        upload()

    first = log(api, limit=3)
    rest = log(api, limit=3, after=first["last_id"])

    assert (len(first["data"]), first["has_more"], rest["has_more"]) == (3, True, False)
    assert [entry["type"] for entry in rest["data"]] == ["file.created", "api_key.created"]
    assert first["first_id"] == first["data"][0]["id"]


@pytest.mark.both_databases
def test_a_change_that_is_rolled_back_was_never_logged(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    before = types(api)
    house.limit(queued_jobs=0)

    assert api.post(JOBS, json=request).status_code == 429

    with house.database.read() as session:
        mine = select(AuditEntry.action).where(AuditEntry.project_id == house.project.id)
        logged = session.scalars(mine.order_by(AuditEntry.seq)).all()
    assert list(logged)[1:] == before


@pytest.mark.parametrize("scope", ["read", "write"])
def test_the_log_is_for_administrators(house: House, scope: Scope) -> None:
    assert house.client(house.new_key(scope)).get(LOG).status_code == 403
