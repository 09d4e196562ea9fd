"""The console behind a proxy that names the user. Here the browser adds the header that the proxy would."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import select

from core.database.engine import Database
from core.database.tables import Project
from core.settings import Settings
from tests.console.conftest import Accessible
from tests.e2e.conftest import Server, start_server
from worker.cli.service import prepare

pytestmark = pytest.mark.slow

OWN = {"x-regraft-console": "1", "x-auth-user": "ana@example.org"}
LOGIN = {"single_sign_on": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """Its rules name the project that its first start makes."""
    folder = tmp_path_factory.mktemp("server")
    settings = Settings(data_dir=folder)
    prepare(settings)
    database = Database(settings.database)
    with database.read() as session:
        project = session.scalars(select(Project.id)).one()
    database.close()
    server = start_server(
        folder,
        tiny_model,
        REGRAFT_SSO_HEADER="X-Auth-User",
        REGRAFT_SSO_PROXIES=json.dumps(["127.0.0.1"]),
        REGRAFT_SSO_RULES=json.dumps([{"user": "ana@example.org", "project": project, "scope": "write"}]),
    )
    yield server
    server.stop()


def test_a_user_whom_the_proxy_names_sees_the_jobs_at_once(
    page: Page, server: Server, accessible: Accessible
) -> None:
    page.context.set_extra_http_headers({"X-Auth-User": "ana@example.org"})

    page.goto("/")

    page.get_by_role("heading", name="Jobs", exact=True).wait_for()
    expect(page.get_by_text("ana@example.org, write")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("button", name="Log in with single sign-on")).to_be_visible()
    accessible(page)
    page.get_by_role("button", name="Log in with single sign-on").click()
    page.get_by_role("heading", name="Jobs", exact=True).wait_for()


def test_the_server_takes_the_address_of_the_connection_and_not_the_forwarded_one(server: Server) -> None:
    """uvicorn believes X-Forwarded-For of 127.0.0.1, so a stranger's address behind the proxy changes nothing."""
    forwarded = OWN | {"x-forwarded-for": "192.0.2.9"}

    assert httpx.post(f"{server.base_url}/regraft/session", json=LOGIN, headers=forwarded).status_code == 200
