"""Sessions of the console: what a browser with the cookie may do, and what other sites and names may not."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.app import create_app
from api.http import console
from core.database.tables import ApiKey, ConsoleSession, now
from core.settings import Settings
from core.tenancy import keys, sessions
from tests.api.conftest import House

OWN = {"sec-fetch-site": "same-origin", "x-regraft-console": "1"}
LOCAL = "http://localhost"


def browser(house: House, base_url: str = LOCAL, **headers: str) -> TestClient:
    client = TestClient(house.app, base_url=base_url, headers=OWN | headers, raise_server_exceptions=False)
    client.portal = house.portal
    return client


def log_in(client: TestClient, key: str) -> Any:
    answer = client.post("/v1/regraft/session", json={"api_key": key})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.both_databases
def test_a_session_may_do_what_its_key_may_until_it_is_ended(house: House) -> None:
    client = browser(house)
    shown = log_in(client, house.key).json()

    assert (shown["key_id"], shown["scope"], shown["project_id"]) == (
        house.key_id(),
        "operator",
        house.project.id,
    )
    assert client.get("/v1/regraft/session").json() == shown
    assert client.get("/v1/fine_tuning/jobs").status_code == 200
    assert client.delete("/v1/regraft/session").status_code == 204
    assert client.get("/v1/fine_tuning/jobs").status_code == 401


def test_the_cookie_cannot_be_read_or_sent_by_other_pages_and_is_stored_as_a_hash(house: House) -> None:
    client = browser(house)
    cookie = log_in(client, house.key).headers["set-cookie"]

    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Max-Age=43200" in cookie
    assert "Secure" not in cookie
    token = client.cookies["regraft_session"]
    with house.database.read() as session:
        [row] = session.scalars(select(ConsoleSession)).all()
    assert token not in (row.id, row.sha256)
    assert house.client(token).get("/v1/files").status_code == 401, "a session's token is no API key"


def test_on_https_the_cookie_is_secure_and_of_this_host(house: House) -> None:
    client = browser(house, "https://localhost")
    cookie = log_in(client, house.key).headers["set-cookie"]

    assert cookie.startswith("__Host-regraft_session=")
    assert "Secure" in cookie
    assert "Path=/" in cookie
    assert client.get("/v1/files").status_code == 200


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"sec-fetch-site": "cross-site"}),
        ("GET", {"sec-fetch-site": "same-site"}),
        ("GET", {"sec-fetch-site": "none"}),
        ("GET", {"sec-fetch-site": ""}),
        ("GET", {"sec-fetch-site": None, "x-regraft-console": None}),
        ("POST", {"sec-fetch-site": None, "x-regraft-console": None}),
        ("POST", {"sec-fetch-site": "cross-site"}),
        ("POST", {"x-regraft-console": None}),
        ("DELETE", {"x-regraft-console": None}),
    ],
)
def test_a_request_that_another_site_may_have_made_is_refused(
    house: House, method: str, headers: dict[str, str | None]
) -> None:
    client = browser(house)
    log_in(client, house.key)
    for name, value in headers.items():
        del client.headers[name]
        if value is not None:
            client.headers[name] = value

    answer = client.request(
        method, "/v1/files/file-1" if method == "DELETE" else "/v1/fine_tuning/jobs", json={}
    )

    assert answer.status_code == 401
    assert "session is for the pages of this service" in answer.text


def test_a_browser_that_does_not_name_the_site_shows_by_the_header_that_it_is_this_one(house: House) -> None:
    """On plain http, but for localhost, browsers leave out Sec-Fetch-Site."""
    client = browser(house, "http://192.0.2.1:8000")
    del client.headers["sec-fetch-site"]
    log_in(client, house.key)

    assert client.get("/v1/fine_tuning/jobs").status_code == 200
    assert client.delete("/v1/regraft/session").status_code == 204


def test_nobody_is_logged_in_from_another_site(house: House) -> None:
    client = browser(house, **{"sec-fetch-site": "cross-site"})

    answer = client.post("/v1/regraft/session", json={"api_key": house.key})

    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("evil.example", 401)],
)
def test_names_that_were_rebound_to_this_address_have_no_sessions(
    house: House, host: str, status: int
) -> None:
    answer = browser(house, f"http://{host}").post("/v1/regraft/session", json={"api_key": house.key})

    assert answer.status_code == status
    if status == 401:
        assert "REGRAFT_CONSOLE_HOSTS" in answer.text


@pytest.mark.parametrize(
    "host",
    [
        "",
        "a b",
        "localhost@evil.example",
        "evil.example:99999",
        "evil.example:",
        "localhost:",
        "[::1",
        "local/host",
    ],
)
def test_a_host_that_does_not_parse_has_no_sessions(house: House, host: str) -> None:
    """Starlette would take the socket's own address instead, under which the console is served."""
    client = browser(house, host=host)

    answer = client.post("/v1/regraft/session", json={"api_key": house.key})

    assert answer.status_code == 401
    assert "The Host header" in answer.text


def test_a_name_of_the_operators_has_sessions(house: House, tmp_path: Path) -> None:
    service = house.app.state.service
    house.app = create_app(
        Settings(data_dir=tmp_path, console_hosts=("regraft.example.com",)),
        house.database,
        house.blobs,
        service.registry,
        service.backends,
        service.send,
    )
    log_in(browser(house, "https://regraft.example.com"), house.key)


def test_a_session_has_the_scope_of_its_key(house: House) -> None:
    client = browser(house)
    log_in(client, house.new_key("read"))

    assert client.get("/v1/fine_tuning/jobs").status_code == 200
    assert client.delete("/v1/files/file-1").status_code == 403


@pytest.mark.parametrize("change", ["revoked", "expired", "session expired"])
def test_a_session_ends_with_its_key_and_with_its_own_time(house: House, change: str) -> None:
    client = browser(house)
    log_in(client, house.key)
    changes: dict[str, Any] = {
        "revoked": update(ApiKey).values(revoked_at=1),
        "expired": update(ApiKey).values(expires_at=1),
        "session expired": update(ConsoleSession).values(expires_at=1),
    }
    with house.database.write() as session:
        session.execute(changes[change])

    assert client.get("/v1/fine_tuning/jobs").status_code == 401


@pytest.mark.both_databases
def test_a_login_address_works_once(house: House) -> None:
    with house.database.write() as session:
        key, _ = keys.authenticate(session, house.key)
        token = sessions.invite(session, key)
    client = browser(house)

    first, second = (client.post("/v1/regraft/session", json={"login_token": token}) for _ in range(2))

    assert (first.status_code, second.status_code) == (200, 401)
    assert "was used already" in second.text
    assert house.client(token).get("/v1/files").status_code == 401


@pytest.mark.both_databases
def test_a_login_counts_as_a_request(house: House) -> None:
    house.limit(requests_per_minute=2)
    client = browser(house)

    answers = [client.post("/v1/regraft/session", json={"api_key": house.key}) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.both_databases
def test_a_key_has_twenty_sessions_at_most_and_a_new_one_ends_the_oldest(house: House) -> None:
    other = browser(house)
    log_in(other, house.new_key("read"))
    first, *_, last = clients = [browser(house) for _ in range(sessions.MAX_SESSIONS + 1)]
    for client in reversed(clients):
        log_in(client, house.key)
        with house.database.write() as session:
            session.execute(update(ConsoleSession).values(created_at=ConsoleSession.created_at - 1))

    statuses = [client.get("/v1/files").status_code for client in (last, first, other)]

    assert statuses == [401, 200, 200]
    with house.database.read() as session:
        mine = ConsoleSession.key_id == house.key_id()
        assert len(session.scalars(select(ConsoleSession).where(mine)).all()) == sessions.MAX_SESSIONS


@pytest.mark.both_databases
def test_sessions_of_one_second_end_in_the_order_of_their_creation(house: House) -> None:
    clients = [browser(house) for _ in range(sessions.MAX_SESSIONS + 5)]
    for client in clients:
        log_in(client, house.key)
        with house.database.write() as session:
            session.execute(update(ConsoleSession).values(created_at=now()))

    statuses = [client.get("/v1/files").status_code for client in clients]

    assert statuses == [401] * 5 + [200] * sessions.MAX_SESSIONS


@pytest.mark.parametrize("body", [{"login_token": "none"}, {"api_key": "none"}])
def test_a_login_without_a_valid_credential_opens_no_write_transaction(
    house: House, body: dict[str, str]
) -> None:
    """SQLite has one writer: a second one waits for the end of this one, which waits for the answer."""
    with house.database.write():
        answer = browser(house).post("/v1/regraft/session", json=body)

    assert answer.status_code == 401


def test_logging_in_and_out_is_in_the_audit_log(house: House) -> None:
    client = browser(house)
    log_in(client, house.key)
    client.delete("/v1/regraft/session")

    types = [
        entry["type"] for entry in house.client(house.key).get("/v1/organization/audit_logs").json()["data"]
    ]
    assert types[:2] == ["session.ended", "session.created"]


@pytest.mark.parametrize("body", [{}, {"api_key": "a", "login_token": "b"}, {"api_key": 3}])
def test_a_body_names_one_way_to_log_in(house: House, body: dict[str, Any]) -> None:
    assert browser(house).post("/v1/regraft/session", json=body).status_code == 400


# The page.


@pytest.fixture
def built(house: House, tmp_path: Path) -> TestClient:
    folder = tmp_path / "console"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>console</h1>")
    (folder / "assets" / "index-abc.js").write_text("1")
    (tmp_path / "secret.txt").write_text("secret")
    service = house.app.state.service
    house.app = create_app(
        Settings(data_dir=tmp_path, console_site=folder),
        house.database,
        house.blobs,
        service.registry,
        service.backends,
        service.send,
    )
    return browser(house)


def test_browsers_get_the_page_and_clients_of_the_api_their_error(built: TestClient) -> None:
    page = built.get("/", headers={"accept": "text/html,*/*"})

    assert page.text == "<h1>console</h1>"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert page.headers["cache-control"] == "no-cache"
    assert built.get("/", headers={"accept": "*/*"}).json()["error"]["code"] == "unknown_url"


def test_files_under_hashed_names_are_kept_by_browsers(built: TestClient) -> None:
    file = built.get("/assets/index-abc.js")

    assert file.text == "1"
    assert "immutable" in file.headers["cache-control"]
    for path in (
        "/assets/nothing.js",
        "/assets/..%2f..%2fsecret.txt",
        "/assets/%2e%2e/index.html",
        "/assets/a%00.js",
    ):
        assert built.get(path).status_code == 404, path


def test_a_server_without_a_console_says_so(house: House) -> None:
    app = create_app(
        Settings(data_dir=house.folder, console_site=house.folder / "none"),
        house.database,
        house.blobs,
        house.app.state.service.registry,
        house.app.state.service.backends,
        house.app.state.service.send,
    )
    with TestClient(app) as client:
        answer = client.get("/", headers={"accept": "text/html"})

    assert (answer.status_code, answer.text) == (404, console.NOT_BUILT)
