"""/v1/uploads as clients see it, OpenAI's own among them."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
from sqlalchemy import select, update
from starlette.testclient import TestClient

from core.database.tables import Upload, UploadPart, now
from tests.api.conftest import House

if TYPE_CHECKING:
    from httpx2 import Response

BODY = {"bytes": 6, "filename": "train.jsonl", "mime_type": "text/jsonl", "purpose": "fine-tune"}


def begin(api: TestClient, **fields: Any) -> Any:
    answer = api.post("/v1/uploads", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def add(api: TestClient, upload: dict[str, Any], data: bytes) -> Any:
    answer = api.post(f"/v1/uploads/{upload['id']}/parts", files={"data": data})
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(api: TestClient, upload: dict[str, Any], *parts: Any, **more: Any) -> "Response":
    body = {"part_ids": [part["id"] for part in parts]} | more
    return api.post(f"/v1/uploads/{upload['id']}/complete", json=body)


@pytest.fixture
def client(house: House) -> Iterator[openai.OpenAI]:
    http = house.client()
    yield openai.OpenAI(api_key=house.key, base_url="http://testserver/v1", http_client=http, max_retries=0)
    http.close()


@pytest.mark.both_databases
def test_openais_client_uploads_a_file_in_chunks(client: openai.OpenAI, house: House, tmp_path: Path) -> None:
    content = b'{"a": "%s"}\n' % os.urandom(49_995).hex().encode()
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)

    upload = client.uploads.upload_file_chunked(
        file=path,
        mime_type="text/jsonl",
        purpose="fine-tune",
        part_size=30_000,
        md5=hashlib.md5(content).hexdigest(),
    )

    assert (upload.status, upload.bytes, upload.filename) == ("completed", 100_000, "train.jsonl")
    assert upload.file is not None
    assert upload.file.status == "processed"
    assert client.files.content(upload.file.id).read() == content
    assert [key.split("/")[2] for key in house.blobs.list("")] == ["files"]


@pytest.mark.both_databases
def test_a_file_in_parts_is_a_training_file_like_any_other(
    api: TestClient, client: openai.OpenAI, job_request: Callable[..., dict[str, Any]]
) -> None:
    rows = b'{"messages": []}\n'
    upload = client.uploads.upload_file_chunked(
        file=rows, filename="t.jsonl", bytes=len(rows), mime_type="text/jsonl", purpose="fine-tune"
    )

    assert upload.file is not None
    answer = api.post("/v1/fine_tuning/jobs", json=job_request(training_file=upload.file.id))

    assert answer.json()["training_file"] == upload.file.id


@pytest.mark.both_databases
def test_an_upload_and_its_parts_look_like_openais(api: TestClient) -> None:
    upload = begin(api)
    part = add(api, upload, b"abcdef")

    assert upload == {
        "id": upload["id"],
        "object": "upload",
        "bytes": 6,
        "created_at": pytest.approx(now(), abs=5),
        "expires_at": upload["created_at"] + 3600,
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "status": "pending",
        "file": None,
    }
    assert part == {
        "id": part["id"],
        "object": "upload.part",
        "created_at": pytest.approx(now(), abs=5),
        "upload_id": upload["id"],
    }
    assert upload["id"].startswith("upload_") and part["id"].startswith("part_")


def test_the_expiry_asked_for_is_the_files(api: TestClient) -> None:
    upload = begin(api, expires_after={"anchor": "created_at", "seconds": 3600})

    file = complete(api, upload, add(api, upload, b"abcdef")).json()["file"]

    assert file["expires_at"] == file["created_at"] + 3600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"bytes": "6"}, "bytes"),
        ({"bytes": (8 << 30) + 1}, "bytes"),
        ({"purpose": "nonsense"}, "purpose"),
        ({"filename": "x" * 513}, "filename"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_field_is_named(api: TestClient, fields: dict[str, Any], param: str) -> None:
    answer = api.post("/v1/uploads", json=BODY | fields)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_more_than_the_operator_allows_is_refused_before_it_is_sent(api: TestClient, house: House) -> None:
    allowed = house.app.state.service.settings.max_multipart_bytes

    error = api.post("/v1/uploads", json=BODY | {"bytes": allowed + 1}).json()["error"]

    assert error["message"] == f"The upload has {allowed + 1} bytes, but the maximum is {allowed}."
    assert begin(api, bytes=allowed)["bytes"] == allowed


def test_of_a_path_only_the_file_name_is_kept(api: TestClient) -> None:
    assert begin(api, filename="../../etc/train.jsonl")["filename"] == "train.jsonl"


def test_a_part_may_be_larger_than_a_json_body(api: TestClient, house: House) -> None:
    upload = begin(api, bytes=3 << 20)

    add(api, upload, b"x" * (3 << 20))

    assert len(list(house.blobs.list(""))) == 1


@pytest.mark.parametrize(
    ("files", "param"),
    [({"data": b""}, "data"), ({"file": b"x"}, "file"), ({}, None)],
)
def test_a_part_without_data_is_refused(
    api: TestClient, house: House, files: dict[str, Any], param: str | None
) -> None:
    upload = begin(api)

    answer = api.post(f"/v1/uploads/{upload['id']}/parts", files=files)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert list(house.blobs.list("")) == []


def test_half_a_part_is_not_a_part(api: TestClient, house: House) -> None:
    upload = begin(api)
    body = b'--b\r\nContent-Disposition: form-data; name="data"; filename="upload"\r\n\r\nabcdef'

    answer = api.post(
        f"/v1/uploads/{upload['id']}/parts",
        content=body,
        headers={"content-type": "multipart/form-data; boundary=b"},
    )

    assert answer.status_code == 400
    assert list(house.blobs.list("")) == []


@pytest.mark.both_databases
def test_completing_again_gives_the_same_answer(api: TestClient) -> None:
    upload = begin(api)
    part = add(api, upload, b"abcdef")

    first, second = complete(api, upload, part), complete(api, upload, part)

    assert first.status_code == 200
    assert first.json() == second.json()
    assert first.json()["status"] == "completed"


def test_a_wrong_total_is_told(api: TestClient) -> None:
    upload = begin(api)

    error = complete(api, upload, add(api, upload, b"abc")).json()["error"]

    assert error["param"] == "part_ids"
    assert error["message"] == "The parts have 3 bytes, but the upload was announced with 6."


@pytest.mark.parametrize("body", [{}, {"part_ids": []}, {"part_ids": ["a"], "md5": "short"}])
def test_a_completion_that_says_too_little_is_refused(api: TestClient, body: dict[str, Any]) -> None:
    assert api.post(f"/v1/uploads/{begin(api)['id']}/complete", json=body).status_code == 400


@pytest.mark.both_databases
def test_a_cancelled_upload_keeps_nothing(api: TestClient, house: House) -> None:
    upload = begin(api)
    part = add(api, upload, b"abcdef")

    answer = api.post(f"/v1/uploads/{upload['id']}/cancel")

    assert (answer.json()["status"], answer.json()["file"]) == ("cancelled", None)
    assert complete(api, upload, part).status_code == 400
    assert list(house.blobs.list("")) == []


@pytest.mark.both_databases
def test_an_expired_upload_says_so(api: TestClient, house: House) -> None:
    upload = begin(api)
    part = add(api, upload, b"abcdef")
    with house.database.write() as session:
        session.execute(update(Upload).values(expires_at=now() - 1))

    answers = [
        api.post(f"/v1/uploads/{upload['id']}/parts", files={"data": b"x"}),
        complete(api, upload, part),
        api.post(f"/v1/uploads/{upload['id']}/cancel"),
    ]

    for answer in answers:
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"Upload {upload['id']} has expired. Create a new one."


@pytest.mark.both_databases
def test_parts_that_cannot_be_deleted_now_do_not_fail_what_was_asked_for(
    api: TestClient, house: House
) -> None:
    upload = begin(api)
    part = add(api, upload, b"abcdef")

    house.blobs.reachable = False
    assert complete(api, upload, part).json()["status"] == "completed"

    with house.database.read() as session:
        assert session.scalars(select(UploadPart.id)).all() == [part["id"]]  # for the reconciler to find


@pytest.mark.parametrize("call", ["parts", "complete", "cancel"])
@pytest.mark.both_databases
def test_another_projects_upload_does_not_exist(api: TestClient, house: House, call: str) -> None:
    upload = begin(api)
    part = add(api, upload, b"abcdef")
    theirs = house.client(house.other_key)
    body = {"files": {"data": b"x"}} if call == "parts" else {"json": {"part_ids": [part["id"]]}}

    answer = theirs.post(f"/v1/uploads/{upload['id']}/{call}", **body)

    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"No such Upload object: {upload['id']}"


@pytest.mark.both_databases
def test_parts_may_arrive_at_the_same_time(api: TestClient, house: House) -> None:
    from concurrent.futures import ThreadPoolExecutor

    upload = begin(api, bytes=8000)
    rows = [b'{"n": %d}' % number + b" " * 991 + b"\n" for number in range(8)]

    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(lambda n: add(house.client(house.key), upload, rows[n]), range(8)))
    file = complete(api, upload, *parts).json()["file"]

    content = api.get(f"/v1/files/{file['id']}/content").content
    assert content == b"".join(rows)


def test_an_upload_needs_a_key(house: House) -> None:
    answer: httpx2.Response = house.client().post("/v1/uploads", json=BODY)

    assert answer.status_code == 401


def test_training_data_in_parts_that_no_job_reads_is_refused_as_in_one_piece(
    api: TestClient, house: House
) -> None:
    content = b'[{"messages": []},\n{"messages": []}]'
    upload = begin(api, bytes=len(content))
    parts = [add(api, upload, content[:1]), add(api, upload, content[1:])]

    refused = complete(api, upload, *parts)

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_file_format")
    assert "the file is one JSON array" in refused.json()["error"]["message"]
    assert api.get("/v1/files").json()["data"] == []
