from typing import Any

import pytest
from sqlalchemy import select

from core.database.tables import ApiKey
from core.tenancy import keys
from tests.api.conftest import House


def test_without_a_key_the_answer_says_how_to_send_one(house: House) -> None:
    answer = house.client().get("/v1/files")

    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "Authorization: Bearer" in answer.json()["error"]["message"]


def test_a_wrong_key_is_shown_only_masked(house: House) -> None:
    answer = house.client("sk-somebody-elses-secret-key").get("/v1/files")

    assert answer.status_code == 401
    assert answer.json()["error"]["message"].startswith("Incorrect API key provided: sk-********-key.")
    assert "secret" not in answer.text


def test_a_short_wrong_key_is_not_shown_at_all(house: House) -> None:
    assert "hunter2" not in house.client("hunter2").get("/v1/files").text


@pytest.mark.parametrize("header", ["OpenAI-Organization", "OpenAI-Project"])
@pytest.mark.both_databases
def test_a_header_that_names_another_tenant_is_refused_as_one_that_never_existed(
    house: House, header: str
) -> None:
    with house.database.read() as session:
        other = keys.authenticate(session, house.other_key)[1]
    named = {"OpenAI-Organization": other.organization_id, "OpenAI-Project": other.id}[header]
    unknown = named[:-1] + ("a" if named[-1] != "a" else "b")

    answers = [
        house.client(house.key).get("/v1/files", headers={header: value}) for value in (named, unknown)
    ]

    assert [answer.status_code for answer in answers] == [401, 401]
    assert answers[0].json() == answers[1].json()
    assert answers[0].json()["error"]["code"].startswith("mismatched_")


@pytest.mark.parametrize("header", ["OpenAI-Organization", "OpenAI-Project"])
@pytest.mark.parametrize("named", ["org-at-openai", "org-" + "a" * 24, "proj_" + "a" * 24])
def test_a_header_of_an_account_at_openai_is_ignored(house: House, header: str, named: str) -> None:
    """The ids of OpenAI have 24 random characters, ours more."""
    answer = house.client(house.key).get("/v1/files", headers={header: named})

    assert answer.status_code == 200


def test_a_key_may_stand_in_azures_header(house: House) -> None:
    assert house.client().get("/v1/files", headers={"api-key": house.key}).status_code == 200
    assert house.client().get("/v1/files", headers={"api-key": "wrong"}).status_code == 401


def test_the_authorization_header_wins_over_azures(house: House) -> None:
    assert house.client("wrong").get("/v1/files", headers={"api-key": house.key}).status_code == 401


@pytest.mark.both_databases
def test_headers_that_name_the_keys_own_tenant_are_fine(house: House) -> None:
    own = {"OpenAI-Organization": house.project.organization_id, "OpenAI-Project": house.project.id}

    answer = house.client(house.key).get("/v1/files", headers=own)

    assert answer.status_code == 200
    assert answer.headers["openai-organization"] == house.project.organization_id


def test_every_route_but_the_health_checks_wants_a_key(house: House) -> None:
    """Read from the OpenAPI document, so that a new route cannot be forgotten."""
    open_routes = []
    for path, operations in house.app.openapi()["paths"].items():
        for method in operations:
            body: dict[str, Any] = {"json": {}} if method == "post" else {}
            if house.client().request(method.upper(), path, **body).status_code != 401:
                open_routes.append(path)

    assert sorted(open_routes) == ["/healthz", "/readyz", "/v1/regraft/session"], "the last one logs in"


@pytest.mark.both_databases
def test_the_key_itself_is_not_in_the_database(house: House) -> None:
    with house.database.read() as session:
        stored = session.scalars(select(ApiKey)).all()

    assert all(house.key not in (row.sha256, row.name) for row in stored)
    assert house.key.startswith("rg-")
    assert len(house.key) == 3 + 43


@pytest.mark.both_databases
def test_bootstrap_makes_one_key_and_only_once(house: House) -> None:
    with house.database.write() as session:
        assert keys.bootstrap(session) is None
