"""What each scope of a key reaches, read from the OpenAPI document so that no new endpoint is forgotten."""

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database.engine import Work
from core.database.tables import ApiKey, now
from core.tenancy import keys
from core.tenancy.keys import Scope
from tests.api.conftest import OF_EPISODES, House
from tests.present import present

READING_POSTS = {
    "/v1/fine_tuning/alpha/graders/validate",
    "/v1/regraft/estimate",
    "/v1/regraft/files/{file_id}/profile",
    "/v1/regraft/jobs/validate",
    "/v1/regraft/session",  # any key may log in, and out again
}
# OpenAI's reference asks for an admin key to share a checkpoint; any key may see with whom it is shared.
SHARES = re.compile(r"/v1/fine_tuning/checkpoints/.*/permissions")
# About the service as a whole.
OPERATORS = {("get", "/v1/regraft/workers"), ("get", "/v1/regraft/queues")}


def answers(house: House, scope: Scope) -> dict[tuple[str, str], tuple[int, str | None]]:
    """Status and code of every endpoint, for a key with this scope; ids are made up."""
    client = house.client(house.new_key(scope))
    house.app.state.service.shutdown.begin()  # which ends streams that have no end of their own
    found = {}
    for path, operations in house.app.openapi()["paths"].items():
        for method in operations:
            if path.startswith("/v1/"):
                body: dict[str, Any] = {"json": {}} if method in ("post", "put", "patch") else {}
                answer = client.request(method, path, **body)
                error = answer.json().get("error") or {} if answer.status_code not in (200, 204) else {}
                found[method, path] = answer.status_code, error.get("code")
    return found


def refused(house: House, scope: Scope) -> set[tuple[str, str]]:
    return {
        route
        for route, answer in answers(house, scope).items()
        if answer == (403, "insufficient_permissions")
    }


def test_a_key_that_reads_changes_nothing(house: House) -> None:
    everything = answers(house, "admin")

    expected = {
        (method, path)
        for method, path in everything
        if path.startswith("/v1/organization/")
        or (method != "get" and path not in READING_POSTS and not path.startswith(OF_EPISODES))
    } | OPERATORS

    assert refused(house, "read") == expected
    assert len(expected) > 10


def test_a_key_that_writes_administers_nothing(house: House) -> None:
    assert (
        refused(house, "write")
        == {
            (method, path)
            for method, path in answers(house, "admin")
            if path.startswith("/v1/organization/") or (method != "get" and SHARES.match(path))
        }
        | OPERATORS
    )


def test_a_key_that_administers_does_all_but_what_concerns_other_projects(house: House) -> None:
    assert refused(house, "admin") == OPERATORS


def test_the_key_of_an_operator_may_do_everything(house: House) -> None:
    assert refused(house, "operator") == set()


def test_a_refusal_names_the_scope_that_is_missing(house: House) -> None:
    answer = house.client(house.new_key("read")).post("/v1/fine_tuning/jobs", json={})

    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "insufficient_permissions"
    assert "scope 'write'" in error["message"] and "has 'read'" in error["message"]


# The life of a key.


@pytest.fixture
def path(house: House) -> str:
    return f"/v1/organization/projects/{house.project.id}/api_keys"


def test_a_new_key_is_shown_once_and_works(house: House, api: TestClient, path: str) -> None:
    made = api.post(path, json={"name": "ci", "scope": "read", "owner": "ana", "expires_in_days": 2}).json()

    assert house.client(made["value"]).get("/v1/files").status_code == 200
    assert made["redacted_value"] == f"rg-...{made['value'][-4:]}"
    assert made["expires_at"] == pytest.approx(now() + 2 * 86400, abs=5)
    shown = api.get(f"{path}/{made['id']}")
    assert shown.json() == {name: value for name, value in made.items() if name != "value"} | {
        "last_used_at": shown.json()["last_used_at"]
    }
    assert made["value"] not in shown.text + api.get(path).text


def test_a_key_is_made_to_write_unless_told_otherwise(api: TestClient, path: str) -> None:
    assert api.post(path, json={"name": "ci"}).json()["scope"] == "write"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "ci", "scope": "root"}, "scope"),
        ({"name": "ci", "expires_in_days": 0}, "expires_in_days"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused_by_the_name_of_its_field(
    api: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = api.post(path, json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.both_databases
def test_a_revoked_key_is_refused_by_the_next_request(house: House, api: TestClient, path: str) -> None:
    made = api.post(path, json={"name": "ci"}).json()
    client = house.client(made["value"])
    assert client.get("/v1/files").status_code == 200

    assert api.delete(f"{path}/{made['id']}").json()["deleted"]

    assert client.get("/v1/files").json()["error"]["code"] == "invalid_api_key"
    assert api.get(f"{path}/{made['id']}").json()["revoked_at"] is not None


@pytest.mark.both_databases
def test_a_rotated_key_hands_over(house: House, api: TestClient, path: str) -> None:
    old, kept = (api.post(path, json={"name": name}).json() for name in ("old", "kept"))

    new = api.post(f"{path}/{old['id']}/rotate").json()
    api.post(f"{path}/{kept['id']}/rotate", json={"grace_hours": 1})

    statuses = [house.client(key["value"]).get("/v1/files").status_code for key in (old, new, kept)]
    assert statuses == [401, 200, 200]


@pytest.mark.both_databases
def test_an_expired_key_says_that_it_has(house: House) -> None:
    with house.database.write() as session:
        made = keys.create_key(Work(session), house.project, "old", expires_at=now() - 1)

    answer = house.client(made.token).get("/v1/files")

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "expired_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.both_databases
def test_reading_notes_the_keys_use_once_a_minute(house: House, api: TestClient) -> None:
    def last_used() -> int | None:
        with house.database.read() as session:
            return session.get_one(ApiKey, house.key_id()).last_used_at

    before = last_used()
    api.get("/v1/files")
    first = present(last_used())
    with house.database.write() as session:
        session.get_one(ApiKey, house.key_id()).last_used_at = first - 30
    api.get("/v1/files")

    assert before is None
    assert first == pytest.approx(now(), abs=5)
    assert last_used() == first - 30
