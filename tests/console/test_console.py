"""The console in a browser: logging in, a job that is watched, its rollouts, and texts that nobody should trust."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect
from regraft import Regraft

from core.database.engine import Database
from core.database.tables import Project
from core.settings import Settings
from core.storage.store import blobs_of
from tests import factories, many_rollouts, many_steps
from tests.console.conftest import (
    Accessible,
    Watched,
    copied,
    create,
    log_in,
    project_of,
    readable_on_a_telephone,
    rows,
)
from tests.e2e.conftest import Server
from tests.present import untyped
from worker.cli.service import console_address

pytestmark = pytest.mark.slow


def test_the_address_for_a_login_logs_in_once(
    page: Page, server: Server, watched: tuple[BrowserContext, Watched]
) -> None:
    """`up` prints it to a terminal; this server has none."""
    address = console_address(Settings(data_dir=server.folder, port=server.port))
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


def test_every_page_is_accessible(
    page: Page, server: Server, finished: str, accessible: Accessible, tmp_path: Path
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
    page.get_by_role("heading", name="Rollouts", exact=True).wait_for()
    page.locator("tr[aria-selected=true]").wait_for()
    accessible(page)
    page.keyboard.press("g")
    page.get_by_role("heading", name="Group").wait_for()
    accessible(page)
    readable_on_a_telephone(page)
    page.keyboard.press("t")
    page.get_by_test_id("tokens").wait_for()
    page.get_by_label("Tokens by").select_option("advantage")
    page.get_by_role("group").get_by_text("Table").click()
    page.get_by_role("region", name="Tokens, as a table").wait_for()
    accessible(page)
    readable_on_a_telephone(page)
    page.goto(f"/#/jobs/{finished}/prompts")
    page.locator("td.cell").first.wait_for()
    accessible(page)
    readable_on_a_telephone(page)
    page.goto(f"/#/jobs/{finished}/prompts/1?split=valid")
    page.locator("ins, del, pre").first.wait_for()
    accessible(page)
    readable_on_a_telephone(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_is_what_the_system_prefers(page: Page, theme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=theme)

    page.goto("/")

    page.get_by_label("API key").wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == theme


def test_an_address_that_leads_nowhere_says_so(logged_in: Page, accessible: Accessible) -> None:
    logged_in.goto("/#/nonsense")

    expect(logged_in.get_by_role("heading", level=1)).to_have_text("No page has this address")
    accessible(logged_in)
    logged_in.get_by_role("link", name="Go to the jobs").click()
    expect(logged_in.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()


def test_the_pages_are_found_in_the_menu_of_a_telephone(logged_in: Page, accessible: Accessible) -> None:
    logged_in.set_viewport_size({"width": 390, "height": 800})
    pages = logged_in.get_by_role("navigation", name="Pages")
    expect(pages).to_be_hidden()

    logged_in.get_by_role("button", name="Menu").click()

    accessible(logged_in)
    pages.get_by_role("link", name="Audit log").click()
    expect(logged_in.get_by_role("heading", level=1)).to_have_text("Audit log")
    expect(pages).to_be_hidden()


def test_the_page_of_a_job_answers_in_the_order_of_questions(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    """Did it learn, is it healthy, what now; with the delivered step's number everywhere."""
    job = untyped(server.client().fine_tuning.jobs.retrieve(finished))
    logged_in.goto(f"/#/jobs/{finished}")
    result = logged_in.get_by_role("region", name="Result")

    expect(logged_in.get_by_role("heading", level=1)).to_have_text("finished")
    expect(result).to_contain_text(f"{job.verdict['tuned_reward']:.2f}delivered, step {job.verdict['step']}")
    expect(result.get_by_role("group", name="Health")).to_contain_text("Signal")
    checkpoint = logged_in.get_by_role("region", name="Checkpoints").locator("tr", has_text="delivered")
    expect(checkpoint).to_contain_text(f"Step {job.result['step']}")
    expect(checkpoint).to_contain_text(f"{job.result['value']:.2f}")
    expect(logged_in.locator("main")).to_contain_text("Training datatrain.jsonl")
    logged_in.locator("summary", has_text="System").click()
    expect(logged_in.locator("figure", has_text="Seconds of a step")).to_be_visible()
    steps = logged_in.get_by_role("group", name="What now")
    steps.get_by_role("button", name="Call it").click()
    expect(logged_in.get_by_role("region", name="A call in Python")).to_contain_text(job.fine_tuned_model)
    accessible(logged_in)
    logged_in.get_by_role("button", name="Close").click()
    steps.get_by_role("link", name="Try it").click()
    expect(logged_in.get_by_role("heading", level=1)).to_have_text(job.fine_tuned_model)


def test_the_scores_of_a_shadow_grader_are_beside_those_of_the_grader(
    logged_in: Page, server: Server
) -> None:
    client = server.client()
    strict = {"type": "string_check", "name": "strict", "operation": "eq", "reference": "{{item.answer}}"}
    job = create(
        client, epochs=1, suffix="shadowed", shadow_grader=strict | {"input": "{{sample.output_text}}"}
    )
    logged_in.goto(f"/#/jobs/{job}")

    result = logged_in.get_by_role("region", name="Result")
    expect(result).to_contain_text("By the shadow grader the difference is")
    logged_in.reload()
    expect(logged_in.locator("figure", has_text="Reward").first).to_contain_text(
        "validation by the shadow grader"
    )
    expect(logged_in.locator("main")).to_contain_text("Shadow graderstrict (string check)")


def test_the_sign_of_a_run_gives_its_reason_on_focus(logged_in: Page, finished: str) -> None:
    logged_in.goto(f"/#/jobs/{finished}")
    chip = logged_in.get_by_role("group", name="Health").get_by_role("button", name="Signal")
    reason = logged_in.get_by_role("tooltip", name="").filter(has_text="of the groups have answers")

    chip.focus()

    expect(reason).to_be_visible()
    expect(reason).to_contain_text("Usual: above 0.3.")
    logged_in.keyboard.press("Escape")
    expect(reason).to_be_hidden()


def test_the_values_of_a_chart_are_saved_as_csv(logged_in: Page, finished: str) -> None:
    logged_in.goto(f"/#/jobs/{finished}")
    chart = logged_in.locator("figure", has_text="Reward").first
    chart.locator("summary").click()

    with logged_in.expect_download() as found:
        chart.get_by_role("button", name="Save as CSV").click()

    lines = Path(found.value.path()).read_text().splitlines()
    assert found.value.suggested_filename == "reward.csv"
    assert lines[0].startswith("step,validation,")
    assert len(lines) == 1 + int(chart.get_attribute("data-points") or 0)


@pytest.mark.parametrize(
    ("place", "thing"),
    [
        ("jobs/ftjob-nothing", "job"),
        ("files/file-nothing", "file"),
        ("models/nothing", "model"),
        ("pipelines/ftpipe-nothing", "pipeline"),
    ],
)
def test_what_is_not_here_has_a_page_that_says_so_once(
    logged_in: Page,
    watched: tuple[BrowserContext, Watched],
    place: str,
    thing: str,
    accessible: Accessible,
) -> None:
    watched[1].expected.append("404")
    logged_in.goto(f"/#/{place}")

    expect(logged_in.get_by_role("heading", level=1)).to_have_text(f"This {thing} is not here")
    expect(logged_in.get_by_text(place.split("/")[1])).to_have_count(1)
    accessible(logged_in)


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
    logged_in.get_by_role("button", name="Set a budget").click()
    logged_in.get_by_label("Minutes of worker time").fill("90")
    logged_in.get_by_role("button", name="Save").click()
    expect(logged_in.get_by_role("progressbar", name="Used of the budget")).to_be_visible()
    assert untyped(client.fine_tuning.jobs.retrieve(job)).budget["gpu_seconds"] == 5400
    logged_in.get_by_role("button", name="Resume").click()
    expect(logged_in.locator(".badge").first).to_contain_text(re.compile("queued|running"))
    logged_in.on("dialog", lambda dialog: dialog.accept())
    logged_in.get_by_role("button", name="Cancel").click()
    expect(logged_in.locator(".badge").first).to_contain_text("cancelled")
    assert client.fine_tuning.jobs.retrieve(job).status == "cancelled"


@pytest.fixture(scope="module")
def long_job(server: Server) -> str:
    """A job with 600 steps, and 2,000 rollouts in one of them, as workers record them."""
    settings = Settings(data_dir=server.folder)
    database = Database(settings.database)
    project_id = project_of(server.client())
    with database.write() as session:
        project = session.get_one(Project, project_id)
        job = factories.job(session, project, status="succeeded", suffix="long", epoch=2)
        many_steps.record(session, job, 600)
        session.add_all(many_rollouts.pages(blobs_of(settings), job.id, steps=1, groups=250))
        job_id = job.id
    database.close()
    return job_id


def test_the_page_of_a_long_job_shows_all_of_its_steps_and_a_part_of_their_table(
    logged_in: Page, long_job: str
) -> None:
    logged_in.goto(f"/#/jobs/{long_job}")
    chart = logged_in.locator("figure", has_text="Reward").first
    expect(chart).to_have_attribute("data-points", "601")
    logged_in.locator("summary", has_text="Learning").click()
    signal = logged_in.locator("figure", has_text="Groups with signal")
    expect(signal).to_contain_text("usual, above 0.3")

    chart.locator("summary").click()

    rows = chart.locator("tbody tr")
    expect(rows).to_have_count(100)
    expect(rows.last.locator("td").first).to_have_text("600")
    expect(rows.last).to_contain_text("▲")
    for _ in range(4):
        chart.get_by_role("button", name="Earlier").click()
    expect(rows.first.locator("td").first).to_have_text("101")
    expect(rows.nth(99)).to_contain_text("⚑ 24 % of the answers are cut off.")
    expect(rows.first.get_by_role("link")).to_have_attribute(
        "href", f"#/jobs/{long_job}/rollouts?step=101&split=train"
    )


def test_attempts_at_a_job_are_shown_with_their_log(logged_in: Page, long_job: str, finished: str) -> None:
    logged_in.goto(f"/#/jobs/{long_job}")
    attempts = logged_in.get_by_role("region", name="Attempts")
    expect(attempts.locator("tbody tr").first).to_contain_text("✕ crashed")
    expect(attempts.locator("tbody tr").first).to_contain_text("The worker was killed.")
    logged_in.goto(f"/#/jobs/{finished}")

    logged_in.get_by_role("button", name="Show the log").click()

    expect(logged_in.get_by_role("region", name="Log")).to_contain_text("Step 1/")


def test_blanks_at_the_ends_of_an_answer_are_marked_and_copied_as_they_are(
    logged_in: Page, long_job: str
) -> None:
    def answer(route: Route) -> None:
        page = route.fetch().json()
        page["data"][0]["output_text"] = "  four\n"
        route.fulfill(json=page)

    logged_in.route("**/rollouts?step=1&*", answer)
    open_rollouts(logged_in, long_job, "step=1&split=train")

    shown = logged_in.get_by_test_id("answer")
    expect(shown).to_contain_text("four")
    assert shown.evaluate("pre => pre.textContent") == "  four\n"
    marks = "pre => [...pre.querySelectorAll('[data-mark]')].map(one => one.dataset.mark).join('')"
    assert shown.evaluate(marks) == "··↵"
    assert logged_in.locator("tbody tr[aria-selected] .cut").first.evaluate(marks) == "··↵"


def test_only_the_rollouts_in_sight_are_in_the_page(logged_in: Page, long_job: str) -> None:
    open_rollouts(logged_in, long_job, "step=1&split=train")
    status = logged_in.get_by_text("scroll for more")
    rows = logged_in.locator("tbody tr[aria-selected]")
    expect(status).to_contain_text("The first 100 of those that match")
    assert rows.count() < 60

    logged_in.get_by_role("region", name="Rollouts").evaluate("list => list.scrollTop = list.scrollHeight")

    expect(status).to_contain_text("The first 200 of those that match")
    expect(rows.last).to_contain_text(re.compile(r"\b1[0-9]\.\d"))
    assert rows.count() < 80


def test_rollouts_are_filtered_by_the_server(logged_in: Page, long_job: str, server: Server) -> None:
    open_rollouts(logged_in, long_job, "step=1&split=train&sort=score")
    logged_in.get_by_text("Filters").click()
    logged_in.get_by_label("Score from").fill("0.4")
    logged_in.get_by_label("to", exact=True).fill("0.42")
    logged_in.get_by_role("button", name="Order: highest first").click()

    query = "step=1&min_score=0.4&max_score=0.42&sort=score&order=asc"
    expected: Any = server.client().get(f"/regraft/jobs/{long_job}/rollouts?{query}", cast_to=object)
    places = [f"{one['group']}.{one['member']}" for one in expected["data"]]
    assert places
    expect(logged_in.get_by_text(f"{len(places)} match.")).to_be_visible()
    expect(logged_in.locator("tbody tr").first).to_contain_text(places[0])
    assert all(part in logged_in.url for part in ("min_score=0.4", "max_score=0.42", "order=asc"))


def test_the_tokens_of_an_answer_are_colored_by_their_values(
    logged_in: Page, server: Server, finished: str
) -> None:
    client = Regraft(base_url=server.base_url, api_key=server.key)
    with client:
        rollout = next(iter(client.rollouts.list(finished, step=1, split="train", has_tokens=True)))
        tokens = client.rollouts.tokens(finished, rollout.id).tokens
    logged_in.goto(f"/#/jobs/{finished}/rollouts?step=1&split=train&group={rollout.group}")
    logged_in.get_by_role("heading", name=f"Group {rollout.group}").wait_for()
    place = logged_in.get_by_role("cell", name=f"{rollout.group}.{rollout.member}", exact=True)
    logged_in.locator("tbody tr", has=place).click()
    expect(logged_in.get_by_role("heading", name=f"Answer {rollout.member + 1} of 4")).to_be_visible()

    logged_in.keyboard.press("t")

    shown = logged_in.get_by_test_id("tokens")
    expect(shown.locator("span")).to_have_text([token.text for token in tokens])
    assert f"log p {tokens[0].logprob:.3f}" in str(shown.locator("span").first.get_attribute("title"))
    assert "tokens=logprob" in logged_in.url, "deep-linkable"
    logged_in.get_by_text("Table", exact=True).click()
    rows = logged_in.get_by_role("region", name="Tokens, as a table").locator("tbody tr")
    expect(rows).to_have_count(len(tokens))
    assert tokens[0].text.strip() in rows.first.inner_text()
    for expected in ("advantage", "gap", ""):
        logged_in.keyboard.press("t")
        expect(logged_in.get_by_label("Tokens by")).to_have_value(expected)


def test_the_work_inside_of_a_step_is_told_live(logged_in: Page, server: Server) -> None:
    """A run writes it once a second, so the job has steps of seconds."""
    client = server.client()
    work = re.compile(r"Step \d+: (sampling|grading|training|validation|saving)")
    job_id = create(client, epochs=40, suffix="slow", group_size=64, max_completion_tokens=60)
    logged_in.goto(f"/#/jobs/{job_id}")

    expect(logged_in.get_by_text(work)).to_be_visible(timeout=120_000)
    expect(logged_in.get_by_role("progressbar", name="Done in this phase")).to_be_visible(timeout=120_000)
    logged_in.goto("/#/jobs")
    expect(logged_in.get_by_text(work)).to_be_visible()
    client.fine_tuning.jobs.cancel(job_id)
    expect(logged_in.get_by_text(work)).to_be_hidden(timeout=60_000)


def test_a_long_error_leaves_the_list_of_jobs_readable(logged_in: Page, server: Server) -> None:
    client = server.client()
    file = client.files.create(
        file=("wrong.jsonl", b'{"messages": []}\n' + b"".join(b'{"nothing%d": 1}\n' % n for n in range(20))),
        purpose="fine-tune",
    )
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id, suffix="wrong")
    row = logged_in.locator("tr", has=logged_in.get_by_role("link", name="wrong"))
    expect(row).to_contain_text("messages: is missing")

    box = row.bounding_box()

    assert box is not None and box["height"] < 150
    assert str(untyped(client.fine_tuning.jobs.retrieve(job.id)).error.message).count("\n") > 15


def test_a_warning_that_came_again_is_shown_once(logged_in: Page, server: Server) -> None:
    client = server.client()
    files = [
        client.files.create(file=("rows.jsonl", rows(some)), purpose="fine-tune").id
        for some in (["a", "b"], ["c"])
    ]
    never: Any = {
        "type": "string_check",
        "name": "never",
        "operation": "eq",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}} never",
    }
    asked = {
        "batch_size": 1,
        "n_epochs": 4,
        "advanced": {"sampling": {"group_size": 2, "max_completion_tokens": 2}},
    }
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": never, "hyperparameters": asked}}
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=files[0], validation_file=files[1], suffix="silent", method=method
    )
    logged_in.goto(f"/#/jobs/{job.id}")
    expect(logged_in.locator(".badge").first).to_contain_text("succeeded")
    messages = [event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=100)]
    again = [message for message in messages if message.startswith("No signal")]
    assert len(again) > len(set(again)), again

    expect(logged_in.locator("p.note.warn", has_text="No signal")).to_have_count(len(set(again)))


def test_a_tuned_model_that_was_trained_further_is_named_in_the_verdict(
    logged_in: Page, server: Server, finished: str
) -> None:
    client = server.client()
    tuned = client.fine_tuning.jobs.retrieve(finished).fine_tuned_model
    assert tuned is not None
    job = create(client, epochs=1, suffix="further", model=tuned)

    logged_in.goto(f"/#/jobs/{job}")

    verdict = logged_in.get_by_role("region", name="Result")
    expect(verdict).to_contain_text(re.compile(f"worse than {re.escape(tuned)}"))
    chart = logged_in.locator("figure", has_text="Reward").first
    expect(chart).to_contain_text(tuned)
    for part in (verdict, chart):
        expect(part).not_to_contain_text("base model")


def open_rollouts(page: Page, job_id: str, query: str) -> None:
    """Go there from another page, and wait for the answers: that page may have a table, too."""
    page.goto(f"/#/jobs/{job_id}/rollouts?{query}")
    page.get_by_role("heading", name="Rollouts", exact=True).wait_for()
    page.locator("tr[aria-selected=true]").wait_for()


def test_a_group_is_read_by_keyboard(logged_in: Page, finished: str) -> None:
    """From the list of a step to the siblings of an answer, and what differs from the best of them."""
    open_rollouts(logged_in, finished, "step=1&split=train")

    logged_in.keyboard.press("j")
    assert logged_in.locator("tr[aria-selected=true]").count() == 1
    logged_in.keyboard.press("g")
    expect(logged_in.get_by_role("heading", level=1)).to_contain_text("Group")
    expect(logged_in.locator("tbody tr[aria-selected]")).to_have_count(4)
    logged_in.keyboard.press("j")
    logged_in.keyboard.press("d")
    expect(logged_in.get_by_role("button", name="Differences")).to_have_attribute("aria-pressed", "true")
    logged_in.keyboard.press("n")
    expect(logged_in.get_by_label("Step")).to_have_value("2")
    logged_in.keyboard.press("/")
    logged_in.keyboard.type("zzz-nothing")
    expect(logged_in.get_by_text("No rollout matches.")).to_be_visible()
    assert "q=zzz-nothing" in logged_in.url, "deep-linkable"


def test_answers_stand_under_their_question_and_what_is_expected(
    logged_in: Page, server: Server, finished: str
) -> None:
    """The grader compares with `item.answer`, which is "yes" in every row."""
    open_rollouts(logged_in, finished, "step=1&split=train")
    first = answers(server, finished, step=1, split="train")[0]
    head = logged_in.get_by_role("region", name="Rollouts").locator("tr.head").first

    expect(head).to_contain_text(first["messages"][-1]["content"])
    expect(head).to_contain_text(f"expected yes, line {first['line']}")
    detail = logged_in.locator("section.detail")
    expect(detail).to_contain_text(f"Question, line {first['line']} of the file")
    expect(detail.locator(".question")).to_have_text(first["messages"][-1]["content"])
    expect(detail).to_contain_text("Expectedyes")
    expect(detail.get_by_text("Prompt, 1 message")).to_be_visible()
    detail.get_by_role("button", name="No, make it a golden case").click()
    expect(logged_in.get_by_role("dialog")).to_be_visible()


def test_a_step_says_which_prompts_its_update_came_from(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    open_rollouts(logged_in, finished, "step=1&split=train")
    learned = answers(server, finished, step=1, split="train")
    groups = {one["group"] for one in learned if one["advantage"]}

    logged_in.get_by_text("What the update of step 1 came from").click()

    table = logged_in.get_by_role("region", name="Prompts with the largest shares of the update")
    expect(table.locator("tbody tr")).to_have_count(len(groups))
    accessible(logged_in)
    table.get_by_role("link").first.click()
    expect(logged_in.get_by_role("heading", level=1)).to_contain_text("Group")
    logged_in.goto(f"/#/jobs/{finished}/rollouts?step=0&split=valid")
    expect(logged_in.get_by_text("What the update")).to_have_count(0)


def test_the_rollouts_open_at_the_delivered_step(logged_in: Page, server: Server, finished: str) -> None:
    result = untyped(server.client().fine_tuning.jobs.retrieve(finished)).result
    logged_in.goto(f"/#/jobs/{finished}/rollouts")

    expect(logged_in.get_by_label("Step")).to_have_value(str(result["step"]))


def test_a_cell_of_the_heatmap_leads_to_what_changed_since_the_step_before(
    logged_in: Page, server: Server, finished: str
) -> None:
    logged_in.goto(f"/#/jobs/{finished}")
    logged_in.get_by_role("link", name="Prompts").click()
    logged_in.locator("td.cell").first.wait_for()
    page = untyped(server.client().get(f"/regraft/jobs/{finished}/rollouts/prompts", cast_to=object))
    assert logged_in.locator("thead th").count() == 2 + len(page["steps"])
    assert logged_in.locator("tbody tr").count() == len(page["data"]) == 2

    logged_in.locator("tbody tr").nth(1).locator("td.cell a").nth(2).click()

    expect(logged_in.get_by_role("heading", level=1)).to_contain_text("Line 2 over the steps of validation")
    expect(logged_in.get_by_role("heading", level=2, name="Step 2")).to_be_visible()
    expect(logged_in.get_by_role("heading", name="compared with that of step 1")).to_be_visible()
    shown = answers(server, finished, line=2, step=2)[0]["output_text"]
    before = answers(server, finished, line=2, step=1)[0]["output_text"]
    assert shown_of(logged_in, kept="ins") == shown
    assert shown_of(logged_in, kept="del") == before


def answers(
    server: Server, job_id: str, *, step: int, line: int | None = None, split: str = "valid"
) -> list[dict[str, Any]]:
    """The answers of a step: to one prompt the best first, else by group."""
    query = f"step={step}&split={split}" + (
        f"&line={line}&sort=centered_reward&order=desc" if line is not None else ""
    )
    found: list[dict[str, Any]] = untyped(
        server.client().get(f"/regraft/jobs/{job_id}/rollouts?{query}", cast_to=object)
    )["data"]
    return found


def shown_of(page: Page, *, kept: str) -> str:
    """The text of the differences that is in both, and only in one of the two."""
    dropped = "del" if kept == "ins" else "ins"
    text: str = (
        page.get_by_label("Differences", exact=True)
        .and_(page.locator("pre"))
        .evaluate(
            f"pre => [...pre.childNodes].filter(one => one.nodeName !== '{dropped.upper()}')"
            ".map(one => one.nodeType === 8 ? '' : one.textContent).join('')"
        )
    )
    return text


def test_one_prompt_is_read_over_its_steps_by_keyboard(
    logged_in: Page, server: Server, finished: str
) -> None:
    logged_in.goto(f"/#/jobs/{finished}/prompts?sort=line")
    logged_in.locator("td.cell").first.wait_for()
    logged_in.keyboard.press("j")
    logged_in.keyboard.press("Enter")
    expect(logged_in.get_by_role("heading", level=1)).to_contain_text("Line 2")
    logged_in.goto(f"/#/jobs/{finished}/prompts/1?split=valid&step=1")
    expect(logged_in.get_by_role("heading", level=2, name="Step 1")).to_be_visible()

    logged_in.keyboard.press("n")
    expect(logged_in.get_by_role("heading", level=2, name="Step 2")).to_be_visible()
    logged_in.keyboard.press("p")
    logged_in.keyboard.press("p")
    expect(logged_in.get_by_role("heading", level=2, name="Step 0")).to_be_visible()
    expect(logged_in.get_by_role("button", name="Differences")).to_be_disabled()  # there is no step before
    logged_in.keyboard.press("n")
    logged_in.keyboard.press("d")

    expect(logged_in.get_by_test_id("answer")).to_have_text(
        answers(server, finished, line=1, step=1)[0]["output_text"]
    )
    assert all(part in logged_in.url for part in ("step=1", "diff=no")), "deep-linkable"
    logged_in.keyboard.press("g")
    expect(logged_in.get_by_role("heading", level=1)).to_contain_text("Group")
    expect(logged_in.get_by_label("Split")).to_have_value("valid")


def test_prompts_are_filtered_by_what_became_of_them(logged_in: Page, finished: str) -> None:
    logged_in.goto(f"/#/jobs/{finished}/prompts")
    logged_in.locator("td.cell").first.wait_for()
    chips = logged_in.get_by_role("group", name="Outcome").get_by_role("button")
    word, count = chips.nth(1).inner_text().split()[1:]

    chips.nth(1).click()

    expect(logged_in.locator("tbody tr")).to_have_count(int(count))
    expect(chips.nth(1)).to_have_attribute("aria-pressed", "true")
    assert f"outcome={word}" in logged_in.url
    logged_in.get_by_label("Split").select_option("train")
    expect(logged_in.locator("tbody tr")).to_have_count(5)


def test_rollouts_of_all_steps_are_searched_and_sorted_by_the_server(
    logged_in: Page, server: Server, finished: str
) -> None:
    open_rollouts(logged_in, finished, "step=all&split=train")
    logged_in.get_by_label("Sort").select_option("advantage")
    logged_in.get_by_label("Search").fill("IS IT A CAT")

    found = list(
        untyped(server.client()).get(
            f"/regraft/jobs/{finished}/rollouts?split=train&q=is+it+a+cat&sort=advantage&order=desc",
            cast_to=object,
        )["data"]
    )
    assert {one["line"] for one in found} == {4}
    places = [f"{one['group']}.{one['member']}" for one in found]
    rows = logged_in.get_by_role("region", name="Rollouts").locator("tbody tr[aria-selected]")
    expect(rows.locator("td:nth-child(3)")).to_have_text(places)


@pytest.mark.parametrize(
    "place",
    [
        "prompts?split=valid&sort=change&order=desc",
        "prompts/2?split=valid&step=1",
        "rollouts?step=all&split=train&q=it's&sort=score",
        "rollouts?step=1&split=train&group=1",
    ],
)
def test_what_is_copied_fetches_what_the_page_shows(
    logged_in: Page, server: Server, finished: str, place: str
) -> None:
    logged_in.context.grant_permissions(["clipboard-read", "clipboard-write"])
    logged_in.goto(f"/#/jobs/{finished}/{place}")
    logged_in.get_by_role("button", name="curl").wait_for()
    base = f"http://127.0.0.1:{server.port}/v1"
    environment = os.environ | {
        "REGRAFT_BASE_URL": base,
        "REGRAFT_API_KEY": server.key,
        "REGRAFT_OUTPUT": "json",
    }

    by_curl = subprocess.run(
        ["bash", "-c", copied(logged_in, "curl")], env=environment, capture_output=True, check=True
    )
    by_command = subprocess.run(
        [sys.executable, "-m", *shlex.split(copied(logged_in, "CLI")), "--output", "json"],
        env=environment,
        capture_output=True,
        check=True,
    )
    with Regraft(base_url=base, api_key=server.key) as client:
        by_python = [one.id for one in eval(copied(logged_in, "Python"), {"client": client})]

    expected = [one["id"] for one in json.loads(by_curl.stdout)["data"]]
    assert expected
    assert by_python == expected
    assert sorted(one["id"] for one in json.loads(by_command.stdout)) == sorted(expected)


def test_hostile_texts_are_shown_as_text(logged_in: Page, finished: str) -> None:
    open_rollouts(logged_in, finished, "step=all&split=train&q=onerror")

    expect(logged_in.get_by_text("onerror=alert(1)").first).to_be_visible()
    expect(logged_in.get_by_text("<script>document.title").first).to_be_visible()
    assert logged_in.title() == "regraft"
    assert logged_in.locator("img").count() == 0


def test_a_browser_whose_language_is_no_language_tag_shows_the_pages(page: Page, server: Server) -> None:
    page.add_init_script(
        "Object.defineProperty(Navigator.prototype, 'language', { get: () => 'en-US@posix', configurable: true })"
    )

    log_in(page, server.key)

    expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()


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


def test_the_first_load_is_small() -> None:
    folder = Settings().console_site

    page = (folder / "index.html").read_text()
    first = [
        "index.html",
        *re.findall(r'(?:src|href)="/?(assets/[^"]+)"', page),
    ]  # the studio and the arena come later
    sizes = [len(gzip.compress((folder / name).read_bytes())) for name in first]

    assert 10_000 < sum(sizes) < 150_000
    assert (
        json.loads((Path(__file__).parents[2] / "console/package-lock.json").read_text())["lockfileVersion"]
        == 3
    )
