"""Audits of graders: started, read and deleted in the console."""

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.console.conftest import Accessible, Watched, readable_on_a_telephone
from tests.e2e.conftest import Server
from tests.present import present, untyped

pytestmark = pytest.mark.slow


@pytest.fixture
def audited(server: Server, finished: str) -> str:
    """An audit of a grader that pays for any answer."""
    client = server.client()
    anything = {
        "type": "string_check",
        "name": "anything",
        "input": "{{sample.output_text}}",
        "reference": "",
        "operation": "ne",
    }
    file = client.fine_tuning.jobs.retrieve(finished).training_file
    body = {"grader": anything, "training_file": file}
    made = untyped(client.post("/regraft/graders/audit", body=body, cast_to=object))
    return str(made["id"])


def test_an_audit_says_whether_to_train(logged_in: Page, audited: str, accessible: Accessible) -> None:
    logged_in.goto(f"/#/audits/{audited}")

    verdict = logged_in.get_by_role("region", name="Verdict")
    expect(verdict).to_contain_text("do not train with it")
    expect(verdict).to_contain_text("Wrong answers without knowledge that pass")
    expect(logged_in.get_by_role("region", name="Scores that are wrong").locator("tbody tr")).to_have_count(
        10
    )
    kinds = logged_in.get_by_role("region", name="Kinds of answers")
    expect(kinds.locator("tr", has_text="copied prompt")).to_contain_text("! 100 %")
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_the_grader_of_a_job_is_audited_from_the_list(
    logged_in: Page, finished: str, accessible: Accessible
) -> None:
    logged_in.get_by_role("navigation", name="Pages").get_by_role("link", name="Grader audits").click()
    logged_in.get_by_label("Grader", exact=True).select_option(finished)
    expect(logged_in.locator("#audited-file option:checked")).to_have_text("train.jsonl")
    logged_in.get_by_role("button", name="Start the audit").click()

    expect(logged_in.get_by_role("heading", level=1)).to_have_text("m")
    expect(logged_in.get_by_role("region", name="Parts of the grader")).to_contain_text("close")
    word = logged_in.get_by_role("region", name="Verdict").locator(".badge").text_content()
    logged_in.get_by_role("navigation", name="Path").get_by_role("link", name="Grader audits").click()
    row = (
        logged_in.get_by_role("region", name="Audits of graders").locator("tr", has_text="train.jsonl").first
    )
    expect(row).to_contain_text("completed")
    expect(row).to_contain_text(present(word))
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_an_audit_is_deleted(
    logged_in: Page, audited: str, watched: tuple[BrowserContext, Watched], accessible: Accessible
) -> None:
    logged_in.on("dialog", lambda dialog: dialog.accept())
    logged_in.goto(f"/#/audits/{audited}")
    logged_in.get_by_role("button", name="Delete").click()
    logged_in.get_by_role("heading", level=1, name="Grader audits").wait_for()

    watched[1].expected.append("404")
    logged_in.goto(f"/#/audits/{audited}")

    expect(logged_in.get_by_role("heading", level=1)).to_have_text("This audit is not here")
    accessible(logged_in)
