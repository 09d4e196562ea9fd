"""A browser on the console of a live server. Every page is checked for accessibility, and for what it must not do."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, ViewportSize, expect, sync_playwright

from tests.e2e.conftest import Server, start_server, tiny_model
from tests.e2e.test_openai_client import GRADER
from tests.hardware import hardware_file
from tests.hyperparameters import in_groups

__all__ = ["tiny_model"]

expect.set_options(timeout=60_000)  # on a busy machine

Accessible = Callable[[Page], None]

TELEPHONE: ViewportSize = {"width": 390, "height": 844}
HOSTILE = '<script>document.title = "taken"</script><img src=x onerror=alert(1)> it\'s \u202egnikool'
QUESTIONS = ["say yes", "say it", "tell me now", "is it a cat"]

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "console"
AXE = CONSOLE / "node_modules/axe-core/axe.min.js"
# A theme is colors only, so no other rule of axe finds anything else in another one.
OF_COLORS = ("color-contrast", "link-in-text-block")
# Without the network, sandbox and GPU of a desktop.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    service = start_server(
        folder,
        tiny_model,
        REGRAFT_WEBHOOK_PRIVATE_HOSTS="127.0.0.1",
        REGRAFT_HARDWARE_FILE=str(hardware_file(folder, price_per_gpu_second=0.01, currency="EUR")),
    )
    yield service
    service.stop()


@pytest.fixture(scope="module")
def server(service: Server, request: pytest.FixtureRequest) -> Iterator[Server]:
    """The service with a project of the file's own, of the file's name. Its jobs end with it: the next would wait."""
    server = service.with_new_project(request.path.stem)
    yield server
    client = server.client()
    for job in client.fine_tuning.jobs.list():
        if job.finished_at is None:
            with suppress(openai.BadRequestError):  # it has just ended
                client.fine_tuning.jobs.cancel(job.id)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium, from the package that `make setup` installs in console/."""
    node = shutil.which("node") or shutil.which("node", path=str(Path(sys.executable).parent))
    assert node is not None, "make setup installs Node.js"
    found = subprocess.run([node, "chromium.mjs"], cwd=CONSOLE, capture_output=True, text=True, check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Not for longer: as long as Playwright runs, no other test of this process can run an event loop."""
    with chromium() as browser:
        yield browser


class Watched:
    """What the pages of a context did that they must not: errors, reports of the content policy, other hosts."""

    def __init__(self, context: BrowserContext, host: str) -> None:
        self.complaints: list[str] = []
        self.expected: list[str] = []  # parts of complaints that a test provokes
        self.host = host
        context.on("request", lambda request: self._asked(request.url))
        context.on("console", lambda message: self._said(message.type, message.text, message.location["url"]))
        context.on("weberror", lambda error: self.complaints.append(str(error.error)))

    def _asked(self, url: str) -> None:
        if not url.startswith((self.host, "data:")):
            self.complaints.append(f"asked {url}")

    def _said(self, kind: str, text: str, url: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{text} at {url}")

    def unexpected(self) -> list[str]:
        return [one for one in self.complaints if not any(part in one for part in self.expected)]


@pytest.fixture
def watched(browser: Browser, server: Server) -> Iterator[tuple[BrowserContext, Watched]]:
    """A new context. When the test has ended, nothing forbidden has happened in it."""
    context = browser.new_context(
        base_url=f"http://127.0.0.1:{server.port}",
        color_scheme="light",
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
def accessible(request: pytest.FixtureRequest) -> Accessible:
    """Assert that axe finds no violation on the page: here, on a telephone, and in the colors of the other theme.

    It is run by the debugger, not as a script of the page.

    With a folder in REGRAFT_SCREENSHOTS (`make screenshots`) a picture of the whole page in each theme is written
    there, too.
    """
    pictures = 0

    def picture(page: Page, theme: str) -> None:
        if folder := os.environ.get("REGRAFT_SCREENSHOTS"):
            name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
            page.screenshot(path=Path(folder) / f"{name}-{pictures}-{theme}.png", full_page=True)

    def check(page: Page) -> None:
        nonlocal pictures
        pictures += 1
        before = page.viewport_size
        assert before is not None
        theme = str(page.evaluate("document.documentElement.dataset.theme"))
        picture(page, theme)
        assert violations(page) == [], (theme, before)
        page.set_viewport_size(TELEPHONE)
        assert violations(page) == [], (theme, TELEPHONE)
        page.set_viewport_size(before)
        other = "light" if theme == "dark" else "dark"
        paint(page, other)
        picture(page, other)
        assert violations(page, OF_COLORS) == [], (other, before)
        paint(page, theme)

    return check


def violations(page: Page, rules: Sequence[str] = ()) -> list[tuple[str, str]]:
    """What axe finds on the page, by these rules or by all: the rule and an element that breaks it."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    found: Any = page.evaluate("rules => axe.run(rules.length ? { runOnly: rules } : {})", rules)
    return [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]]


def paint(page: Page, theme: str) -> None:
    """Show the page in the colors of a theme, without those in between that a button passes through."""
    page.emulate_media(reduced_motion="reduce")
    page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)


def rows(texts: list[str]) -> bytes:
    lines = [{"messages": [{"role": "user", "content": text}], "answer": "yes"} for text in texts]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def written(editor: Locator) -> str:
    """The text of an editor of code."""
    return "\n".join(editor.locator(".cm-line").all_text_contents())


def write(editor: Locator, text: str) -> None:
    """Replace the text of an editor of code by a paste. Brackets and indentation that are typed would be completed."""
    editor.press("Control+a")
    editor.evaluate(
        """(editor, text) => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text/plain", text);
          editor.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
        }""",
        text,
    )


def expect_offered(options: Locator, texts: list[str]) -> None:
    """Wait for the editor's list of completions, and until it takes keys.

    CodeMirror ignores keys for 75 ms after its list has opened (interactionDelay). The page's clock skips these.
    """
    expect(options).to_have_text(texts)
    options.page.clock.install()
    options.page.clock.fast_forward(1000)


def expect_written(editor: Locator, text: str) -> None:
    expect(editor.locator(".cm-line")).to_have_text([line.strip() for line in text.split("\n")])


def readable_on_a_telephone(page: Page) -> None:
    before = page.viewport_size
    assert before is not None
    page.set_viewport_size({"width": 360, "height": 740})
    wider: Any = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0, page.url
    page.set_viewport_size(before)


def copied(page: Page, kind: str, within: Locator | None = None) -> str:
    """The text that the last button of this kind copies, on the page or in a part of it."""
    (within or page).get_by_role("button", name=kind, exact=True).last.click()
    expect(page.get_by_text(f"Copied as {kind}.")).to_be_visible()
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def create(
    client: openai.OpenAI,
    *,
    epochs: int,
    suffix: str,
    texts: list[str] = QUESTIONS,
    model: str = "tiny",
    shadow_grader: dict[str, Any] | None = None,
    **sampling: int,
) -> str:
    files = [
        client.files.create(file=(f"{name}.jsonl", rows(some)), purpose="fine-tune").id
        for name, some in (("train", texts), ("valid", ["tell me", "is it green"]))
    ]
    advanced = {
        "group_size": 4,
        "max_completion_tokens": 3,
        "lora_rank": 4,
        "eval_temperature": 1.0,
    } | sampling
    asked = {"batch_size": 2, "n_epochs": epochs, "eval_interval": 1, "advanced": in_groups(advanced)}
    reinforcement = {"grader": GRADER, "shadow_grader": shadow_grader, "hyperparameters": asked}
    method: Any = {"type": "reinforcement", "reinforcement": reinforcement}
    job = client.fine_tuning.jobs.create(
        model=model, training_file=files[0], validation_file=files[1], suffix=suffix, seed=1, method=method
    )
    return job.id


@pytest.fixture(scope="module")
def finished(server: Server) -> str:
    """A job that has ended, one of whose questions is hostile."""
    client = server.client()
    job = create(client, epochs=2, suffix="finished", texts=[*QUESTIONS, HOSTILE])
    follow = client.get(
        f"/regraft/jobs/{job}/stream", cast_to=object, stream=True, stream_cls=openai.Stream[object]
    )
    for _ in follow:
        pass
    assert client.fine_tuning.jobs.retrieve(job).status == "succeeded"
    return job


def project_of(client: openai.OpenAI) -> str:
    session: Any = client.get("/regraft/session", cast_to=object)
    return str(session["project_id"])
