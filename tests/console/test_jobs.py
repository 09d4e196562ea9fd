"""The list of jobs, and the command palette."""

import re

import pytest
from playwright.sync_api import Page, expect
from regraft.cli.output import amount

from tests.console.conftest import Accessible, create, readable_on_a_telephone
from tests.e2e.conftest import Server
from tests.present import untyped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cancelled(server: Server, finished: str) -> str:
    """Cancelled before its first step."""
    client = server.client()
    job = create(client, epochs=2, suffix="dropped")
    client.fine_tuning.jobs.cancel(job)
    return job


def test_a_job_shows_its_curve_verdict_and_cost(
    logged_in: Page, server: Server, finished: str, cancelled: str, accessible: Accessible
) -> None:
    job = untyped(server.client().fine_tuning.jobs.retrieve(finished))
    row = logged_in.locator("tr", has=logged_in.get_by_role("link", name="finished", exact=True))

    expect(row.get_by_role("img", name=re.compile("Validation reward from"))).to_be_visible()
    expect(row).to_contain_text("too few")
    expect(row).to_contain_text(f"{job.result['start']:.2f} → {job.result['value']:.2f}")
    cost = job.usage_metrics["cost"]["amount"]
    expect(row).to_contain_text(f"{amount(cost)} EUR")
    expect(row).to_contain_text("reinforcement on tiny")
    table = logged_in.get_by_role("region", name="List of jobs")
    assert table.evaluate("region => region.scrollWidth <= region.clientWidth")  # nothing is cut
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_the_filters_are_in_the_address(logged_in: Page, finished: str, cancelled: str) -> None:
    rows = logged_in.get_by_role("region", name="List of jobs").locator("tbody tr")
    expect(rows).to_have_count(2)

    logged_in.get_by_label("Status").select_option("cancelled")

    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("dropped")
    assert "status=cancelled" in logged_in.url
    logged_in.goto("/#/jobs?method=dpo")
    expect(logged_in.get_by_text("No job matches.")).to_be_visible()
    expect(logged_in.get_by_label("Method")).to_have_value("dpo")
    logged_in.get_by_role("button", name="Show all").click()
    expect(rows).to_have_count(2)
    logged_in.keyboard.press("/")
    logged_in.keyboard.type("FINI")
    expect(rows).to_have_count(1)
    assert "q=FINI" in logged_in.url


def test_jobs_are_selected_and_compared_by_keyboard(logged_in: Page, finished: str, cancelled: str) -> None:
    rows = logged_in.get_by_role("region", name="List of jobs").locator("tbody tr")
    expect(rows).to_have_count(2)

    for key in ("x", "j", "x", "c"):
        logged_in.keyboard.press(key)

    logged_in.get_by_role("heading", name="Compare jobs").wait_for()
    assert {finished, cancelled} == set(logged_in.url.partition("jobs=")[2].split(","))


def test_the_command_palette_leads_to_pages_jobs_and_actions(
    logged_in: Page, finished: str, accessible: Accessible
) -> None:
    logged_in.keyboard.press("Control+k")
    field = logged_in.get_by_role("combobox", name="Go to")
    expect(field).to_be_focused()
    commands = logged_in.get_by_role("listbox", name="Commands").get_by_role("option")
    expect(commands.first).to_contain_text("Jobs")
    accessible(logged_in)
    field.fill("finished job")
    expect(commands).to_have_count(1)

    logged_in.keyboard.press("Enter")

    expect(logged_in.get_by_role("dialog", name="Command palette")).to_be_hidden()
    expect(logged_in).to_have_url(re.compile(f"#/jobs/{finished}$"))
    logged_in.get_by_role("button", name="Go to…").click()
    logged_in.get_by_role("combobox", name="Go to").fill("dark")
    logged_in.keyboard.press("Enter")
    assert logged_in.evaluate("document.documentElement.dataset.theme") == "dark"
    logged_in.keyboard.press("Control+k")
    readable_on_a_telephone(logged_in)
    logged_in.get_by_role("combobox", name="Go to").fill("usage")
    logged_in.keyboard.press("ArrowDown")
    logged_in.keyboard.press("ArrowUp")
    logged_in.keyboard.press("Enter")
    logged_in.get_by_role("heading", name="Usage").wait_for()


def test_a_job_says_what_its_tokens_taught(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    ledger = untyped(server.client().get(f"/regraft/jobs/{finished}/ledger", cast_to=object))
    shown = [one for one in ledger["buckets"] if one["tokens"] or one["gpu_seconds"]]
    logged_in.goto(f"/#/jobs/{finished}")

    logged_in.locator("summary", has_text="What the tokens taught").click()

    rows = logged_in.get_by_role("region", name="What the tokens taught").locator("tbody tr")
    expect(rows).to_have_count(len(shown) + 1)
    for one, row in zip(shown, rows.all(), strict=False):
        expect(row).to_contain_text(f"{one['title']}{one['tokens']:,}")
        expect(row).to_contain_text(f"{one['time_percent']:.1f} %")
    expect(rows.last).to_contain_text(f"All{ledger['tokens']:,}")
    expect(logged_in.get_by_role("img", name=re.compile("^GPU time: Learned"))).to_be_visible()
    accessible(logged_in)
    readable_on_a_telephone(logged_in)
