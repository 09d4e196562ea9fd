"""A browser on the console of a live server. Every page is checked for accessibility, and for what it must not do."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.e2e.conftest import Server, start_server, tiny_model

__all__ = ["tiny_model"]

expect.set_options(timeout=60_000)  # on a busy machine

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "console"
AXE = CONSOLE / "node_modules/axe-core/axe.min.js"
# Without the network, sandbox and GPU of a desktop.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("server"), tiny_model)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, from the package that `make setup` installs in console/.

    Not for longer: as long as Playwright runs, no other test of this process can run an event loop.
    """
    node = shutil.which("node") or shutil.which("node", path=str(Path(sys.executable).parent))
    assert node is not None, "make setup installs Node.js"
    found = subprocess.run([node, "chromium.mjs"], cwd=CONSOLE, capture_output=True, text=True, check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=FLAGS)
        yield browser
        browser.close()


class Watched:
    """What the pages of a context did that they must not: errors, reports of the content policy, other hosts."""

    def __init__(self, context: BrowserContext, host: str) -> None:
        self.complaints: list[str] = []
        self.expected: list[str] = []  # parts of complaints that a test provokes
        self.host = host
        context.on("request", lambda request: self._asked(request.url))
        context.on("console", lambda message: self._said(message.type, message.text))
        context.on("weberror", lambda error: self.complaints.append(str(error.error)))

    def _asked(self, url: str) -> None:
        if not url.startswith((self.host, "data:")):
            self.complaints.append(f"asked {url}")

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def unexpected(self) -> list[str]:
        return [one for one in self.complaints if not any(part in one for part in self.expected)]


@pytest.fixture(params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def watched(
    browser: Browser, server: Server, request: pytest.FixtureRequest
) -> Iterator[tuple[BrowserContext, Watched]]:
    """A new context. When the test has ended, nothing forbidden has happened in it."""
    theme: Any = request.getfixturevalue("theme") if "theme" in request.fixturenames else "light"
    context = browser.new_context(
        base_url=f"http://127.0.0.1:{server.port}",
        color_scheme=theme,
        locale="en-US",
        viewport={"width": 1280, "height": 900},
    )
    context.set_default_timeout(60_000)
    seen = Watched(context, f"http://127.0.0.1:{server.port}/")
    yield context, seen
    context.close()
    assert seen.unexpected() == []


@pytest.fixture
def page(watched: tuple[BrowserContext, Watched]) -> Page:
    return watched[0].new_page()


@pytest.fixture
def logged_in(page: Page, server: Server) -> Page:
    log_in(page, server.key)
    return page


def log_in(page: Page, key: str) -> None:
    page.goto("/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Jobs", exact=True).wait_for()


@pytest.fixture
def accessible() -> Callable[[Page], None]:
    """Assert that axe finds no violation on the page. It is run by the debugger, not as a script of the page."""

    def check(page: Page) -> None:
        found: Any = page.evaluate(f"async () => {{ {AXE.read_text()}; return await axe.run(document); }}")
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []

    return check


def rows(texts: list[str]) -> bytes:
    lines = [{"messages": [{"role": "user", "content": text}], "answer": "yes"} for text in texts]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
