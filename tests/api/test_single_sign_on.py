"""Single sign-on through a proxy: which users it logs in, and which requests cannot pretend to be the proxy."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from starlette.requests import Request
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from api.app import create_app
from api.http.sign_on import PEER, behind_proxies, identify
from core.database.engine import Work
from core.database.tables import ApiKey, AuditEntry
from core.errors import InvalidApiKey
from core.service.archiving import archive_project
from core.settings import Settings
from core.tenancy import keys, tenants
from tests.api.conftest import House
from tests.api.test_sessions import OWN

PROXY, STRANGER = "10.0.0.7", "192.0.2.9"
USER, GROUPS = "x-auth-user", "x-auth-groups"


class Door:
    """The service behind a proxy at PROXY, with rules for the first project."""

    def __init__(self, house: House, folder: Path, forwarded: str = PROXY, **settings: Any) -> None:
        rules = [
            {"user": "ana@example.org", "project": house.project.id, "scope": "operator"},
            {"group": "ml", "project": house.project.id, "scope": "write"},
            {"user": "gone", "project": "proj_gone", "scope": "read"},
        ]
        known: dict[str, Any] = {
            "data_dir": folder,
            "console_site": console_in(folder),
            "sso_header": "X-Auth-User",
            "sso_groups_header": "X-Auth-Groups",
            "sso_proxies": [PROXY, "fd00:12::/64"],
            "sso_rules": rules,
        }
        service = house.app.state.service
        self.house = house
        self.app = create_app(
            Settings(**known | settings),
            house.database,
            house.blobs,
            service.registry,
            service.backends,
            service.send,
        )
        self.served = behind_proxies(self.app, forwarded)

    def client(self, peer: str | None = PROXY, /, **headers: str) -> TestClient:
        return self.through(self.served if peer is not None else Nameless(self.served), peer, headers)

    def through(self, served: ASGIApp, peer: str | None, headers: Mapping[str, str]) -> TestClient:
        client = TestClient(
            served,
            base_url="http://localhost",
            headers={**OWN, **headers},
            raise_server_exceptions=False,
            client=(peer or "", 50000),
        )
        client.portal = self.house.portal
        return client

    def user(self, name: str, groups: str = "", **more: str) -> TestClient:
        """A browser whose requests come through the proxy."""
        return self.client(**{USER: name, GROUPS: groups} | more)


class Nameless:
    """A connection without an address, as of a Unix socket."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "client": None}, receive, send)


def console_in(folder: Path) -> Path:
    site = folder / "console"
    site.mkdir(exist_ok=True)
    (site / "index.html").write_text("<!doctype html><html><head></head><body></body></html>")
    return site


def log_in(client: TestClient) -> Any:
    return client.post("/v1/regraft/session", json={"single_sign_on": True})


def message(answer: Any) -> str:
    return str(answer.json()["error"]["message"])


@pytest.fixture
def door(house: House, tmp_path: Path) -> Door:
    return Door(house, tmp_path)


@pytest.mark.both_databases
def test_a_user_whom_the_proxy_names_is_logged_in_as_the_rules_say(house: House, door: Door) -> None:
    client = door.user("ana@example.org")

    shown = log_in(client).json()

    assert (shown["user"], shown["scope"], shown["project_id"]) == (
        "ana@example.org",
        "operator",
        house.project.id,
    )
    assert client.get("/v1/fine_tuning/jobs").status_code == 200
    assert client.get("/v1/regraft/workers").status_code == 200
    again = log_in(door.user("ana@example.org")).json()
    assert again["key_id"] == shown["key_id"], "one key for all sessions"
    listed = client.get(f"/v1/organization/projects/{house.project.id}/api_keys").json()["data"]
    assert [(key["name"], key["owner"]) for key in listed if key["owner"]] == [
        ("single sign-on", "ana@example.org")
    ]
    with house.database.read() as session:
        made = session.scalars(select(AuditEntry).where(AuditEntry.target == shown["key_id"])).one()
    assert (made.actor, made.project_id) == ("operator", house.project.id)


def test_members_of_a_group_are_logged_in_by_the_first_rule_that_applies(door: Door) -> None:
    assert log_in(door.user("bob", "hr, ml")).json()["scope"] == "write"
    assert log_in(door.user("ana@example.org", "ml")).json()["scope"] == "operator"


def test_a_rule_may_be_for_everybody(house: House, tmp_path: Path) -> None:
    rules = [{"user": "*", "project": house.project.id, "scope": "read"}]
    door = Door(house, tmp_path, sso_rules=rules)

    client = door.user("ann@example.org")

    assert log_in(client).json()["scope"] == "read"
    assert client.post("/v1/fine_tuning/jobs", json={}).status_code == 403


@pytest.mark.parametrize(
    ("name", "groups"), [("eve", ""), ("eve", "mlx,hr"), ("ANA@example.org", ""), ("gone", ""), ("*", "")]
)
def test_a_user_without_a_rule_or_a_project_has_no_access(door: Door, name: str, groups: str) -> None:
    assert log_in(door.user(name, groups)).status_code == 401


def test_single_sign_on_is_off_unless_the_operator_sets_it(house: House, tmp_path: Path) -> None:
    door = Door(house, tmp_path, sso_header="", sso_groups_header="", sso_proxies=[], sso_rules=[])

    refused = log_in(door.user("ana@example.org"))

    assert (refused.status_code, message(refused)[:21]) == (401, "Single sign-on is off")
    page = {"accept": "text/html"}
    assert "single-sign-on" not in door.client().get("/", headers=page).text
    shown = Door(house, tmp_path).client().get("/", headers=page)
    assert '<meta name="regraft-single-sign-on"' in shown.text
    assert shown.headers["content-security-policy"].startswith("default-src 'none'")


# Attacks.


@pytest.mark.parametrize(
    "peer", [STRANGER, None, "testclient", "fd00:13::1", "::ffff:192.0.2.9", "10.0.0.70", ""]
)
def test_the_header_of_a_stranger_is_refused(
    door: Door, peer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    refused = log_in(door.client(peer, **{USER: "ana@example.org"}))

    assert refused.status_code == 401
    assert "did not come through the proxy" in message(refused)
    assert "is no trusted proxy" in caplog.text
    assert "ana@example.org" not in caplog.text


@pytest.mark.parametrize("peer", ["::ffff:10.0.0.7", "fd00:12::99"])
def test_a_proxy_may_connect_by_ipv6(door: Door, peer: str) -> None:
    assert log_in(door.client(peer, **{USER: "ana@example.org"})).status_code == 200


@pytest.mark.parametrize("forwarded", ["*", STRANGER, PROXY])
def test_a_forwarded_address_makes_nobody_the_proxy(house: House, tmp_path: Path, forwarded: str) -> None:
    """Also where uvicorn believes X-Forwarded-For of the stranger."""
    door = Door(house, tmp_path, forwarded=forwarded)
    claims = {
        "x-forwarded-for": PROXY,
        "forwarded": f"for={PROXY}",
        "x-real-ip": PROXY,
        USER: "ana@example.org",
    }

    assert log_in(door.client(STRANGER, **claims)).status_code == 401


def test_the_address_of_the_browser_that_the_proxy_forwards_does_not_matter(door: Door) -> None:
    assert log_in(door.user("ana@example.org", **{"x-forwarded-for": STRANGER})).status_code == 200


def test_an_application_that_does_not_see_its_connections_trusts_nobody(door: Door) -> None:
    assert log_in(door.through(door.app, PROXY, {USER: "ana@example.org"})).status_code == 401


def test_a_header_that_the_client_sent_and_the_proxy_did_not_replace_is_refused(door: Door) -> None:
    client = door.client()
    both: Any = [*OWN.items(), (USER, "ana@example.org"), (USER, "eve")]

    refused = client.post("/v1/regraft/session", json={"single_sign_on": True}, headers=both)

    assert refused.status_code == 401
    assert "is there 2 times; the proxy must replace it" in message(refused)


def test_groups_that_the_client_sent_beside_those_of_the_proxy_are_refused(door: Door) -> None:
    client = door.client()
    both: Any = [*OWN.items(), (USER, "eve"), (GROUPS, "ml"), (GROUPS, "hr")]

    assert client.post("/v1/regraft/session", json={"single_sign_on": True}, headers=both).status_code == 401


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"   ",
        b"ana@example.org, eve",
        b"ana@example.org,",
        b"ana\x7f",
        "ana\u202e".encode(),
        b"a" * 129,
    ],
)
def test_a_header_that_does_not_name_one_user_is_refused(door: Door, value: bytes) -> None:
    everybody = [{"user": "*", "project": door.house.project.id, "scope": "read"}]
    open_door = Door(door.house, door.app.state.service.settings.data_dir, sso_rules=everybody)
    headers: Any = [*OWN.items(), (USER.encode(), value)]

    answer = open_door.client().post("/v1/regraft/session", json={"single_sign_on": True}, headers=headers)

    assert answer.status_code == 401


def test_a_header_that_is_not_utf_8_is_refused(door: Door) -> None:
    scope = {"type": "http", "headers": [(USER.encode(), b"\xff\xfe")], PEER: PROXY}

    with pytest.raises(InvalidApiKey, match="is not UTF-8"):
        identify(Request(scope), door.app.state.service.settings)


def test_a_header_whose_name_only_looks_like_it_names_nobody(door: Door) -> None:
    """Some proxies strip the header and let this one through, which other servers take for the same."""
    refused = log_in(door.client(**{"x_auth_user": "ana@example.org"}))

    assert refused.status_code == 401
    assert "does not name a user" in message(refused)


def test_the_header_alone_is_no_credential(door: Door) -> None:
    """Otherwise any site could make requests as the user whose browser is logged in at the proxy."""
    assert door.user("ana@example.org").get("/v1/fine_tuning/jobs").status_code == 401


def test_nobody_is_logged_in_from_another_site(door: Door) -> None:
    refused = log_in(door.user("ana@example.org", **{"sec-fetch-site": "cross-site"}))

    assert refused.status_code == 401


def test_a_session_is_worth_nothing_past_the_proxy_or_as_another_user(door: Door) -> None:
    client = door.user("ana@example.org")
    log_in(client)
    cookie = {"cookie": f"regraft_session={client.cookies['regraft_session']}"}

    stolen = [
        door.client(STRANGER, **cookie),
        door.client(STRANGER, **cookie | {USER: "ana@example.org"}),
        door.client(**cookie),
        door.user("bob", "ml", **cookie),
        door.user("", **cookie),
    ]

    assert [one.get("/v1/fine_tuning/jobs").status_code for one in stolen] == [401] * 5
    assert client.get("/v1/fine_tuning/jobs").status_code == 200


def test_a_user_who_leaves_the_group_or_gets_another_scope_loses_the_session(
    house: House, tmp_path: Path, door: Door
) -> None:
    client = door.user("bob", "ml")
    log_in(client)
    assert client.get("/v1/fine_tuning/jobs").status_code == 200

    client.headers[GROUPS] = "hr"
    assert client.get("/v1/fine_tuning/jobs").status_code == 401
    client.headers[GROUPS] = "ml"
    rules = [{"group": "ml", "project": house.project.id, "scope": "read"}]
    changed = Door(house, tmp_path, sso_rules=rules).user("bob", "ml")
    changed.cookies = client.cookies

    assert "another user or another access" in message(changed.get("/v1/fine_tuning/jobs"))
    assert log_in(changed).json()["scope"] == "read"


def test_an_api_key_works_without_the_proxy_whatever_the_header_says(house: House, door: Door) -> None:
    client = door.client(STRANGER, **{USER: "eve", "authorization": f"Bearer {house.key}"})

    assert client.get("/v1/fine_tuning/jobs").status_code == 200


def test_a_large_body_of_a_session_without_the_proxy_is_refused_before_it_is_read(door: Door) -> None:
    client = door.user("ana@example.org")
    log_in(client)
    past = door.client(STRANGER, cookie=f"regraft_session={client.cookies['regraft_session']}")

    assert past.post("/v1/fine_tuning/jobs", json={"suffix": "x" * 100_000}).status_code == 401


def test_the_key_of_a_user_cannot_be_taken_over(house: House, door: Door) -> None:
    """Neither by a key that looks like it, nor by rotating it."""
    path = f"/v1/organization/projects/{house.project.id}/api_keys"
    admin = house.client(house.new_key("admin"))
    mine = admin.post(
        path, json={"name": "single sign-on", "scope": "write", "owner": "ana@example.org"}
    ).json()

    made = log_in(door.user("ana@example.org")).json()["key_id"]

    assert made != mine["id"]
    api = house.client(house.key)
    refused = api.post(f"{path}/{made}/rotate")
    assert (refused.status_code, message(refused)) == (400, message(refused))
    assert "has no text" in message(refused)
    assert api.get(f"{path}/{made}").json()["revoked_at"] is None


def test_revoking_the_key_of_a_user_ends_the_sessions_and_not_the_access(house: House, door: Door) -> None:
    client = door.user("ana@example.org")
    first = log_in(client).json()["key_id"]
    with house.database.write() as session:
        keys.revoke(Work(session), session.get_one(ApiKey, first))

    assert client.get("/v1/fine_tuning/jobs").status_code == 401
    assert log_in(client).json()["key_id"] != first


def test_an_archived_project_lets_nobody_in(house: House, door: Door) -> None:
    with house.database.write() as session:
        archive_project(Work(session), tenants.get_project(session, house.project.id))

    assert "is archived" in message(log_in(door.user("ana@example.org")))


def test_the_name_of_a_user_is_not_in_the_log_of_a_login(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "api")
    log_in(door.user("ana@example.org"))

    assert "ana@example.org" not in caplog.text
