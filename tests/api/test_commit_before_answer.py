"""What was answered is durable: the commit comes first, and its failure is the answer."""

import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import Connection, event
from starlette.testclient import TestClient

from tests.api.conftest import House

pytestmark = pytest.mark.both_databases

JOBS = "/v1/fine_tuning/jobs"


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
    assert list(house.blobs.list("")) == blobs
    assert house.sent == wakes
    assert api.get(f"{JOBS}/{job['id']}").json()["status"] == "validating_files"


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
