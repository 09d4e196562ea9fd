"""/docs serves the built documentation without a key, and nothing else from the disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from api.app import create_app
from core.database.engine import Database
from core.settings import Settings
from tests.api.conftest import House


@pytest.fixture
def house(tmp_path: Path, sqlite_database: Database) -> Iterator[House]:
    from tests.api.conftest import open_house

    with open_house(sqlite_database, tmp_path) as house:
        yield house


def client_of(house: House, tmp_path: Path, folder: Path) -> TestClient:
    """A client without a key of a service that looks for the site in `folder`."""
    service = house.app.state.service
    house.app = create_app(
        Settings(data_dir=tmp_path, docs_site=folder),
        house.database,
        house.blobs,
        service.registry,
        service.backends,
        service.send,
    )
    return house.client()


@pytest.fixture
def site(house: House, tmp_path: Path) -> TestClient:
    """A client of a service with a built site."""
    folder = tmp_path / "site"
    (folder / "howto").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>regraft</h1>")
    (folder / "howto" / "index.html").write_text("<h1>Guides</h1>")
    (folder / "search.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    return client_of(house, tmp_path, folder)


def test_pages_need_no_key(site: TestClient) -> None:
    page = site.get("/docs/index.html")

    assert (page.status_code, page.text) == (200, "<h1>regraft</h1>")
    assert site.get("/docs/").text == page.text
    assert site.get("/docs/howto/").text == "<h1>Guides</h1>"
    assert page.headers["content-type"].startswith("text/html")
    assert site.get("/docs/search.json").headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/docs", "/docs/"),
        ("/docs/howto", "http://testserver/docs/howto/"),
    ],
)
def test_folders_redirect_to_their_index(site: TestClient, path: str, location: str) -> None:
    answer = site.get(path, follow_redirects=False)

    assert (answer.status_code, answer.headers["location"]) == (307, location)


def test_browsers_may_load_nothing_from_other_hosts(site: TestClient) -> None:
    policy = site.get("/docs/index.html").headers["content-security-policy"]

    assert "default-src 'self'" in policy
    assert "http" not in policy


def test_a_page_that_has_not_changed_is_not_sent_again(site: TestClient) -> None:
    etag = site.get("/docs/index.html").headers["etag"]

    assert site.get("/docs/index.html", headers={"if-none-match": etag}).status_code == 304


@pytest.mark.parametrize(
    "path",
    [
        "/docs/none.html",
        "/docs/../secret.txt",
        "/docs/%2e%2e/secret.txt",
        "/docs/%2e%2e%2fsecret.txt",
        "/docs/%00",
        "/docs/" + "a" * 300,
    ],
)
def test_nothing_else_is_served(site: TestClient, path: str) -> None:
    answer = site.get(path)

    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_pages_cannot_be_posted_to(site: TestClient) -> None:
    assert site.post("/docs/index.html").status_code == 405


def test_without_a_built_site_there_is_no_page(house: House, tmp_path: Path) -> None:
    assert client_of(house, tmp_path, tmp_path / "site").get("/docs/index.html").status_code == 404
