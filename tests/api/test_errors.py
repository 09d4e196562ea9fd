import errno
import json
import re
import socket
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psycopg.errors
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from fastapi import APIRouter
from fastapi.routing import APIRoute
from sqlalchemy.exc import InternalError, OperationalError
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from api.app import MAX_JSON_BYTES
from api.http.json_bodies import UniqueKeysRoute
from core.database.engine import Database
from core.storage import disk
from core.storage.self_test import BETWEEN_SECONDS, RepeatedSelfTest
from core.storage.store import BlobWriter, FolderBlobs
from core.telemetry import logs
from tests.api.conftest import Clock, House

if TYPE_CHECKING:
    from httpx2 import Response

JOBS = "/v1/fine_tuning/jobs"


def broken_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/v1/broken")
    def broken() -> None:
        raise RuntimeError("the password is hunter2")

    return router


def envelope(answer: "Response", status: int) -> Any:
    """The error, after checking that it has OpenAI's shape and headers."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["openai-version"] == "2020-10-01"
    assert answer.headers["openai-processing-ms"].isdigit()
    assert answer.headers["x-content-type-options"] == "nosniff"
    return answer.json()["error"]


def test_an_unknown_url(api: TestClient) -> None:
    assert envelope(api.get("/v1/nothing"), 404)["message"] == "Invalid URL (GET /v1/nothing)"


@pytest.mark.parametrize("path", ["/v1/v1/models", "/openai/v1/v1/models"])
def test_a_base_url_with_v1_twice_is_named(api: TestClient, path: str) -> None:
    assert envelope(api.get(path), 404)["message"] == (
        f"Invalid URL (GET {path}); the path has /v1 twice: check the client's base URL"
    )


def test_a_method_that_the_url_does_not_have(api: TestClient) -> None:
    answer = api.put(JOBS)

    assert envelope(answer, 405)["code"] == "method_not_supported"
    assert answer.headers["allow"] == "GET, POST"


def test_a_mounted_application_names_its_own_methods(house: House, api: TestClient) -> None:
    async def get_only(scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(405, headers={"Allow": "GET"})

    house.app.mount("/mounted", get_only)

    answer = api.put("/mounted/page")

    assert envelope(answer, 405)["code"] == "method_not_supported"
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/files/import"),
        ("POST", "/openai/files/import"),
        ("POST", "/v1/responses/compact"),
        ("PATCH", "/v1/models/tiny"),
        ("PUT", "/v1/fine_tuning/jobs/ftjob-1"),
    ],
)
def test_a_path_that_only_an_id_of_another_route_matches_is_an_unknown_url(
    api: TestClient, method: str, path: str
) -> None:
    answer = api.request(method, path, json={})

    error = envelope(answer, 404)
    assert (error["code"], error["message"]) == (
        "unknown_url",
        f"Invalid URL ({method} {path})",
    )
    assert "allow" not in answer.headers


def test_fields_that_do_not_fit_each_other_are_an_error_of_the_first_that_is_named(api: TestClient) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}

    error = envelope(api.post("/v1/chat/completions", json=body), 400)

    assert error["param"] == "top_logprobs"
    assert error["message"] == "Invalid request: 'top_logprobs' needs 'logprobs' to be true."


def test_embeddings_name_the_model_that_cannot_embed(house: House, api: TestClient) -> None:
    body = {"model": "text-embedding-3-small", "input": ["a"], "encoding_format": "base64"}

    error = envelope(api.post("/v1/embeddings", json=body), 404)
    azure = "/openai/deployments/text-embedding-3-small/embeddings?api-version=2025-04-01-preview"

    assert envelope(api.post(azure, json=body), 404) == error
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'text-embedding-3-small' cannot create embeddings" in error["message"]
    assert house.client().post("/v1/embeddings", json=body).status_code == 401


def test_a_body_that_is_not_json(api: TestClient) -> None:
    answer = api.post(JOBS, content=b'{"model": ', headers={"content-type": "application/json"})

    assert "could not parse the JSON body" in envelope(answer, 400)["message"]


@pytest.mark.parametrize(
    ("body", "got"),
    [(b"[]", "an array"), (b"3", "an integer"), (b'"text"', "a string"), (b"false", "a boolean")],
)
def test_a_body_that_is_json_but_no_object(api: TestClient, body: bytes, got: str) -> None:
    answer = api.post(JOBS, content=body, headers={"content-type": "application/json"})

    message = envelope(answer, 400)["message"]
    assert message == f"Invalid request body: expected a JSON object, but got {got} instead."


def test_a_body_that_is_missing(api: TestClient) -> None:
    answer = api.post(JOBS, content=b"", headers={"content-type": "application/json"})

    assert "expected a JSON object" in envelope(answer, 400)["message"]


def test_a_body_that_does_not_say_it_is_json(api: TestClient) -> None:
    answer = api.post(JOBS, content=b"{}", headers={"content-type": "text/plain"})

    assert "Content-Type: application/json" in envelope(answer, 400)["message"]


@pytest.mark.parametrize(
    "body", [b"\xff\xfe{}", b"[" * 100_000, b"1" * 5000, b'{"seed": NaN}', b'{"model": "\\ud83d"}']
)
def test_a_body_that_no_json_parser_should_take(api: TestClient, body: bytes) -> None:
    envelope(api.post(JOBS, content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"training_file": "file-a", "model": "tiny", "training_file": "file-b"}', "training_file"),
        (b'{"metadata": {"a": "1", "\\u0061": "2"}}', "a"),
        (b'[{"a": 1, "a": 1}]', "a"),
    ],
)
@pytest.mark.parametrize("path", [JOBS, "/v1/evals", "/v1/chat/completions", "/v1/regraft/estimate"])
def test_a_key_that_a_body_has_twice_is_named(api: TestClient, path: str, body: bytes, key: str) -> None:
    error = envelope(api.post(path, content=body, headers={"content-type": "application/json"}), 400)

    message = f"The body of the request has the key '{key}' twice in one object; keep one of them."
    assert (error["message"], error["param"], error["code"]) == (message, key, "duplicate_key")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model": NaN}', "has NaN, which JSON does not know; send null or a number"),
        (b'{"model": -Infinity}', "has -Infinity, which JSON does not know; send null or a number"),
        ('{"model": "é"}'.encode("latin-1"), "is not UTF-8 at byte 11; send JSON as UTF-8"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nests objects and arrays too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "has an integer of more than 4,300 digits"),
    ],
    ids=["nan", "infinity", "latin-1", "deep", "digits"],
)
def test_a_body_that_is_no_json_says_why(api: TestClient, body: bytes, reason: str) -> None:
    answer = api.post("/v1/fine_tuning/jobs", content=body, headers={"content-type": "application/json"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert error["message"] == f"The body of the request {reason}."


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model": "\\ud83d"}', r"the lone surrogate '\ud83d', which is not text"),
        (b'{"seed": 1e999}', "a number beyond 1.8e308, which is infinity"),
    ],
)
def test_a_value_that_cannot_be_stored_says_why(api: TestClient, body: bytes, reason: str) -> None:
    answer = api.post("/v1/fine_tuning/jobs", content=body, headers={"content-type": "application/json"})

    assert envelope(answer, 400)["message"] == f"Invalid request: the body contains {reason}."


def test_every_route_that_takes_json_names_such_a_key(house: House) -> None:
    routes = [route for route in house.app.routes if isinstance(route, APIRoute) and route.body_field]

    assert len(routes) > 30
    assert [route.path for route in routes if not isinstance(route, UniqueKeysRoute)] == []


def test_equal_keys_of_different_objects_are_no_duplicates(api: TestClient) -> None:
    body = {"grader": {"type": "text_similarity", "name": "a", "x": {"type": 1, "name": 2}}}

    answer = api.post("/v1/fine_tuning/alpha/graders/validate", json=body)

    assert answer.json()["error"]["code"] != "duplicate_key"


def test_a_body_too_large_to_hold(api: TestClient) -> None:
    answer = api.post(JOBS, content=b" " * (MAX_JSON_BYTES + 1), headers={"content-type": "application/json"})

    assert envelope(answer, 413)["code"] == "payload_too_large"


@pytest.mark.both_databases
def test_a_crash_tells_the_request_id_and_nothing_else(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.app.include_router(broken_routes())
    caplog.handler.setFormatter(logs.TextFormatter())
    answer = house.client(house.key).get("/v1/broken")

    error = envelope(answer, 500)
    assert error["type"] == "server_error"
    assert "hunter2" not in answer.text
    assert answer.headers["x-request-id"] in error["message"]
    assert f"request failed: GET /v1/broken [request_id={answer.headers['x-request-id']}]" in caplog.text


def test_a_query_parameter_of_the_wrong_type(api: TestClient) -> None:
    error = envelope(api.get(JOBS, params={"limit": "many"}), 400)

    assert error["message"] == "Invalid type for 'limit': expected an integer, but got a string instead."
    assert (error["param"], error["code"]) == ("limit", "invalid_type")


def test_a_cursor_that_is_in_no_list(api: TestClient) -> None:
    assert envelope(api.get(JOBS, params={"after": "ftjob-nothing"}), 400)["param"] == "after"


def test_a_wrong_key(house: House) -> None:
    answer = house.client("nonsense").get(JOBS)

    assert envelope(answer, 401)["type"] == "invalid_request_error"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_request_id_of_the_callers_is_kept_if_it_is_harmless(api: TestClient) -> None:
    kept = api.get("/healthz", headers={"X-Request-Id": "my-Trace_1"}).headers["x-request-id"]
    replaced = api.get("/healthz", headers={"X-Request-Id": "a b<script>"}).headers["x-request-id"]

    assert kept == "my-Trace_1"
    assert replaced.startswith("req_")


def test_the_openapi_document_is_served_and_names_our_errors(house: House) -> None:
    document = house.client().get("/openapi.json").json()

    responses = document["paths"][JOBS]["post"]["responses"]
    assert responses.keys() == {"200", "400", "401", "403", "404", "413", "429"}
    assert all("/Error'" in str(responses[status]) for status in responses if status != "200")
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_the_openapi_document_of_the_repository_is_the_one_that_a_server_has(house: House) -> None:
    committed = json.loads((Path(__file__).parents[2] / "sdk/openapi.json").read_text())

    assert house.client().get("/openapi.json").json() == committed, "run `make docs`"


@pytest.mark.both_databases
def test_the_service_is_alive_and_ready(house: House) -> None:
    assert house.client().get("/healthz").status_code == 200
    assert house.client().get("/readyz").status_code == 200


@pytest.fixture
def old_tables(house: House) -> Iterator[None]:
    """No migration seems to have been applied. The database is that of other tests, too, so it does not stay so."""
    with house.database.write() as session:
        sql = session.connection().exec_driver_sql
        version = sql("SELECT version_num FROM alembic_version").scalar_one()
        sql("DELETE FROM alembic_version")
    yield
    with house.database.write() as session:
        session.connection().exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{version}')")


@pytest.mark.usefixtures("old_tables")
@pytest.mark.both_databases
def test_a_service_whose_tables_are_old_is_alive_and_not_ready(house: House) -> None:
    assert house.client().get("/healthz").status_code == 200
    assert "migrations" in envelope(house.client().get("/readyz"), 503)["message"]


@pytest.fixture(params=["older", "later"])
def other_tables(request: pytest.FixtureRequest, house: House) -> Iterator[str]:
    """The schema of another version, without a column that this one reads. Yields which."""
    with house.database.write() as session:
        sql = session.connection().exec_driver_sql
        own = sql("SELECT version_num FROM alembic_version").scalar_one()
        if request.param == "older":
            sql("DELETE FROM alembic_version")
        else:
            sql("UPDATE alembic_version SET version_num = '9999'")
        sql("ALTER TABLE webhook_endpoints RENAME COLUMN thresholds TO other")
    yield request.param
    with house.database.write() as session:
        sql = session.connection().exec_driver_sql
        sql("ALTER TABLE webhook_endpoints RENAME COLUMN other TO thresholds")
        sql("DELETE FROM alembic_version")
        sql(f"INSERT INTO alembic_version VALUES ('{own}')")


@pytest.mark.both_databases
def test_a_request_to_the_schema_of_another_version_is_a_503_by_name(
    api: TestClient, other_tables: str
) -> None:
    """Not an error of the service: it passes with the migration, or with the upgrade of this API."""
    answer = api.get("/v1/webhook_endpoints")

    assert (
        f"schema is {'of a ' if other_tables == 'later' else ''}{other_tables}"
        in envelope(answer, 503)["message"]
    )
    assert answer.headers["retry-after"]
    assert api.get("/v1/files").status_code == 200


@pytest.mark.parametrize("url", ["sqlite:///{folder}", "postgresql+psycopg://nobody@127.0.0.1:1/nothing"])
def test_a_service_without_its_database_is_not_ready(house: House, url: str) -> None:
    away = Database(url.format(folder=house.folder))
    house.app.state.service = replace(house.app.state.service, database=away)

    assert "does not respond" in envelope(house.client().get("/readyz"), 503)["message"]


def test_a_service_whose_database_accepts_no_writes_is_not_ready(
    house: House, migrated_postgres: str
) -> None:
    """As a standby, which answers every read."""
    joint = "&" if "?" in migrated_postgres else "?"
    standby = Database(f"{migrated_postgres}{joint}options=-c%20default_transaction_read_only%3Don")
    house.app.state.service = replace(house.app.state.service, database=standby)

    assert "accepts no writes" in envelope(house.client().get("/readyz"), 503)["message"]
    standby.close()


@pytest.mark.both_databases
def test_a_database_that_is_away_is_a_503_that_clients_ask_again(house: House, api: TestClient) -> None:
    class Away:
        def read(self) -> NoReturn:
            raise OperationalError("select 1", {}, sqlite3.OperationalError("unable to open database file"))

        write = read

    service = house.app.state.service
    house.app.state.service = replace(service, database=Away())

    answer = api.get("/v1/fine_tuning/jobs")

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["code"] == "unavailable"
    assert "database" in answer.json()["error"]["message"]


def refusals() -> int:
    return disk.Refusals.count


class FullFolder(FolderBlobs):
    """Has room for the beginning of a blob."""

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        return FullWriter(super().writer(key))


class FullWriter:
    def __init__(self, writer: BlobWriter) -> None:
        self.commit, self.abort = writer.commit, writer.abort

    def write(self, data: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")


def answers_of(error: Exception) -> Any:
    class Full:
        def read(self) -> NoReturn:
            raise error

        write = read

    return Full()


FULL = {
    "sqlite": OperationalError("insert", {}, sqlite3.OperationalError("database or disk is full")),
    "postgresql": OperationalError("insert", {}, psycopg.errors.DiskFull("could not extend file")),
    "folder": OSError(errno.ENOSPC, "No space left on device"),
    "quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "s3": ClientError({"Error": {"Code": "XMinioStorageFull"}}, "PutObject"),
    "s3 by its status": ClientError({"ResponseMetadata": {"HTTPStatusCode": 507}}, "PutObject"),
}


@pytest.mark.parametrize("full", FULL.values(), ids=FULL.keys())
def test_a_store_without_room_is_507_whichever_it_is(house: House, api: TestClient, full: Any) -> None:
    counted = refusals()
    house.app.state.service = replace(house.app.state.service, database=answers_of(full))

    answer = api.get(JOBS)

    assert envelope(answer, 507)["code"] == "insufficient_storage"
    assert answer.headers["x-should-retry"] == "false"
    assert refusals() == counted + 1


@pytest.mark.parametrize(
    "other", [OSError(errno.EACCES, "no"), ClientError({"Error": {"Code": "EntityTooLarge"}}, "PutObject")]
)
def test_another_error_of_a_store_is_none_of_room(house: House, api: TestClient, other: Any) -> None:
    house.app.state.service = replace(house.app.state.service, database=answers_of(other))

    assert envelope(api.get(JOBS), 500)["code"] == "internal_error"


@pytest.mark.parametrize(
    ("outage", "named"),
    [
        (EndpointConnectionError(endpoint_url="s3"), "blob store"),
        (ClientError({"Error": {"Code": "ExpiredToken"}}, "PutObject"), "blob store"),
        (ClientError({"Error": {"Code": "AccessDenied"}}, "PutObject"), "blob store"),
        (ClientError({"Error": {"Code": "PermanentRedirect"}}, "PutObject"), "blob store"),
        (InternalError("update", {}, psycopg.errors.ReadOnlySqlTransaction("read-only")), "database"),
        (OSError(errno.EMFILE, "Too many open files"), "file descriptors"),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), "name server"),
        (MemoryError(), "main memory"),
    ],
    ids=str,
)
def test_an_outage_is_a_503_that_names_the_resource_and_that_clients_retry(
    house: House, api: TestClient, outage: Any, named: str
) -> None:
    house.app.state.service = replace(house.app.state.service, database=answers_of(outage))

    answer = api.get(JOBS)

    assert envelope(answer, 503)["code"] == "unavailable"
    assert f"The service cannot use its {named} now" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]


def test_a_file_for_which_the_folder_has_no_room_is_507_and_leaves_nothing(
    house: House, api: TestClient
) -> None:
    full = FullFolder(house.folder / "blobs")
    house.app.state.service = replace(house.app.state.service, blobs=full)

    answer = api.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": b"x" * 300_000})

    assert envelope(answer, 507)["code"] == "insufficient_storage"
    assert [path for path in (house.folder / "blobs").rglob("*") if path.is_file()] == []
    assert house.app.state.service.admission.uploads.in_use == 0


def test_a_service_whose_disk_is_nearly_full_is_alive_and_not_ready(house: House) -> None:
    service = house.app.state.service
    settings = service.settings.model_copy(update={"min_free_bytes": 1 << 60})
    house.app.state.service = replace(service, settings=settings)

    assert house.client().get("/healthz").status_code == 200
    assert "The disk of the database has" in envelope(house.client().get("/readyz"), 503)["message"]


class DeniesWrites(FolderBlobs):
    """As a folder, or a bucket, whose rights an operator takes away while the service runs."""

    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        raise PermissionError("denied")


class DoesNotRespond(FolderBlobs):
    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        raise OSError(errno.ENETUNREACH, "no network")


@pytest.mark.parametrize(
    ("store", "status"), [(FolderBlobs, 200), (DoesNotRespond, 200), (DeniesWrites, 503)]
)
def test_a_service_whose_blob_store_refuses_it_is_not_ready_and_an_outage_is_waited_for(
    house: House, store: type[FolderBlobs], status: int
) -> None:
    now = Clock()
    tests = RepeatedSelfTest(now, run=lambda work: work())
    service = replace(house.app.state.service, blobs=store(house.folder / "tested"), store_test=tests)
    house.app.state.service = service

    answer = house.client().get("/readyz")

    assert answer.status_code == status
    if status == 503:
        assert envelope(answer, 503)["message"] == (
            "The blob store refuses the service, which puts an object: see REGRAFT_BLOB_URL."
        )
        house.app.state.service = replace(service, blobs=FolderBlobs(house.folder / "tested"))
        assert house.client().get("/readyz").status_code == 503, "the last result is a moment old"
        now.now += BETWEEN_SECONDS
        assert house.client().get("/readyz").status_code == 200
