"""A cursor keeps its place after its item was deleted."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database import pages
from core.database.tables import Checkpoint, File, PastCursor, now
from tests.api.conftest import House

pytestmark = pytest.mark.both_databases

ENDPOINT = {"url": "https://8.8.8.8/", "event_types": ["fine_tuning.job.succeeded"]}


def remove_row(house: House, file_id: str) -> None:
    """What the reconciler does to a deleted file."""
    with house.database.write() as session:
        row = session.query(File).where(File.id == file_id).one()
        pages.delete_row(session, row, owner=row.project_id)


def listed(api: TestClient, url: str, **query: Any) -> list[Any]:
    answer = api.get(url, params=query)
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["data"]]


@pytest.mark.parametrize("row_gone", [False, True])
@pytest.mark.parametrize("order", ["desc", "asc"])
def test_a_deleted_file_is_still_a_cursor(
    house: House, api: TestClient, upload: Callable[..., str], order: str, row_gone: bool
) -> None:
    made = [upload() for _ in range(4)]
    ordered = made if order == "asc" else made[::-1]
    api.delete(f"/v1/files/{ordered[1]}")
    if row_gone:
        remove_row(house, ordered[1])

    assert listed(api, "/v1/files", after=ordered[1], order=order) == ordered[2:]
    assert listed(api, "/v1/files", after=ordered[1], order=order, purpose="fine-tune") == ordered[2:]


def test_behind_the_newest_file_comes_what_was_uploaded_after_it_was_deleted(
    house: House, api: TestClient, upload: Callable[..., str]
) -> None:
    """SQLite gives the number of its row to the next one."""
    first, newest = upload(), upload()
    api.delete(f"/v1/files/{newest}")
    remove_row(house, newest)
    later = upload()

    assert listed(api, "/v1/files", after=newest, order="asc") == [later]
    assert listed(api, "/v1/files", after=newest, order="desc") == [first]


def test_a_deleted_webhook_endpoint_is_still_a_cursor(api: TestClient) -> None:
    made = [api.post("/v1/webhook_endpoints", json=ENDPOINT | {"name": name}).json()["id"] for name in "abc"]
    api.delete(f"/v1/webhook_endpoints/{made[1]}")

    assert listed(api, "/v1/webhook_endpoints", after=made[1]) == [made[0]]


def test_a_checkpoint_that_was_replaced_is_still_a_cursor_of_its_job(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job, other = create_job()["id"], create_job()["id"]
    with house.database.write() as session:
        for step in (1, 2, 3):
            row = Checkpoint(id=f"ftckpt_{step}", job_id=job, step=step, epoch=1, blob_prefix="x")
            row.valid_reward = 0.5
            session.add(row)
            session.flush()
    with house.database.write() as session:
        pages.delete_row(session, session.get_one(Checkpoint, 2), owner=job)

    assert listed(api, f"/v1/fine_tuning/jobs/{job}/checkpoints", after="ftckpt_2") == ["ftckpt_1"]
    assert (
        api.get(f"/v1/fine_tuning/jobs/{other}/checkpoints", params={"after": "ftckpt_2"}).status_code == 400
    )


def test_an_id_that_never_was_and_anothers_are_no_cursors(
    house: House, api: TestClient, upload: Callable[..., str]
) -> None:
    mine = upload()
    api.delete(f"/v1/files/{mine}")
    remove_row(house, mine)

    never = api.get("/v1/files", params={"after": "file-never"})
    anothers = house.client(house.other_key).get("/v1/files", params={"after": mine})

    assert (never.status_code, never.json()["error"]["param"]) == (400, "after")
    assert (anothers.status_code, anothers.json()["error"]["param"]) == (400, "after")


def test_an_expired_file_is_still_a_cursor(house: House, api: TestClient, upload: Callable[..., str]) -> None:
    made = [upload() for _ in range(3)]
    with house.database.write() as session:
        session.query(File).where(File.id == made[1]).one().expires_at = 1

    assert listed(api, "/v1/files", after=made[1]) == [made[0]]


def test_places_are_forgotten_after_a_month(
    house: House, api: TestClient, upload: Callable[..., str]
) -> None:
    old, recent = upload(), upload()
    for file_id in (old, recent):
        remove_row(house, file_id)
    with house.database.write() as session:
        row = session.get_one(PastCursor, old)
        row.deleted_at -= pages.KEEP_PAST_CURSORS_SECONDS + 1
    with house.database.write() as session:
        pages.forget_past_cursors(session, now())

    assert api.get("/v1/files", params={"after": old}).status_code == 400
    assert api.get("/v1/files", params={"after": recent}).status_code == 200


def test_a_limit_out_of_bounds_means_the_nearest_bound_on_every_list(house: House, api: TestClient) -> None:
    """OpenAI publishes none, and other clients send 0 for no limit."""
    paths = house.app.openapi()["paths"]
    lists = [
        path
        for path, operations in paths.items()
        if "{" not in path
        and any(parameter["name"] == "limit" for parameter in operations.get("get", {}).get("parameters", ()))
    ]

    answers = {
        (path, limit): api.get(path, params={"limit": limit}) for path in lists for limit in (0, -1, 2000)
    }

    assert len(lists) > 5
    assert {place: answer.text for place, answer in answers.items() if answer.status_code != 200} == {}
