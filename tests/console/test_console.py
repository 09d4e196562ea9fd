"""The console in a browser: logging in, a job that is watched, its rollouts, and texts that nobody should trust."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from core.settings import Settings
from tests.console.conftest import Watched, log_in, rows
from tests.e2e.conftest import Server

pytestmark = pytest.mark.slow

Accessible = Callable[[Page], None]
HOSTILE = '<script>document.title = "taken"</script><img src=x onerror=alert(1)> \u202egnikool'
QUESTIONS = ["say yes", "say it", "tell me now", "is it a cat"]
GRADER: Any = {
    "type": "multi",
    "name": "m",
    "graders": {
        "says": {
            "type": "string_check",
            "name": "says",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
            "operation": "ilike",
        },
        "close": {
            "type": "text_similarity",
            "name": "close",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
            "evaluation_metric": "fuzzy_match",
        },
    },
    "calculate_output": "0.5*says+0.5*close",
}


def create(client: openai.OpenAI, *, epochs: int, suffix: str, texts: list[str] = QUESTIONS) -> str:
    files = [
        client.files.create(file=(f"{name}.jsonl", rows(some)), purpose="fine-tune").id
        for name, some in (("train", texts), ("valid", ["tell me", "is it green"]))
    ]
    advanced = {"group_size": 4, "max_completion_tokens": 3, "lora_rank": 4, "eval_temperature": 1.0}
    asked = {"batch_size": 2, "n_epochs": epochs, "eval_interval": 1, "advanced": advanced}
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": asked}}
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=files[0], validation_file=files[1], suffix=suffix, seed=1, method=method
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


def test_the_printed_address_logs_in_once(
    page: Page, server: Server, watched: tuple[BrowserContext, Watched]
) -> None:
    [address] = re.findall(r"one login within 15 minutes: (\S+)", (server.folder / "server.log").read_text())
    page.goto(address)
    page.get_by_role("heading", name="Jobs", exact=True).wait_for()
    assert "t=" not in page.url, "it is not left in the history"
    page.reload()
    page.get_by_role("heading", name="Jobs", exact=True).wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").wait_for()

    watched[1].expected.append("401")
    page.goto(address)

    expect(page.get_by_role("status")).to_contain_text("was used already")


def test_a_wrong_key_is_refused_in_words(page: Page, watched: tuple[BrowserContext, Watched]) -> None:
    watched[1].expected.append("401")
    page.goto("/")
    page.get_by_label("API key").fill("rg-wrong-key")
    page.get_by_role("button", name="Log in").click()

    expect(page.get_by_role("alert")).to_contain_text("Incorrect API key provided")


def test_every_page_is_accessible_in_both_themes(
    page: Page, server: Server, finished: str, theme: str, accessible: Accessible, tmp_path: Path
) -> None:
    page.goto("/")
    page.get_by_label("API key").wait_for()
    accessible(page)
    log_in(page, server.key)
    page.get_by_role("link", name="finished").wait_for()
    accessible(page)
    page.get_by_role("link", name="finished").click()
    page.locator("figure").first.wait_for()
    accessible(page)
    page.get_by_role("link", name="Rollouts").click()
    page.locator("tbody tr").first.wait_for()
    accessible(page)
    page.keyboard.press("g")
    page.get_by_role("heading", name="Group").wait_for()
    accessible(page)
    page.set_viewport_size({"width": 360, "height": 740})
    wider: Any = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0, "readable at 360 px"
    assert page.evaluate("document.documentElement.dataset.theme") == theme


def test_a_running_job_is_watched_paused_and_resumed(logged_in: Page, server: Server) -> None:
    client = server.client()
    job = create(client, epochs=40, suffix="watched")
    logged_in.get_by_role("link", name="watched").click()
    chart = logged_in.locator("figure", has_text="Reward").first
    chart.wait_for()
    points = int(chart.get_attribute("data-points") or 0)

    expect(chart).not_to_have_attribute("data-points", str(points))
    assert int(chart.get_attribute("data-points") or 0) > points, "without a reload"
    logged_in.get_by_role("button", name="Pause").click()
    expect(logged_in.locator(".badge").first).to_contain_text("paused")
    logged_in.get_by_role("button", name="Resume").click()
    expect(logged_in.locator(".badge").first).to_contain_text(re.compile("queued|running"))
    logged_in.on("dialog", lambda dialog: dialog.accept())
    logged_in.get_by_role("button", name="Cancel").click()
    expect(logged_in.locator(".badge").first).to_contain_text("cancelled")
    assert client.fine_tuning.jobs.retrieve(job).status == "cancelled"


def test_a_group_is_read_by_keyboard(logged_in: Page, finished: str) -> None:
    """From the list of a step to the siblings of an answer, and what differs from the best of them."""
    logged_in.goto(f"/#/jobs/{finished}/rollouts?step=1&split=train")
    logged_in.locator("tbody tr").first.wait_for()

    logged_in.keyboard.press("j")
    assert logged_in.locator("tr[aria-selected=true]").count() == 1
    logged_in.keyboard.press("g")
    expect(logged_in.get_by_role("heading", level=1)).to_contain_text("Group")
    expect(logged_in.locator("tbody tr")).to_have_count(4)
    logged_in.keyboard.press("j")
    logged_in.keyboard.press("d")
    expect(logged_in.get_by_role("button", name="Differences")).to_have_attribute("aria-pressed", "true")
    logged_in.keyboard.press("n")
    expect(logged_in.get_by_label("Step")).to_have_value("2")
    logged_in.keyboard.press("/")
    logged_in.keyboard.type("zzz-nothing")
    expect(logged_in.get_by_text("No rollout matches.")).to_be_visible()
    assert "q=zzz-nothing" in logged_in.url, "deep-linkable"


def test_hostile_texts_are_shown_as_text(logged_in: Page, finished: str) -> None:
    logged_in.goto(f"/#/jobs/{finished}/rollouts?step=1&split=train&q=onerror")
    for step in range(1, 7):
        logged_in.goto(f"/#/jobs/{finished}/rollouts?step={step}&split=train")
        logged_in.locator("tbody tr").first.wait_for()
        if (shown := logged_in.get_by_text("onerror=alert(1)")).count():
            break
        for row in logged_in.locator("tbody tr").all():
            row.click()
            if shown.count():
                break
        if shown.count():
            break

    expect(logged_in.get_by_text("<script>document.title").first).to_be_visible()
    assert logged_in.title() == "regraft"
    assert logged_in.locator("img").count() == 0


def test_a_revoked_key_logs_out(page: Page, server: Server, watched: tuple[BrowserContext, Watched]) -> None:
    client = server.client()
    made: Any = client.post(
        f"/organization/projects/{project_of(client)}/api_keys",
        cast_to=object,
        body={"name": "for a browser", "scope": "read"},
    )
    log_in(page, made["value"])
    watched[1].expected.append("401")

    client.delete(f"/organization/projects/{project_of(client)}/api_keys/{made['id']}", cast_to=object)

    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("was revoked")


def project_of(client: openai.OpenAI) -> str:
    session: Any = client.get("/regraft/session", cast_to=object)
    return str(session["project_id"])


def test_the_first_load_is_small() -> None:
    folder = Settings().console_site

    sizes = [len(gzip.compress(file.read_bytes())) for file in folder.rglob("*") if file.is_file()]

    assert 10_000 < sum(sizes) < 150_000
    assert (
        json.loads((Path(__file__).parents[2] / "console/package-lock.json").read_text())["lockfileVersion"]
        == 3
    )
