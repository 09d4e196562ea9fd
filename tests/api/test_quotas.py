"""What a project may use at most, as its callers meet it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from starlette.testclient import TestClient

from core.database.tables import Job
from core.jobs import usage
from tests.api.conftest import House

if TYPE_CHECKING:
    from httpx2 import Response

JOBS = "/v1/fine_tuning/jobs"


def quota_of(answer: "Response") -> str:
    """The message of a refusal that no client should repeat."""
    assert answer.status_code == 429, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error: dict[str, Any] = answer.json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    return str(error["message"])


def upload(api: TestClient, content: bytes) -> "Response":
    return api.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", content)})


@pytest.mark.both_databases
def test_a_job_too_many_is_refused_and_leaves_nothing_behind(
    house: House,
    api: TestClient,
    create_job: Callable[..., dict[str, Any]],
    job_request: Callable[..., dict[str, Any]],
) -> None:
    create_job()
    house.limit(queued_jobs=1)
    sent = list(house.sent)

    message = quota_of(api.post(JOBS, json=job_request()))

    assert "queued_jobs is 1, and 1 are in use" in message
    assert len(api.get(JOBS).json()["data"]) == 1
    assert house.sent == sent


@pytest.mark.both_databases
def test_a_paused_job_cannot_slip_back_into_a_full_queue(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    paused, waiting = create_job(), create_job()
    with house.database.write() as session:
        for job in session.query(Job):
            job.status = "queued"
    api.post(f"{JOBS}/{paused['id']}/pause")
    house.limit(queued_jobs=1)

    quota_of(api.post(f"{JOBS}/{paused['id']}/resume"))

    assert api.get(f"{JOBS}/{paused['id']}").json()["status"] == "paused"
    api.post(f"{JOBS}/{waiting['id']}/cancel")
    assert api.post(f"{JOBS}/{paused['id']}/resume").json()["status"] == "queued"


@pytest.mark.parametrize("limit", ["gpu_seconds_per_30_days", "grader_tokens_per_30_days"])
@pytest.mark.both_databases
def test_a_project_that_has_used_up_its_month_creates_no_job(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]], limit: str
) -> None:
    house.limit(**{limit: 100})
    with house.database.write() as session:
        usage.add_usage(session, house.project.id, model="tiny", gpu_seconds=100.0, grader_tokens=100)

    assert limit in quota_of(api.post(JOBS, json=job_request()))


@pytest.mark.both_databases
def test_a_file_that_does_not_fit_any_more_is_refused_and_not_kept(house: House, api: TestClient) -> None:
    house.limit(storage_bytes=100)
    assert upload(api, b"x" * 60).status_code == 200

    message = quota_of(upload(api, b"x" * 41))

    assert "storage_bytes is 100, and 60 are in use" in message
    assert len(list(house.blobs.list(""))) == 1
    assert upload(api, b"x" * 40).status_code == 200


@pytest.mark.both_databases
def test_a_deleted_file_makes_room(house: House, api: TestClient) -> None:
    house.limit(storage_bytes=100)
    first = upload(api, b"x" * 100).json()["id"]
    quota_of(upload(api, b"x"))

    api.delete(f"/v1/files/{first}")

    assert upload(api, b"x").status_code == 200


def test_an_upload_that_says_how_large_it_is_is_refused_before_it_is_stored(
    house: House, api: TestClient
) -> None:
    house.limit(storage_bytes=100)

    quota_of(upload(api, b"x" * 200_000))

    assert house.blobs.begun == []


def test_an_upload_that_does_not_say_is_cut_off_where_the_room_ends(house: House, api: TestClient) -> None:
    house.limit(storage_bytes=100_000)
    boundary = b"--b\r\n"
    head = b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'

    def body() -> Iterator[bytes]:
        yield (
            boundary
            + b'content-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
            + boundary
            + head
        )
        for _ in range(4):
            yield b"x" * 50_000
        yield b"\r\n--b--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = api.post("/v1/files", content=body(), headers=headers)

    assert "storage_bytes" in quota_of(answer)
    assert len(house.blobs.begun) == 1
    assert sum(house.blobs.written) <= 100_000
    assert list(house.blobs.list("")) == []


@pytest.mark.both_databases
def test_a_file_in_parts_has_its_room_kept_from_its_announcement_on(house: House, api: TestClient) -> None:
    house.limit(storage_bytes=100)
    announced = {"filename": "a", "mime_type": "text/jsonl", "purpose": "fine-tune"}
    first = api.post("/v1/uploads", json=announced | {"bytes": 60}).json()

    quota_of(api.post("/v1/uploads", json=announced | {"bytes": 41}))
    quota_of(upload(api, b"x" * 41))

    part = api.post(f"/v1/uploads/{first['id']}/parts", files={"data": b"x" * 60}).json()
    done = api.post(f"/v1/uploads/{first['id']}/complete", json={"part_ids": [part["id"]]})
    assert done.json()["status"] == "completed"
    assert upload(api, b"x" * 40).status_code == 200


def test_a_file_in_parts_is_not_completed_beyond_a_limit_that_was_lowered(
    house: House, api: TestClient
) -> None:
    announced = {"filename": "a", "mime_type": "text/jsonl", "purpose": "fine-tune", "bytes": 60}
    first = api.post("/v1/uploads", json=announced).json()
    part = api.post(f"/v1/uploads/{first['id']}/parts", files={"data": b"x" * 60}).json()
    complete = f"/v1/uploads/{first['id']}/complete"
    house.limit(storage_bytes=59)

    quota_of(api.post(complete, json={"part_ids": [part["id"]]}))

    assert api.get("/v1/files").json()["data"] == []
    house.limit(storage_bytes=60)
    assert api.post(complete, json={"part_ids": [part["id"]]}).json()["status"] == "completed"


@pytest.mark.both_databases
def test_the_limits_and_the_use_of_them_can_be_read(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    create_job()
    house.limit(queued_jobs=3)
    path = f"/v1/organization/projects/{house.project.id}"

    limits, usage = api.get(f"{path}/limits").json(), api.get(f"{path}/usage").json()

    assert (limits["queued_jobs"], limits["running_jobs"]) == (3, None)
    assert (usage["queued_jobs"], usage["running_jobs"], usage["storage_bytes"]) == (1, 0, 34)


@pytest.mark.both_databases
def test_a_job_in_a_list_says_where_it_stands(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    first, second = create_job(), create_job()

    listed = {job["id"]: job["queue"]["position"] for job in api.get(JOBS).json()["data"]}
    cancelled = api.post(f"{JOBS}/{first['id']}/cancel").json()

    assert listed == {first["id"]: 1, second["id"]: 2}
    assert cancelled["queue"] is None
    assert api.get(f"{JOBS}/{second['id']}").json()["queue"]["position"] == 1


@pytest.mark.both_databases
def test_a_long_list_costs_no_more_queries_than_a_short_one(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    def queries(limit: int) -> int:
        seen: list[str] = []

        def note(*about: Any) -> None:
            seen.append(about[2])

        event.listen(house.database.engine, "before_cursor_execute", note)
        assert len(api.get(JOBS, params={"limit": limit}).json()["data"]) == limit
        event.remove(house.database.engine, "before_cursor_execute", note)
        return len(seen)

    for _ in range(6):
        create_job()

    assert queries(1) == queries(6)
