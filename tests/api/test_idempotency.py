"""One Idempotency-Key, one creation: whoever asks again gets the first answer, at the same moment or a day later."""

import json
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select, update
from starlette.testclient import TestClient

from core.database.engine import Work
from core.database.tables import File, IdempotentRequest, Job, Project
from core.tenancy import idempotency, tenants
from core.tenancy.idempotency import Keyed, StoredResponse
from core.tenancy.limits import Limits
from tests.api.conftest import GRADER, House

if TYPE_CHECKING:
    from httpx2 import Response

REPOSITORY = Path(__file__).parents[2]
API_DOCS, OPENAPI = REPOSITORY / "docs/howto/api.md", REPOSITORY / "sdk/openapi.json"
JOBS, FILES = "/v1/fine_tuning/jobs", "/v1/files"


def keyed(key: str | bytes = "a-key") -> dict[str, Any]:
    return {"Idempotency-Key": key}


def upload(
    client: TestClient,
    content: bytes = b"{}\n",
    *,
    key: str | bytes = "a-key",
    name: str = "train.jsonl",
    **fields: Any,
) -> "Response":
    data = {"purpose": "fine-tune"} | fields
    return client.post(FILES, data=data, files={"file": (name, content)}, headers=keyed(key))


def count(house: House, table: type[Any]) -> Any:
    with house.database.read() as session:
        return session.scalar(select(func.count()).select_from(table))


@pytest.mark.both_databases
def test_the_same_request_gets_the_same_answer_and_creates_nothing(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    first = api.post(JOBS, json=request, headers=keyed())
    sent = list(house.sent)

    second = api.post(JOBS, json=request, headers=keyed())

    assert (first.status_code, second.status_code) == (200, 200)
    assert second.json() == first.json()
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert count(house, Job) == 1
    assert house.sent == sent


@pytest.mark.both_databases
def test_an_upload_is_announced_once(api: TestClient) -> None:
    asked = {"bytes": 5, "filename": "train.jsonl", "mime_type": "text/jsonl", "purpose": "fine-tune"}
    first = api.post("/v1/uploads", json=asked, headers=keyed())

    second = api.post("/v1/uploads", json=asked, headers=keyed())

    assert (first.status_code, second.json()) == (200, first.json())
    assert second.headers["idempotent-replayed"] == "true"


def keyed_paths() -> list[str]:
    """The paths whose POST takes an Idempotency-Key."""
    posts = {
        path: methods["post"]
        for path, methods in json.loads(OPENAPI.read_text())["paths"].items()
        if "post" in methods
    }
    return [
        path
        for path, post in posts.items()
        if "Idempotency-Key" in [parameter["name"] for parameter in post.get("parameters", [])]
    ]


def test_the_first_answer_is_looked_up_before_anything_of_the_request_is_checked(
    house: House, api: TestClient
) -> None:
    """Its inputs may be deleted since, its quota used up, and its body one that a newer release refuses."""
    paths = [path.format_map(defaultdict(lambda: "gone")) for path in keyed_paths() if path != FILES]
    body = {"gone": True}
    answers = {}
    for path in paths:
        with house.database.write() as session:
            request = Keyed(house.project.id, path, idempotency.fingerprint("POST", path, body))
            assert idempotency.take(session, request) is None
            idempotency.keep(session, request, StoredResponse(201, {"path": path}))
        answers[path] = api.post(path, json=body, headers=keyed(path))

    assert [(one.status_code, one.json()) for one in answers.values()] == [
        (201, {"path": path}) for path in paths
    ]


def test_a_file_is_sent_again_in_vain_once_the_storage_is_full(house: House, api: TestClient) -> None:
    first = upload(api)
    with house.database.write() as session:
        project = session.get_one(Project, house.project.id)
        tenants.set_limits(Work(session), project, Limits(storage_bytes=1))

    assert upload(api).json() == first.json()
    assert upload(api, key="another").status_code == 429


def test_more_bytes_than_the_first_file_had_are_refused_before_the_rest_arrives(
    house: House, api: TestClient
) -> None:
    """The storage quota is not checked then. Fields are checked when all has arrived."""
    upload(api, b"x" * 60)

    assert upload(api, b"x" * 60, purpose="none").json()["error"]["param"] == "purpose"
    assert upload(api, b"x" * 61, purpose="none").json()["error"]["code"] == "idempotency_key_reused"
    assert len(list(house.blobs.list(""))) == 1


def test_a_key_of_another_url_does_not_replace_the_storage_check_of_a_file(
    house: House, api: TestClient
) -> None:
    api.post("/v1/regraft/graders", json={"name": "close", "grader": GRADER}, headers=keyed())
    house.limit(storage_bytes=1)

    assert upload(api).json()["error"]["code"] == "insufficient_quota"


def test_the_docs_list_the_requests_that_take_a_key() -> None:
    [paragraph] = [line for line in API_DOCS.read_text().split("\n\n") if line.startswith("**Idempotency.**")]

    assert [path for path in keyed_paths() if f"`{path}`" not in paragraph] == []


@pytest.mark.parametrize("path", ["/v1/webhook_endpoints", "/v1/organization/projects/{project_id}/api_keys"])
def test_what_answers_with_a_secret_takes_no_key(house: House, path: str) -> None:
    parameters = house.app.openapi()["paths"][path]["post"].get("parameters", [])

    assert "Idempotency-Key" not in [parameter["name"] for parameter in parameters]


@pytest.mark.both_databases
def test_the_answer_is_the_first_one_whatever_became_of_the_job(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    first = api.post(JOBS, json=request, headers=keyed()).json()
    api.post(f"{JOBS}/{first['id']}/cancel")

    assert api.post(JOBS, json=request, headers=keyed()).json() == first


def test_spaces_and_the_order_of_keys_do_not_make_another_request(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    first = api.post(JOBS, json=request, headers=keyed())

    turned = api.post(JOBS, json=dict(reversed(request.items())), headers=keyed())

    assert turned.json() == first.json()


@pytest.mark.both_databases
def test_another_request_under_the_same_key_is_refused(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    api.post(JOBS, json=request, headers=keyed())

    answer = api.post(JOBS, json=request | {"seed": 5}, headers=keyed())

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("idempotency_key_reused", None)
    assert count(house, Job) == 1


@pytest.mark.both_databases
def test_a_key_of_one_url_is_not_one_of_another(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    api.post(JOBS, json=request, headers=keyed())

    assert upload(api).json()["error"]["code"] == "idempotency_key_reused"


@pytest.mark.both_databases
def test_without_a_key_everything_is_new(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()

    assert api.post(JOBS, json=request).json()["id"] != api.post(JOBS, json=request).json()["id"]


@pytest.mark.both_databases
def test_projects_do_not_share_keys(house: House, api: TestClient) -> None:
    mine, theirs = upload(api), upload(house.client(house.other_key))

    assert theirs.status_code == 200
    assert theirs.json()["id"] != mine.json()["id"]


@pytest.mark.both_databases
def test_a_refused_request_leaves_its_key_free(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    refused = api.post(JOBS, json=request | {"training_file": "file-nothing"}, headers=keyed())

    answer = api.post(JOBS, json=request, headers=keyed())

    assert (refused.status_code, answer.status_code) == (400, 200)
    assert "idempotent-replayed" not in answer.headers


@pytest.mark.both_databases
def test_a_file_that_is_sent_again_is_stored_once(house: House, api: TestClient) -> None:
    first = upload(api)

    second = upload(api)

    assert second.json() == first.json()
    assert second.headers["idempotent-replayed"] == "true"
    assert count(house, File) == 1
    assert len(list(house.blobs.list(""))) == 1
    assert api.get(f"{FILES}/{first.json()['id']}/content").content == b"{}\n"


@pytest.mark.parametrize(
    "change", [{"content": b'{"a": 1}\n'}, {"name": "other.jsonl"}, {"expires_after[anchor]": "created_at"}]
)
@pytest.mark.both_databases
def test_another_file_under_the_same_key_is_refused_and_not_stored(
    house: House, api: TestClient, change: dict[str, Any]
) -> None:
    if "expires_after[anchor]" in change:
        change = change | {"expires_after[seconds]": "3600"}
    upload(api)

    answer = upload(api, **change)

    assert answer.json()["error"]["code"] == "idempotency_key_reused"
    assert len(list(house.blobs.list(""))) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, b"\xff", b"a\tb"])
def test_a_key_that_is_no_printable_text_is_refused(house: House, api: TestClient, key: str | bytes) -> None:
    answer = upload(api, key=key)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert count(house, File) == 0


@pytest.mark.parametrize("key", ["x", "x" * 255, "a key ~ with 'quotes'"])
@pytest.mark.both_databases
def test_any_printable_text_is_a_key(api: TestClient, key: str) -> None:
    assert upload(api, key=key).status_code == 200


@pytest.mark.parametrize("what", ["jobs", "files"])
@pytest.mark.both_databases
def test_of_many_at_once_one_creates_and_all_hear_of_it(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]], what: str
) -> None:
    request = job_request()
    before = count(house, File)

    def ask(_: Any) -> "Response":
        client = house.client(house.key)
        return upload(client) if what == "files" else client.post(JOBS, json=request, headers=keyed())

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))

    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1
    assert count(house, Job) + count(house, File) - before == 1


@pytest.mark.both_databases
def test_after_a_day_a_key_may_be_used_anew(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    first = api.post(JOBS, json=request, headers=keyed())
    api.post(JOBS, json=request, headers=keyed("another"))
    with house.database.write() as session:
        old = update(IdempotentRequest).where(IdempotentRequest.key == "a-key")
        session.execute(
            old.values(created_at=IdempotentRequest.created_at - idempotency.RETENTION_SECONDS - 1)
        )

    with house.database.write() as session:
        idempotency.forget(session)

    assert count(house, IdempotentRequest) == 1
    assert api.post(JOBS, json=request, headers=keyed()).json()["id"] != first.json()["id"]


@pytest.mark.both_databases
def test_what_is_kept_holds_no_secret_of_the_grader(
    house: House, api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    grader = {
        "type": "endpoint",
        "name": "mine",
        "url": "https://graders.example/grade",
        "headers": {"Authorization": "Bearer hunter2"},
    }
    api.post(JOBS, json=job_request({"grader": grader}), headers=keyed())

    with house.database.read() as session:
        assert "hunter2" not in str([row.answer for row in session.scalars(select(IdempotentRequest))])
