"""The grader studio: a grader edited and run on stored answers of a job and on rows of a file."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.console.conftest import (
    HOSTILE,
    Accessible,
    Watched,
    copied,
    expect_offered,
    expect_written,
    log_in,
    project_of,
    readable_on_a_telephone,
    write,
    written,
)
from tests.e2e.conftest import Server
from tests.e2e.test_openai_client import GRADER, until
from tests.present import untyped

pytestmark = pytest.mark.slow

FAILS_SOMETIMES = """def grade(sample, item):
    print("graded", item["answer"])
    if len(sample["output_text"]) % 2:
        raise ValueError("odd")
    return 0.5
"""


@pytest.fixture
def studio(logged_in: Page, finished: str) -> Page:
    logged_in.goto(f"/#/graders?job={finished}&n=200")
    logged_in.get_by_text("The server accepts this grader.").wait_for()
    return logged_in


def run(page: Page) -> None:
    page.get_by_role("button", name="Run on").click()
    page.get_by_role("heading", name="Scores", exact=True).wait_for()
    page.get_by_role("button", name="Run on").wait_for()


def fact(page: Page, name: str) -> str:
    """The value of a line of the comparison."""
    return page.locator("dt", has_text=name).locator("xpath=following-sibling::dd[1]").inner_text()


def stored(server: Server, job_id: str, split: str = "valid") -> list[dict[str, Any]]:
    path = f"/regraft/jobs/{job_id}/rollouts?split={split}&limit=1000"
    found: list[dict[str, Any]] = untyped(server.client().get(path, cast_to=object))["data"]
    return found


def test_the_studio_is_accessible(studio: Page, accessible: Accessible) -> None:
    run(studio)

    accessible(studio)
    readable_on_a_telephone(studio)


def test_the_same_grader_gives_the_stored_scores_again(studio: Page, server: Server, finished: str) -> None:
    """And the job keeps them."""
    before = stored(server, finished)

    run(studio)

    assert int(fact(studio, "Same")) == len(before)
    assert (fact(studio, "Higher"), fact(studio, "Lower")) == ("0", "0")
    assert stored(server, finished) == before


def test_the_answers_of_a_preview_are_graded(studio: Page, server: Server, finished: str) -> None:
    client = server.client()
    body = untyped(client.get(f"/regraft/jobs/{finished}/request", cast_to=object))
    asked = body | {"rows": 2, "samples": 2}
    made = untyped(client.post("/regraft/previews", body=asked, cast_to=object))
    path = f"/regraft/previews/{made['id']}"
    until(lambda: untyped(client.get(path, cast_to=object))["status"] == "completed", 60)
    studio.reload()

    studio.get_by_label("Answers of a preview").check()
    expect(studio.get_by_role("button", name="Run on 4 answers")).to_be_enabled()
    run(studio)

    assert int(fact(studio, "Same")) == 4
    assert studio.get_by_label(re.compile("^Preview")).input_value() == made["id"]


def test_an_edited_grader_shows_what_changes(studio: Page, server: Server, finished: str) -> None:
    scores = [one["score"] for one in stored(server, finished, "train")]
    studio.get_by_label("Split").select_option("train")
    edited = {**GRADER, "calculate_output": "0.5*says+0.5*close+1"}
    write(studio.get_by_label("Grader, as JSON"), json.dumps(edited))
    studio.get_by_text("The server accepts this grader.").wait_for()
    expect(studio.get_by_role("button", name=f"Run on {len(scores)} answers")).to_be_enabled()

    run(studio)

    assert int(fact(studio, "Higher")) == len(scores)
    mean = sum(scores) / len(scores)
    assert fact(studio, "Mean") == f"{mean:.3f} → {mean + 1:.3f}"
    bins = studio.locator("table.bins tbody tr td:last-child")
    assert sum(map(int, bins.all_inner_texts())) == len(scores)
    studio.get_by_role("button", name="Load the grader of finished").click()
    expect(studio.get_by_label("Grader, as JSON")).not_to_contain_text("close+1")


def test_errors_are_counted_and_shown_with_the_output(studio: Page, server: Server, finished: str) -> None:
    answers = [one["output_text"] for one in stored(server, finished, "train")]
    odd = sum(len(answer) % 2 for answer in answers)
    assert odd, "else this tests nothing"
    studio.get_by_label("Split").select_option("train")
    studio.get_by_label("Start from").select_option("Python code")
    write(studio.get_by_label("Grader: its Python source"), FAILS_SOMETIMES)
    expect(studio.get_by_role("button", name=f"Run on {len(answers)} answers")).to_be_enabled()

    run(studio)

    kinds = studio.locator("section", has=studio.get_by_role("heading", name="Errors")).locator("tr")
    expect(kinds).to_have_text([f"python_grader_runtime_error {odd}"], use_inner_text=True)
    assert int(fact(studio, "No longer with a score")) == odd
    studio.get_by_label("Sort").select_option("lowest")
    first = studio.get_by_label("Graded answers").locator("tbody tr").first
    first.locator("summary").click()
    expect(first.locator("pre")).to_contain_text("graded yes")
    expect(first.locator("pre")).to_contain_text("ValueError: odd")


def test_rows_of_a_file_are_graded_with_one_of_their_fields(studio: Page) -> None:
    studio.get_by_label("A field of the rows of a file").check()
    studio.get_by_label("Start from").select_option("The answer equals a field")
    studio.get_by_text("The server accepts this grader.").wait_for()

    run(studio)

    expect(studio.get_by_text("0 without a score, mean 1.000.")).to_be_visible()
    assert "on=rows" in studio.url, "deep-linkable"


def test_a_refused_grader_does_not_run(studio: Page, watched: tuple[BrowserContext, Watched]) -> None:
    watched[1].expected.append("400")
    write(studio.get_by_label("Grader, as JSON"), '{"type": "string_check", "name": "x"}')

    expect(studio.get_by_role("alert")).to_contain_text("grader.input")
    expect(studio.get_by_role("button", name="Run on")).to_be_disabled()


def test_a_grader_goes_from_the_studio_into_a_new_job(studio: Page) -> None:
    studio.get_by_label("Start from").select_option("The answer is similar to a field")
    expect(studio.get_by_label("Grader, as JSON")).to_contain_text("fuzzy_match")
    text = written(studio.get_by_label("Grader, as JSON"))

    studio.get_by_role("link", name="Use in a new job").click()

    expect(studio.get_by_role("heading", level=1)).to_have_text("New job")
    expect_written(studio.get_by_label("Grader, as JSON"), text)


def test_the_copied_run_grades_the_first_answer(studio: Page, server: Server, finished: str) -> None:
    studio.context.grant_permissions(["clipboard-read", "clipboard-write"])
    run(studio)

    client = server.client()
    answers = studio.locator("section", has=studio.get_by_role("heading", name="Answers", exact=True))
    report: Any = eval(copied(studio, "Python", answers), {"client": client.fine_tuning.alpha})

    last = stored(server, finished)[-1]
    assert report.reward == pytest.approx(last["score"])


def test_a_key_that_only_reads_runs_no_grader(page: Page, server: Server, finished: str) -> None:
    client = server.client()
    path = f"/organization/projects/{project_of(client)}/api_keys"
    made: Any = client.post(path, cast_to=object, body={"name": "reader", "scope": "read"})
    log_in(page, made["value"])
    page.goto(f"/#/graders?job={finished}")

    page.get_by_text("The server accepts this grader.").wait_for()
    expect(page.get_by_role("button", name="Run on")).to_be_disabled()
    expect(page.get_by_text("Running a grader needs a key with the scope “write”.")).to_be_visible()


def test_another_formula_is_tried_on_all_stored_answers_while_it_is_written(
    studio: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    before = stored(server, finished)
    table = studio.get_by_role("region", name="Rewards with the formula")
    table.wait_for()
    expect(table).to_contain_text(f"{len(before)} answers")

    studio.get_by_label("Formula", exact=True).fill("close")

    mean = sum(one["sub_scores"]["close"] for one in before) / len(before)
    expect(table.locator("tr", has_text="Mean reward").locator("td").last).to_have_text(f"{mean:.3f}")
    accessible(studio)
    studio.get_by_label("Weight of says").fill("0.5")
    expect(studio.get_by_label("Formula", exact=True)).to_have_value("0.5 * says + 1 * close")
    studio.get_by_role("button", name="Use it in the grader").click()
    expect(studio.get_by_label("Grader, as JSON")).to_contain_text(
        '"calculate_output": "0.5 * says + 1 * close"'
    )


def test_an_invalid_formula_is_refused_beside_it(
    studio: Page, watched: tuple[BrowserContext, Watched]
) -> None:
    watched[1].expected.append("400")

    studio.get_by_label("Formula", exact=True).fill("says + length")

    expect(studio.locator("#what-if-problem")).to_contain_text("Its names are says, close")


def test_all_stored_answers_are_regraded_by_a_worker_and_compared(
    studio: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    before = stored(server, finished, "train")
    studio.get_by_label("Split").select_option("train")
    edited = {**GRADER, "calculate_output": "1-says"}
    write(studio.get_by_label("Grader, as JSON"), json.dumps(edited))
    studio.get_by_text("The server accepts this grader.").wait_for()

    studio.get_by_role("button", name="Regrade all train answers").click()

    table = studio.get_by_role("region", name="Rewards with the other grader")
    table.wait_for()
    expect(table).to_contain_text(f"{len(before)} answers")
    mean = sum(1 - one["sub_scores"]["says"] for one in before) / len(before)
    expect(table.locator("tr", has_text="Mean reward").locator("td").last).to_have_text(f"{mean:.3f}")
    answers = studio.get_by_role("region", name="Regraded answers")
    expect(answers.locator("tbody tr").first).to_be_visible()
    accessible(studio)
    readable_on_a_telephone(studio)
    listed: Any = untyped(server.client().get(f"/regraft/jobs/{finished}/regrades", cast_to=object))
    flipped = sum(listed["data"][0]["comparison"][name] for name in ("now_passed", "now_failed"))
    assert answers.locator("tbody tr").count() == min(50, flipped)
    studio.get_by_role("button", name="Delete").click()
    expect(table).to_have_count(0)
    assert stored(server, finished, "train") == before


def save(page: Page, name: str, grader: dict[str, Any], note: str = "") -> None:
    write(page.get_by_label("Grader, as JSON"), json.dumps(grader))
    page.get_by_text("The server accepts this grader.").wait_for()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Note", exact=True).first.fill(note)
    page.get_by_role("button", name="Save", exact=False).first.click()
    expect(page.get_by_text("the editor has this version")).to_be_visible()


def test_a_stored_grader_is_accessible_with_its_versions_and_golden_cases(
    studio: Page, server: Server, accessible: Accessible
) -> None:
    client = server.client()
    name = "close"
    save(studio, name, GRADER, note="says and close, half each")
    cases = [
        {"sample": {"output_text": text}, "item": {"answer": "yes"}, "expect": expected, "note": note}
        for text, expected, note in (
            ("yes", 1, "the right answer"),
            ("yes, of course", {"min": 0.2, "max": 0.8}, "right, but longer than asked"),
            ("no", {"max": 0.2}, ""),
        )
    ]
    client.post(f"/regraft/graders/{name}/cases", body={"cases": cases}, cast_to=object)
    stricter = {**GRADER, "calculate_output": "says"}
    save(studio, name, stricter, note="only what is asked")
    studio.reload()

    studio.get_by_role("button", name="Check the editor's grader").click()
    studio.get_by_text("The editor's grader: 2 of 3 pass.").wait_for()
    versions = studio.get_by_label("Version")
    expect(versions.locator("option")).to_have_count(2)
    versions.select_option(index=1)
    expect_written(studio.get_by_label("Grader, as JSON"), json.dumps(GRADER, indent=2))
    write(studio.get_by_label("Grader, as JSON"), json.dumps(stricter))
    expect(studio.get_by_text("the editor differs")).to_be_visible()
    studio.get_by_role("button", name="Differences").click()
    differences = studio.get_by_label("Differences", exact=True)
    expect(differences.locator("del")).to_have_text(
        json.dumps(GRADER["calculate_output"]).join(['"calculate_output": ', ","])
    )
    expect(differences.locator("ins")).to_have_text('"calculate_output": "says",')
    expect(differences).to_contain_text("unchanged lines")
    studio.get_by_text("The server accepts this grader.").wait_for()
    studio.get_by_role("button", name="Check the editor's grader").click()
    studio.get_by_text("The editor's grader: 2 of 3 pass.").wait_for()
    studio.get_by_role("button", name="Check version").click()

    expect(studio.get_by_text("1 flips.")).to_be_visible()
    accessible(studio)
    readable_on_a_telephone(studio)
    golden = studio.get_by_role("region", name="Golden cases")
    golden.get_by_role("button", name="Expect 1.00").click()
    expect(golden.locator("tbody tr", has_text="yes, of course").locator("td").nth(1)).to_have_text("1.00")
    studio.on("dialog", lambda dialog: dialog.accept())
    studio.get_by_role("button", name="Delete version").click()
    expect(versions.locator("option")).to_have_count(1)
    studio.get_by_role("button", name=f"Delete {name}").click()
    expect(studio.get_by_label("Open").locator("option", has_text=name)).to_have_count(0)


def test_versions_of_a_source_are_compared_line_by_line(studio: Page) -> None:
    source = 'def grade(sample, item):\n    lines = sample["output_text"].split("\\n")\n    return 0.5\n'
    save(studio, "lines", {"type": "python", "name": "lines", "source": source})
    write(studio.get_by_label("Grader: its Python source"), source.replace("0.5", "1.0"))

    studio.get_by_role("button", name="Differences").click()

    differences = studio.get_by_label("Differences", exact=True)
    expect(differences.locator("del")).to_have_text("return 0.5")
    expect(differences.locator("ins")).to_have_text("return 1.0")
    # A line break in the source is one here; an escape in the source is none.
    expect(differences).to_contain_text(r".split(\"\\n\")")
    sign = "(part) => getComputedStyle(part, '::before').content"
    assert studio.locator(".cm-deletedLineGutter").evaluate(sign) == '"\N{MINUS SIGN}"'
    assert studio.locator(".cm-changedLineGutter").evaluate(sign) == '"+"'


def test_a_graded_answer_and_a_written_one_become_golden_cases(studio: Page, server: Server) -> None:
    save(studio, "written", GRADER)
    run(studio)

    studio.get_by_role("button", name="Golden case of").first.click()
    studio.get_by_role("button", name="Add 1 case").click()
    golden = studio.get_by_role("region", name="Golden cases")
    expect(golden.locator("tbody tr")).to_have_count(1)
    studio.get_by_text("Write a case").click()
    studio.get_by_label("Answer", exact=True).fill("yes")
    studio.get_by_label("Row, as JSON").fill('{"answer": "yes"}')
    studio.get_by_label("Score from").fill("1")
    studio.get_by_role("button", name="Add the case").click()

    expect(golden.locator("tbody tr")).to_have_count(2)
    checked: Any = server.client().post("/regraft/graders/written/check", body={}, cast_to=object)
    assert (checked["passed"], checked["failed"]) == (2, 0)


def test_the_line_that_raised_is_marked_and_shown_in_the_source(studio: Page) -> None:
    studio.get_by_label("Start from").select_option("Python code")
    odd = FAILS_SOMETIMES.replace(" % 2", "")
    write(studio.get_by_label("Grader: its Python source"), odd)
    studio.get_by_text("The server accepts this grader.").wait_for()

    run(studio)
    first = studio.get_by_label("Graded answers").locator("tbody tr", has=studio.locator("summary")).first
    first.locator("summary").click()
    first.get_by_role("button", name="Show line 4").first.click()

    source = studio.get_by_label("Grader: its Python source")
    expect(source).to_be_focused()
    expect(source.locator(".cm-raised")).to_have_text('raise ValueError("odd")')
    source.press("Delete")
    assert "ValueError" not in written(source), "the line is selected"
    expect(source.locator(".cm-raised")).to_have_count(0)
    source.press("Control+z")
    expect_written(source, odd)


def test_selected_rollouts_are_downloaded_and_become_golden_cases(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    page = logged_in
    server.client().post("/regraft/graders", body={"name": "picked", "grader": GRADER}, cast_to=object)
    page.goto(f"/#/jobs/{finished}/rollouts?step=1&split=train")
    listed = page.get_by_role("region", name="Rollouts")
    listed.locator("tbody tr").first.wait_for()
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_text("2 selected")).to_be_visible()

    with page.expect_download() as download:
        page.get_by_role("button", name="Download JSONL").click()
    lines = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    page.get_by_role("button", name="Add to golden cases").click()
    page.get_by_label("Grader", exact=True).select_option("picked")
    page.get_by_label("Note").fill("from the first step")
    accessible(page)
    readable_on_a_telephone(page)
    page.get_by_role("button", name="Add 2 cases").click()

    expect(page.get_by_text("2 answers are golden cases of picked.")).to_be_visible()
    cases = untyped(server.client().get("/regraft/graders/picked/cases", cast_to=object))["data"]
    assert [case["rollout_id"] for case in cases] == [f"{finished}/{one['id']}" for one in lines]
    assert [case["expect"]["min"] for case in cases] == [one["score"] for one in lines]
    assert {case["note"] for case in cases} == {"from the first step"}
    checked: Any = server.client().post("/regraft/graders/picked/check", body={}, cast_to=object)
    assert checked["failed"] == 0
    page.get_by_label("Select all shown answers").check()
    expect(page.get_by_text(f"{listed.locator('tbody tr[aria-selected]').count()} selected")).to_be_visible()
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("region", name="Selection")).to_have_count(0)


def test_a_grader_is_written_by_the_fields_that_are_offered(
    studio: Page, watched: tuple[BrowserContext, Watched], accessible: Accessible
) -> None:
    watched[1].expected.append("400")  # of what is not complete yet
    text = studio.get_by_label("Grader, as JSON")
    option = studio.get_by_role("listbox", name="Completions").get_by_role("option")
    write(text, "{}")
    text.press("Control+Home")
    text.press("ArrowRight")

    text.press("Control+Space")
    option.filter(has_text="type: string_check").click()
    expect(option.filter(has_text="required")).to_have_count(3)
    option.filter(has_text="operation").click()
    text.press("Control+Space")
    option.filter(has_text="ilike").click()
    expect_written(text, '{\n"type": "string_check",\n"operation": "ilike"\n}')
    text.press("End")
    text.press_sequentially(',\n"inp')
    expect_offered(option, ["inputrequired"])
    accessible(studio)
    text.press("Enter")
    text.press_sequentially("{{")
    expect_offered(option, ["{{sample.output_text}}", "{{item.answer}}"])
    text.press("Enter")
    expect(option).to_have_count(0)
    text.press("End")
    text.press_sequentially(',\n"reference": "yes"')
    expect(text.locator(".cm-line").last).to_have_text("}")
    studio.get_by_text("The server accepts this grader.").wait_for()
    assert json.loads(written(text)) == {
        "type": "string_check",
        "operation": "ilike",
        "input": "{{sample.output_text}}",
        "reference": "yes",
    }


def test_a_source_is_written_and_left_by_the_keyboard(studio: Page) -> None:
    studio.get_by_label("Start from").select_option("Python code")
    source = studio.get_by_label("Grader: its Python source")
    option = studio.get_by_role("listbox", name="Completions").get_by_role("option")
    write(source, "def grade(sample, item):")

    source.press("Control+End")
    source.press_sequentially('\nreturn len(item["')
    expect_offered(option, ["answer"])
    source.press("Tab")
    source.press("End")
    source.press_sequentially(" > 2 ?")
    assert written(source) == 'def grade(sample, item):\n    return len(item["answer"]) > 2 ?'
    expect(studio.get_by_role("dialog")).to_have_count(0)
    source.press("Tab")
    assert written(source).endswith('\n        return len(item["answer"]) > 2 ?'), "Tab indents"
    source.press("Shift+Tab")
    source.press("Control+z")
    source.press("Control+z")
    source.press("Escape")
    source.press("Tab")
    expect(studio.get_by_role("link", name="All types of graders")).to_be_focused()
    expect(source).to_have_attribute("aria-description", re.compile("Escape, then Tab leaves the editor"))


def test_what_is_typed_replaces_the_selection(
    logged_in: Page, watched: tuple[BrowserContext, Watched]
) -> None:
    """And brackets enclose it. Chromium alone would break the content policy, which `watched` finds."""
    watched[1].expected.append("400")  # it is no grader
    logged_in.goto("/#/graders?on=rows")
    logged_in.get_by_label("Start from").select_option("Python code")
    source = logged_in.get_by_label("Grader: its Python source")
    write(source, "def grade(sample, item):\n    return 1")
    expect(source.locator("span").first).to_have_text("def")  # it has a color

    source.press("Control+a")
    source.press("(")
    assert written(source) == "(def grade(sample, item):\n    return 1)"
    source.press("Control+a")
    source.press_sequentially("pass")
    assert written(source) == "pass"
    source.press("Control+z")
    assert written(source) == "(def grade(sample, item):\n    return 1)"


def test_a_source_is_colored_searched_and_accessible(studio: Page, accessible: Accessible) -> None:
    studio.get_by_label("Start from").select_option("Python code")
    source = studio.get_by_label("Grader: its Python source")
    write(source, FAILS_SOMETIMES)
    color = "(part) => getComputedStyle(part).color"
    line = source.locator(".cm-line").nth(2)
    word, plain = line.get_by_text("if", exact=True).evaluate(color), line.evaluate(color)

    source.press("Control+f")
    studio.get_by_label("Find", exact=True).press_sequentially("odd")

    expect(source.locator(".cm-searchMatch")).to_have_text(["odd"])
    assert word != plain
    expect(studio.locator(".cm-lineNumbers")).to_contain_text("5")
    accessible(studio)
    readable_on_a_telephone(studio)
    studio.get_by_label("Find", exact=True).press("Escape")
    expect(source).to_be_focused()


def test_a_hostile_source_is_shown_as_text(
    studio: Page, watched: tuple[BrowserContext, Watched], accessible: Accessible
) -> None:
    watched[1].expected.append("400")  # it is not Python
    title = studio.title()
    studio.get_by_label("Start from").select_option("Python code")
    source = studio.get_by_label("Grader: its Python source")

    write(source, HOSTILE)

    expect(source).to_contain_text('<script>document.title = "taken"</script><img src=x onerror=alert(1)>')
    expect(source.get_by_label("Control character")).to_have_count(1)  # the one that turns the text
    expect(source.locator("script, img:not(.cm-widgetBuffer)")).to_have_count(0)
    accessible(studio)
    assert studio.title() == title


def test_characters_that_hide_what_a_source_does_are_shown(
    logged_in: Page, server: Server, accessible: Accessible
) -> None:
    """Those that turn the text, and those that are not seen, in the editor and on both sides of differences."""
    turning = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    unseen = [0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0x3164, 0xFE0F, 0xE0041]
    hidden = "".join(map(chr, turning + unseen))
    spelled = "".join(f"⟨U+{number:04X}⟩" for number in turning + unseen)
    before = f"def grade(sample, item):\n    # before {hidden}\n    return 0"
    grader = {"type": "python", "name": "hidden", "source": before}
    server.client().post("/regraft/graders", body={"name": "hidden", "grader": grader}, cast_to=object)

    logged_in.goto("/#/graders?on=rows&stored=hidden")
    source = logged_in.get_by_label("Grader: its Python source")
    marks = source.get_by_label("Control character")
    expect(marks).to_have_count(len(hidden))
    write(source, before.replace("before", "after ⟨U+202E⟩"))
    expect(source).to_contain_text("after")
    expect(marks).to_have_count(len(hidden))
    logged_in.get_by_role("button", name="Differences").click()

    differences = logged_in.get_by_label("Differences", exact=True)
    expect(differences.locator(".cm-deletedLine")).to_have_text(f"# before {spelled}")
    expect(differences.locator(".cm-changedLine")).to_have_text(f"# after ⟨U+27E8⟩U+202E⟩ {spelled}")
    assert not set(hidden) & set(differences.inner_text())
    accessible(logged_in)


def test_a_grader_is_also_written_where_the_editor_cannot_be_loaded(
    page: Page, server: Server, watched: tuple[BrowserContext, Watched], accessible: Accessible
) -> None:
    watched[1].expected.append("ERR_FAILED")
    page.route("**/assets/editor-*.js", lambda route: route.abort())
    server.client().post("/regraft/graders", body={"name": "plain", "grader": GRADER}, cast_to=object)
    log_in(page, server.key)
    page.goto("/#/graders?on=rows&stored=plain")

    expect(page.get_by_role("alert").filter(has_text="The editor could not be loaded")).to_be_visible()
    page.get_by_label("Grader, as JSON").fill(json.dumps({**GRADER, "calculate_output": "says"}))

    page.get_by_text("The server accepts this grader.").wait_for()
    page.get_by_role("button", name="Differences").click()
    alerts = page.get_by_role("alert")
    expect(alerts.filter(has_text="The differences could not be loaded")).to_be_visible()
    accessible(page)
