"""What was answered is durable: the commit comes first, and its failure is the answer."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import Connection, event, select
from sqlalchemy.exc import OperationalError
from starlette.testclient import TestClient

from api.pipelines.driver import PipelineDriver
from core.database.tables import File, UploadPart
from tests.api.conftest import House, advance_next

pytestmark = pytest.mark.both_databases

JOBS = "/v1/fine_tuning/jobs"
PIPELINES = "/v1/regraft/pipelines"
Upload = Callable[..., str]
Call = Callable[[], Any]


def before_commit(house: House, act: Callable[..., None]) -> None:
    """Do this at the last moment before every commit that writes."""

    @event.listens_for(house.database.engine, "commit")
    def on_commit(connection: Connection) -> None:
        if not connection.get_execution_options().get("read_only"):
            act()


def fail() -> None:
    raise OSError("disk full")


WRITES = {
    "create a job": lambda api, job, request: api.post(JOBS, json=request),
    "cancel a job": lambda api, job, request: api.post(f"{JOBS}/{job['id']}/cancel"),
    "delete a file": lambda api, job, request: api.delete(f"/v1/files/{job['training_file']}"),
    "upload a file": lambda api, job, request: api.post(
        "/v1/files", data={"purpose": "fine-tune"}, files={"file": b"{}"}
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_commit_that_fails_is_no_success(
    house: House,
    api: TestClient,
    create_job: Callable[..., dict[str, Any]],
    job_request: Callable[..., dict[str, Any]],
    write: Callable[..., Any],
) -> None:
    job, request = create_job(), job_request()
    blobs, wakes = list(house.blobs.list("")), list(house.sent)
    before_commit(house, fail)

    answer = write(api, job, request)

    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    # Its content may stay until the sweep: the error of a commit does not show that it was without effect.
    assert set(house.blobs.list("")) >= set(blobs)
    assert house.sent == wakes
    assert api.get(f"{JOBS}/{job['id']}").json()["status"] == "validating_files"


def a_file(api: TestClient, upload: Upload) -> Call:
    return upload


def a_part(api: TestClient, upload: Upload) -> Call:
    about = {"filename": "a.jsonl", "purpose": "fine-tune", "mime_type": "text/jsonl", "bytes": 3}
    made = api.post("/v1/uploads", json=about).json()["id"]
    return partial(api.post, f"/v1/uploads/{made}/parts", files={"data": b"{}\n"})


def a_completed_upload(api: TestClient, upload: Upload) -> Call:
    added = a_part(api, upload)().json()
    made, part = added["upload_id"], added["id"]
    return partial(api.post, f"/v1/uploads/{made}/complete", json={"part_ids": [part]})


def a_split(api: TestClient, upload: Upload) -> Call:
    return partial(api.post, JOBS, json=split_job(upload))


def a_split_of_a_pipeline(api: TestClient, upload: Upload) -> Call:
    return partial(api.post, PIPELINES, json={"stages": [{"name": "j", "job": split_job(upload)}]})


def a_mixture(api: TestClient, upload: Upload) -> Call:
    stage = {"name": "m", "mix": {"files": [{"file": upload(lines(20))}]}}
    return partial(api.post, PIPELINES, json={"stages": [stage]})


def split_job(upload: Upload) -> dict[str, Any]:
    method = {"type": "supervised"}
    return {"model": "tiny", "training_file": upload(lines(20)), "validation_split": 0.25, "method": method}


def lines(number: int) -> bytes:
    rows = [
        [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "!"}] for n in range(number)
    ]
    return b"".join(json.dumps({"messages": row}).encode() + b"\n" for row in rows)


def stored_keys(connection: Connection) -> set[str]:
    return {
        key for column in (File.blob_key, UploadPart.blob_key) for key in connection.scalars(select(column))
    }


@pytest.mark.parametrize(
    "prepare", [a_file, a_part, a_completed_upload, a_split, a_split_of_a_pipeline, a_mixture]
)
def test_content_outlasts_a_commit_whose_acknowledgement_was_lost(
    house: House, api: TestClient, upload: Upload, prepare: Callable[[TestClient, Upload], Call]
) -> None:
    store = prepare(api, upload)
    with house.database.engine.connect() as connection:
        before = stored_keys(connection)
    committed: set[str] = set()

    @event.listens_for(house.database.engine, "commit")
    def commit_and_fail(connection: Connection) -> None:
        if connection.get_execution_options().get("read_only") or committed:
            return
        if added := stored_keys(connection) - before:
            connection.exec_driver_sql("COMMIT")
            committed.update(added)
            raise OperationalError("COMMIT", {}, ConnectionError("server closed the connection unexpectedly"))

    with suppress(AssertionError):  # of the fixture that uploads
        store()
    with suppress(OperationalError):
        house.portal.call(advance_next, PipelineDriver(house.app.state.service))

    assert len(committed) > 0
    assert committed <= set(house.blobs.list(""))


def test_the_answer_waits_for_a_slow_commit(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    reached, go_on = threading.Event(), threading.Event()
    answers = []

    def linger() -> None:
        reached.set()
        go_on.wait(30)

    before_commit(house, linger)
    caller = threading.Thread(target=lambda: answers.append(api.post(JOBS, json=request)))
    caller.start()

    assert reached.wait(30)
    assert answers == []
    assert house.sent == []

    go_on.set()
    caller.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert len(house.sent) == 1


@pytest.mark.parametrize(("scope", "status"), [("request", 200), ("function", 500)])
def test_the_frameworks_own_default_would_have_answered_200(scope: str, status: int) -> None:
    """Why api/http/deps.py says scope="function": a request's dependencies end when it has been answered."""
    app = FastAPI()

    def transaction() -> Iterator[None]:
        yield
        raise OSError("the commit failed")

    @app.post("/")
    def write(transaction: Annotated[None, Depends(transaction, scope=scope)]) -> str:
        return "done"

    assert TestClient(app, raise_server_exceptions=False).post("/").status_code == status
