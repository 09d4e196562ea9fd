import hashlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import uvicorn
from sqlalchemy import insert, select, update
from starlette.testclient import TestClient

from api.http.shutdown import Server
from core.database.engine import Work
from core.database.tables import File, now
from core.storage import files
from core.storage.store import CHUNK_BYTES, BlobCorrupt, FolderBlobs
from tests.api.conftest import House
from tests.present import untyped

if TYPE_CHECKING:
    from httpx2 import Response

ROW = b'{"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}\n'


def post(api: TestClient, content: bytes = ROW, name: str = "train.jsonl", **fields: str) -> "Response":
    return api.post("/v1/files", data={"purpose": "fine-tune"} | fields, files={"file": (name, content)})


def stored(house: House) -> list[str]:
    return list(house.blobs.list(""))


@pytest.mark.both_databases
def test_an_uploaded_file_is_processed_at_once(api: TestClient) -> None:
    answer = post(api)

    file = answer.json()
    assert answer.status_code == 200
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(ROW),
        "created_at": pytest.approx(now(), abs=5),
        "expires_at": None,
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "status": "processed",
        "status_details": None,
    }
    assert file["id"].startswith("file-")


BYTES = bytes(range(256)) * 1000


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=1000-255999", 1000, len(BYTES)),
        ("bytes=255999-", len(BYTES) - 1, len(BYTES)),
        ("bytes=-10", len(BYTES) - 10, len(BYTES)),
        ("bytes=5-99999999", 5, len(BYTES)),
        ("bytes=-99999999", 0, len(BYTES)),
    ],
)
def test_a_part_of_a_file_can_be_downloaded(api: TestClient, asked: str, start: int, end: int) -> None:
    file_id = post(api, BYTES, purpose="user_data").json()["id"]

    answer = api.get(f"/v1/files/{file_id}/content", headers={"range": asked})

    assert answer.status_code == 206
    assert answer.content == BYTES[start:end]
    assert answer.headers["content-length"] == str(end - start)
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{len(BYTES)}"


def test_a_download_has_no_head(api: TestClient) -> None:
    file_id = post(api, BYTES, purpose="user_data").json()["id"]

    assert api.head(f"/v1/files/{file_id}/content").status_code == 405


@pytest.mark.parametrize("asked", ["bytes=256000-", "bytes=-0"])
def test_a_part_beyond_the_end_of_a_file_is_refused(api: TestClient, asked: str) -> None:
    file_id = post(api, BYTES, purpose="user_data").json()["id"]

    answer = api.get(f"/v1/files/{file_id}/content", headers={"range": asked})

    assert answer.status_code == 416
    assert answer.json()["error"]["code"] == "range_not_satisfiable"
    assert answer.headers["content-range"] == f"bytes */{len(BYTES)}"


@pytest.mark.parametrize("asked", ["bytes=9-3", "bytes=0-1,5-6", "bytes=-", "lines=1-2", "bytes=a-b", ""])
def test_a_range_that_is_not_understood_gets_the_whole_file(api: TestClient, asked: str) -> None:
    file_id = post(api, BYTES, purpose="user_data").json()["id"]

    answer = api.get(f"/v1/files/{file_id}/content", headers={"range": asked})

    assert (answer.status_code, answer.content) == (200, BYTES)


def test_a_part_of_another_content_is_not_sent(api: TestClient) -> None:
    file_id = post(api, BYTES, purpose="user_data").json()["id"]
    path = f"/v1/files/{file_id}/content"
    etag = api.get(path).headers["etag"]

    same = api.get(path, headers={"range": "bytes=1-2", "if-range": etag})
    other = api.get(path, headers={"range": "bytes=1-2", "if-range": '"another"'})

    assert (same.status_code, same.content) == (206, BYTES[1:3])
    assert (other.status_code, other.content) == (200, BYTES)


@pytest.mark.both_databases
def test_its_content_comes_back_byte_for_byte(api: TestClient) -> None:
    content = ROW * 1000 + "é\u2028\x01".encode() + b"\r\n--not-the-boundary\r\n" + ROW
    file_id = post(api, content).json()["id"]

    answer = api.get(f"/v1/files/{file_id}/content")

    assert answer.content == content
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-length"] == str(len(content))
    assert answer.headers["x-content-type-options"] == "nosniff"


def key_of(house: House, file_id: str) -> str:
    with house.database.read() as session:
        return session.scalars(select(File.blob_key).where(File.id == file_id)).one()


def make_large(house: House, file_id: str) -> bytes:
    """Give the file contents of several chunks, and return them."""
    content = b"".join(bytes([number]) * CHUNK_BYTES for number in range(3)) + b"end"
    house.blobs.put_bytes(key_of(house, file_id), content)
    sha256 = hashlib.sha256(content).hexdigest()
    with house.database.write() as session:
        session.execute(update(File).where(File.id == file_id).values(bytes=len(content), sha256=sha256))
    return content


def flipped(content: bytes) -> bytes:
    """The same with one bit changed."""
    return bytes([content[0] ^ 1]) + content[1:]


def assert_damaged(answer: "Response", file_id: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (410, "file_damaged")
    assert (error["type"], error["param"]) == ("invalid_request_error", "id")
    assert f"{file_id} (train.jsonl)" in error["message"]
    assert error["message"].endswith(files.RESTORE)


@pytest.mark.parametrize("damage", [flipped, lambda row: row[:-1], lambda row: row + b"x", lambda row: b""])
def test_a_small_file_that_is_damaged_is_a_410_that_names_it(
    api: TestClient, house: House, caplog: pytest.LogCaptureFixture, damage: Callable[..., Any]
) -> None:
    file_id = post(api).json()["id"]
    key = key_of(house, file_id)
    house.blobs.put_bytes(key, damage(ROW))

    assert_damaged(api.get(f"/v1/files/{file_id}/content"), file_id)

    [told] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert key in told.getMessage() and file_id in told.getMessage()


def test_a_large_file_that_lost_its_end_is_a_410_if_one_chunk_is_left(api: TestClient, house: House) -> None:
    file_id = post(api).json()["id"]
    house.blobs.put_bytes(key_of(house, file_id), make_large(house, file_id)[:CHUNK_BYTES])

    assert_damaged(api.get(f"/v1/files/{file_id}/content"), file_id)


@pytest.mark.both_databases
def test_a_file_that_is_missing_is_a_410_that_names_it(
    api: TestClient, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    file_id, other = post(api).json()["id"], post(api, ROW + ROW).json()["id"]
    house.blobs.delete(key_of(house, file_id))

    assert_damaged(api.get(f"/v1/files/{file_id}/content"), file_id)

    assert f"{key_of(house, file_id)} of {file_id} is missing" in caplog.text
    assert api.get(f"/v1/files/{other}/content").content == ROW + ROW


def test_a_file_of_results_that_is_missing_cannot_be_uploaded_again(api: TestClient, house: House) -> None:
    file_id, _ = post(api).json()["id"], post(api, ROW + ROW)
    house.blobs.delete(key_of(house, file_id))
    with house.database.write() as session:
        session.execute(update(File).values(purpose="fine-tune-results"))

    message = api.get(f"/v1/files/{file_id}/content").json()["error"]["message"]

    assert message.endswith(files.RESTORE_RESULTS) and "pload" not in message


def test_a_file_of_a_store_that_is_empty_is_a_503_that_clients_ask_again(
    api: TestClient, house: House
) -> None:
    """The folder is not mounted, or the bucket is another one: nothing says that the file is lost."""
    file_id = post(api).json()["id"]
    house.blobs.delete(key_of(house, file_id))

    answer = api.get(f"/v1/files/{file_id}/content")

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "2"


def test_nothing_is_uploaded_into_a_store_that_has_lost_its_blobs(api: TestClient, house: House) -> None:
    """The first new file would make all others look deleted, and be lost itself when the right store is back."""
    upload = api.post(
        "/v1/uploads", json={"filename": "a", "bytes": 1, "mime_type": "text/jsonl", "purpose": "fine-tune"}
    ).json()
    house.blobs.delete(key_of(house, post(api).json()["id"]))

    answers = [post(api), api.post(f"/v1/uploads/{upload['id']}/parts", files={"data": b"x"})]

    assert [answer.status_code for answer in answers] == [503, 503]
    assert list(house.blobs.list("")) == []


@pytest.mark.both_databases
def test_a_file_that_is_deleted_while_a_download_begins_is_a_404(api: TestClient, house: House) -> None:
    class DeletedMeanwhile(FolderBlobs):
        def open(self, key: str, **options: int) -> Iterator[bytes]:
            with house.database.write() as session:
                files.delete(Work(session), house.project.id, file_id)
            self.delete(key)
            return super().open(key, **options)

    blobs = DeletedMeanwhile(house.folder / "blobs")
    house.app.state.service = replace(house.app.state.service, blobs=blobs)
    file_id = post(api).json()["id"]

    answer = api.get(f"/v1/files/{file_id}/content")

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, None)
    assert answer.json()["error"]["message"] == f"No such File object: {file_id}"


def test_a_small_file_that_the_store_itself_finds_damaged_is_a_410(api: TestClient, house: House) -> None:
    """S3 has the hash of a blob of one part, which is compared after its last byte."""

    class Corrupt(FolderBlobs):
        def open(self, key: str, **options: int) -> Iterator[bytes]:
            yield from super().open(key, **options)
            raise BlobCorrupt(key)

    blobs = Corrupt(house.folder / "blobs")
    house.app.state.service = replace(house.app.state.service, blobs=blobs)
    file_id = post(api).json()["id"]

    assert_damaged(api.get(f"/v1/files/{file_id}/content"), file_id)


def test_a_small_file_that_arrives_in_pieces_is_whole_or_a_410(api: TestClient, house: House) -> None:
    """A connection to the store that broke and was taken up again gives less than a chunk at a time."""

    class InPieces(FolderBlobs):
        def open(self, key: str, **options: int) -> Iterator[bytes]:
            return super().open(key, chunk_size=5)

    blobs = InPieces(house.folder / "blobs")
    house.app.state.service = replace(house.app.state.service, blobs=blobs)
    file_id = post(api).json()["id"]
    assert api.get(f"/v1/files/{file_id}/content").content == ROW

    house.blobs.put_bytes(key_of(house, file_id), flipped(ROW))

    assert_damaged(api.get(f"/v1/files/{file_id}/content"), file_id)


def test_a_large_file_comes_back_byte_for_byte(api: TestClient, house: House) -> None:
    file_id = post(api).json()["id"]
    content = make_large(house, file_id)

    assert api.get(f"/v1/files/{file_id}/content").content == content


@pytest.fixture
def server(house: House) -> Iterator[str]:
    """The house's application behind a real port; its URL."""
    config = uvicorn.Config(house.app, log_level="critical", log_config=None, lifespan="off")
    server = Server(config, house.app.state.service.shutdown)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("damage", [flipped, lambda content: content[:-1], lambda content: content + b"x"])
def test_the_client_of_a_large_file_that_is_damaged_sees_an_incomplete_body(
    api: TestClient, house: House, server: str, caplog: pytest.LogCaptureFixture, damage: Callable[..., Any]
) -> None:
    file_id = post(api).json()["id"]
    content = damage(make_large(house, file_id))
    house.blobs.put_bytes(key_of(house, file_id), content)
    received = bytearray()

    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
        read_into(received, f"{server}/v1/files/{file_id}/content", house.key)

    assert content.startswith(received)
    assert 2 * CHUNK_BYTES <= len(received) < len(content)
    assert f"{key_of(house, file_id)} of {file_id} is damaged" in caplog.text


def read_into(received: bytearray, url: str, key: str) -> None:
    with httpx.stream("GET", url, headers={"Authorization": f"Bearer {key}"}, timeout=20) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_bytes():
            received += piece


def test_a_download_reads_one_chunk_ahead_of_the_client(house: House, api: TestClient) -> None:
    file_id = post(api).json()["id"]
    make_large(house, file_id)
    read = []

    class Counted(FolderBlobs):
        def open(self, key: str, **options: int) -> Iterator[bytes]:
            for chunk in super().open(key, **options):
                read.append(len(chunk))
                yield chunk

    with house.database.read() as session:
        file = files.get(session, house.project.id, file_id)
    content = files.read_content(Counted(house.folder / "blobs"), file)

    ahead = [len(read) - sent for sent, _ in enumerate(content, 1)]

    assert ahead == [1, 1, 1, 0]


@pytest.mark.both_databases
def test_results_come_back_as_csv(api: TestClient, house: House) -> None:
    file_id = post(api).json()["id"]
    with house.database.write() as session:
        session.execute(update(File).values(purpose="fine-tune-results"))

    assert api.get(f"/v1/files/{file_id}/content").headers["content-type"].startswith("text/csv")


def test_fields_may_come_after_the_file(api: TestClient) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n'
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
    )

    answer = api.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})

    assert answer.json()["bytes"] == len(b"{}\n")


@pytest.mark.parametrize("path", ["../../etc/train.jsonl", r"C:\data\train.jsonl"])
def test_of_a_path_only_the_file_name_is_kept(api: TestClient, path: str) -> None:
    assert post(api, name=path).json()["filename"] == "train.jsonl"


@pytest.mark.both_databases
def test_a_name_in_any_script_survives(api: TestClient) -> None:
    file_id = post(api, name="données 数据.jsonl").json()["id"]

    assert api.get(f"/v1/files/{file_id}").json()["filename"] == "données 数据.jsonl"
    assert "%E6%95%B0" in api.get(f"/v1/files/{file_id}/content").headers["content-disposition"]


DISPOSITIONS = {
    "encoded alone": "filename*=UTF-8''%C3%A9.jsonl",
    "beside a name for old servers": "filename=\"e.jsonl\"; filename*=UTF-8''%C3%A9.jsonl",
    "in another encoding": "filename*=ISO-8859-1'fr'%E9.jsonl",
    "in pieces": "filename*0*=UTF-8''%C3%A9; filename*1=.jsonl",
    "quoted, as some clients do": "filename*=\"UTF-8''%C3%A9.jsonl\"",
    "with a path": "filename*=UTF-8''..%2F..%2F%C3%A9.jsonl",
}


@pytest.mark.parametrize("parameters", DISPOSITIONS.values(), ids=DISPOSITIONS.keys())
def test_an_encoded_file_name_is_kept(api: TestClient, parameters: str) -> None:
    body = (
        f'--b\r\nContent-Disposition: form-data; name="file"; {parameters}\r\n\r\n{{}}\n\r\n'
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
    )

    answer = api.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})

    assert answer.json()["filename"] == "é.jsonl"


def test_a_quoted_file_name_that_looks_encoded_is_kept_as_it_is(api: TestClient) -> None:
    name = "a; filename*=UTF-8''b.jsonl"

    assert post(api, name=name).json()["filename"] == name


def test_training_data_that_no_job_reads_is_refused_and_leaves_nothing_behind(
    api: TestClient, house: House
) -> None:
    refused = post(api, b"question,answer\n1 + 1?,2\n", name="train.csv")

    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "message": "train.csv is not a dataset: the file is CSV with the columns question, answer; write one object "
        "per line. `regraft convert FILE --to rft|sft` does that.",
        "type": "invalid_request_error",
        "param": "file",
        "code": "invalid_file_format",
    }
    assert list(house.blobs.list("")) == []
    assert api.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("purpose", ["evals", "batch"])
def test_a_file_for_evals_or_a_batch_that_is_not_jsonl_is_named(api: TestClient, purpose: str) -> None:
    refused = post(api, b"question,answer\n1 + 1?,2\n", name="rows.csv", purpose=purpose)

    assert refused.json()["error"]["message"] == (
        "rows.csv is not JSONL: the file is CSV with the columns question, answer; write one object per line."
    )


def test_a_file_larger_than_allowed_leaves_nothing_behind(api: TestClient, house: House) -> None:
    answer = post(api, b"x" * ((1 << 20) + 1))

    assert answer.status_code == 413
    assert answer.json()["error"]["param"] == "file"
    assert stored(house) == []
    assert api.get("/v1/files").json()["data"] == []


def test_a_file_exactly_as_large_as_allowed_is_fine(api: TestClient) -> None:
    assert post(api, b"x" * (1 << 20)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"purpose": "nonsense"}, "purpose", "invalid_value"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds", "missing_required_parameter"),
        ({"expires_after[anchor]": "now"}, "expires_after.anchor", "invalid_value"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            "expires_after.seconds",
            "integer_below_min_value",
        ),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"},
            "expires_after.seconds",
            "invalid_type",
        ),
        ({"colour": "red"}, "colour", "unknown_parameter"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_and_leaves_nothing_behind(
    api: TestClient, house: House, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = post(api, **fields)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert stored(house) == []


@pytest.mark.parametrize("purpose", ["assistants", "batch", "evals", "user_data", "vision"])
def test_files_of_openais_other_purposes_are_kept_for_their_owner(
    api: TestClient, upload: Callable[..., str], purpose: str
) -> None:
    upload()
    made = post(api, b"anything", purpose=purpose).json()

    assert made["purpose"] == purpose
    listed = api.get("/v1/files", params={"purpose": purpose}).json()["data"]
    assert [file["id"] for file in listed] == [made["id"]]
    assert api.get(f"/v1/files/{made['id']}/content").content == b"anything"
    assert api.delete(f"/v1/files/{made['id']}").json()["deleted"] is True


def test_another_purpose_is_told_which_there_are(api: TestClient) -> None:
    message = post(api, purpose="fine-tune-results").json()["error"]["message"]

    assert message == (
        "Invalid value: 'fine-tune-results'. Supported values are: "
        "'assistants', 'batch', 'evals', 'fine-tune', 'user_data' or 'vision'."
    )


@pytest.mark.parametrize("content", [b"", b" \r\n\n"])
@pytest.mark.parametrize("purpose", ["fine-tune", "evals", "batch"])
def test_a_file_that_is_empty_or_has_white_space_only_is_refused(
    purpose: str, content: bytes, api: TestClient, house: House
) -> None:
    answer = post(api, content, purpose=purpose)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert answer.json()["error"]["message"] == "The file is empty."
    assert stored(house) == []


def test_a_file_that_starts_with_much_white_space_is_told_how_to_remove_it(api: TestClient) -> None:
    answer = post(api, b"\n" * (64 << 10) + b"{}\n")

    assert answer.status_code == 400
    assert "the file starts with 64 KiB of white space; remove it." in answer.json()["error"]["message"]


def test_a_form_without_a_file_is_refused(api: TestClient) -> None:
    answer = api.post("/v1/files", data={"purpose": "fine-tune"}, files={"other": b"x"})

    assert answer.status_code == 400


def test_a_form_with_a_field_twice_is_refused(api: TestClient) -> None:
    parts: Any = [("purpose", (None, "fine-tune")), ("purpose", (None, "evals")), ("file", ("a.jsonl", ROW))]

    answer = api.post("/v1/files", files=parts)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The form has 'purpose' twice."
    assert answer.json()["error"]["param"] == "purpose"


HALF = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nhalf a fi'


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"not a form"),
        ("multipart/form-data; boundary=b", HALF),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n"),
        ("multipart/form-data; boundary=" + "b" * 500, b"--b"),
    ],
)  # fmt: skip
def test_what_is_no_form_or_only_half_of_one_is_refused(
    api: TestClient, house: House, content_type: str, body: bytes
) -> None:
    answer = api.post("/v1/files", content=body, headers={"content-type": content_type})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert stored(house) == []


@pytest.mark.both_databases
def test_a_file_expires_when_asked_to(api: TestClient, house: House) -> None:
    file = post(
        api, **untyped({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    ).json()
    assert file["expires_at"] == file["created_at"] + 3600
    assert api.get(f"/v1/files/{file['id']}").status_code == 200

    with house.database.write() as session:
        session.execute(update(File).values(expires_at=now() - 1))

    assert api.get(f"/v1/files/{file['id']}").status_code == 404


@pytest.mark.both_databases
def test_a_deleted_file_is_gone_for_its_owner(api: TestClient) -> None:
    file_id = post(api).json()["id"]

    assert api.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    for url in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert api.get(url).status_code == 404
    assert api.delete(f"/v1/files/{file_id}").status_code == 404
    assert api.get("/v1/files").json()["data"] == []


def test_an_unknown_file_has_openais_error(api: TestClient) -> None:
    answer = api.get("/v1/files/file-abc123")

    assert answer.json()["error"] == {
        "message": "No such File object: file-abc123",
        "type": "invalid_request_error",
        "param": "id",
        "code": None,
    }


@pytest.mark.both_databases
def test_files_are_listed_newest_first_page_by_page(api: TestClient) -> None:
    ids = [post(api, name=f"{number}.jsonl").json()["id"] for number in range(5)]

    first = api.get("/v1/files", params={"limit": 2}).json()
    second = api.get("/v1/files", params={"limit": 2, "after": first["last_id"]}).json()
    last = api.get("/v1/files", params={"limit": 2, "after": second["last_id"]}).json()

    seen = [file["id"] for page in (first, second, last) for file in page["data"]]
    assert seen == ids[::-1]
    assert [page["has_more"] for page in (first, second, last)] == [True, True, False]
    assert (first["first_id"], first["last_id"]) == (ids[4], ids[3])


@pytest.mark.both_databases
def test_files_can_be_listed_oldest_first(api: TestClient) -> None:
    ids = [post(api).json()["id"] for _ in range(3)]

    listed = api.get("/v1/files", params={"order": "asc", "after": ids[0]}).json()

    assert [file["id"] for file in listed["data"]] == ids[1:]


@pytest.mark.both_databases
def test_files_can_be_listed_by_purpose(api: TestClient, upload: Callable[..., str]) -> None:
    upload()

    assert api.get("/v1/files", params={"purpose": "fine-tune-results"}).json()["data"] == []
    assert len(api.get("/v1/files", params={"purpose": "fine-tune"}).json()["data"]) == 1


@pytest.mark.both_databases
def test_a_page_has_no_more_than_a_thousand_files_and_openais_client_reads_on(
    house: House, api: TestClient
) -> None:
    rows = [
        {"id": f"file-{number:04}", "project_id": house.project.id, "filename": "a.jsonl", "bytes": 1}
        | {"purpose": "fine-tune", "sha256": "", "blob_key": f"files/{number}"}
        for number in range(1001)
    ]
    with house.database.write() as session:
        session.execute(insert(File), rows)
    ids = [row["id"] for row in rows]

    page = api.get("/v1/files", params={"limit": 10000}).json()
    http = house.client()
    client = openai.OpenAI(api_key=house.key, base_url="http://testserver/v1", http_client=http)

    assert (len(page["data"]), page["has_more"]) == (1000, True)
    assert [file.id for file in client.files.list(limit=10000)] == ids[::-1]
    http.close()


def test_a_limit_above_openais_is_refused(api: TestClient) -> None:
    error = api.get("/v1/files", params={"limit": 10001}).json()["error"]

    assert (error["param"], error["code"]) == ("limit", "integer_above_max_value")


def test_an_empty_list_has_no_ends(api: TestClient) -> None:
    assert api.get("/v1/files").json() == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


@pytest.mark.both_databases
def test_a_file_of_known_content_shares_its_blob_within_the_project(
    house: House, api: TestClient, upload: Callable[..., str]
) -> None:
    first, second, other = upload(b"same\n"), upload(b"same\n", name="again.jsonl"), upload(b"other\n")
    form: Any = {"data": {"purpose": "fine-tune"}, "files": {"file": ("theirs.jsonl", b"same\n")}}
    theirs = house.client(house.other_key).post("/v1/files", **form).json()["id"]

    with house.database.read() as session:
        keys = {file.id: file.blob_key for file in session.scalars(select(File))}

    assert keys[first] == keys[second]
    assert len({keys[first], keys[other], keys[theirs]}) == 3
    assert sorted(house.blobs.list("projects/")) == sorted(set(keys.values()))
    assert api.delete(f"/v1/files/{first}").json()["deleted"]
    assert api.get(f"/v1/files/{second}/content").content == b"same\n"


def test_a_file_does_not_share_a_blob_that_is_damaged_or_about_to_go(
    house: House, api: TestClient, upload: Callable[..., str]
) -> None:
    first = upload(b"same\n")
    with house.database.read() as session:
        key = session.scalars(select(File.blob_key)).one()
    house.blobs.put_bytes(key, b"damn\n")
    second = upload(b"same\n")
    with house.database.write() as session:
        session.execute(update(File).values(expires_at=now() + 60))
    third = upload(b"same\n")

    assert api.get(f"/v1/files/{first}/content").status_code == 410
    assert {api.get(f"/v1/files/{file}/content").content for file in (second, third)} == {b"same\n"}
    with house.database.read() as session:
        assert len(set(session.scalars(select(File.blob_key)))) == 3
