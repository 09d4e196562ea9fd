"""The form of a new job: its files, its grader's test, what it refuses, and what it creates and copies."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect
from regraft import Regraft

from tests.console.conftest import (
    Accessible,
    Watched,
    copied,
    log_in,
    readable_on_a_telephone,
    rows,
    write,
    written,
)
from tests.e2e.conftest import Server

pytestmark = pytest.mark.slow

QUESTIONS = ["say yes", "say it", "tell me now", "is it a cat"]
REFUSAL = "400"  # browsers report each response with an error status


@pytest.fixture
def form(logged_in: Page, watched: tuple[BrowserContext, Watched], files: dict[str, str]) -> Page:
    """The form with two files. Its requests may be refused while a test fills it in."""
    watched[1].expected.append(REFUSAL)
    logged_in.get_by_role("link", name="New job").click()
    logged_in.get_by_label("Training file", exact=True).select_option(files["train"])
    logged_in.get_by_label("Validation file", exact=True).and_(logged_in.locator("select")).select_option(
        files["valid"]
    )
    return logged_in


@pytest.fixture(scope="module")
def files(server: Server) -> dict[str, str]:
    client = server.client()
    texts = {"train": QUESTIONS, "valid": ["tell me", "is it green"]}
    return {
        name: client.files.create(file=(f"{name}.jsonl", rows(lines)), purpose="fine-tune").id
        for name, lines in texts.items()
    }


def with_template(form: Page, name: str = "The answer contains a field, in any case") -> None:
    # The fields of the rows are in the templates.
    form.get_by_text("{{item.answer}}").wait_for()
    form.get_by_label("Start from").select_option(name)


def refusal(form: Page, label: str) -> Locator:
    """What is refused of the field with this label."""
    return form.locator(".field", has=form.get_by_label(label, exact=True)).get_by_role("alert")


def test_the_form_is_accessible(form: Page, accessible: Accessible) -> None:
    with_template(form)
    form.get_by_text("The server accepts this job.").wait_for()
    form.get_by_label("Test of the grader").wait_for()
    expect(form.get_by_text("Every row has what the grader reads: item.answer")).to_have_count(2)
    accessible(form)
    readable_on_a_telephone(form)

    form.get_by_text("Advanced", exact=True).click()
    form.get_by_label("epochs", exact=True).fill("90")

    expect(refusal(form, "epochs")).to_be_visible()
    accessible(form)
    readable_on_a_telephone(form)


def test_a_job_made_in_the_form_runs(form: Page, server: Server, tmp_path: Path) -> None:
    uploaded = tmp_path / "uploaded.jsonl"
    uploaded.write_bytes(rows([*QUESTIONS, "anything"]))
    form.get_by_label("Upload training file").set_input_files(uploaded)
    expect(form.get_by_text("All 5 rows.")).to_be_visible()
    with_template(form)
    for label, value in {
        "epochs": "1",
        "batch size": "2",
        "Name of the job": "from-the-form",
        "Seed": "3",
    }.items():
        form.get_by_label(label).fill(value)
    form.get_by_text("Advanced", exact=True).click()
    for label, value in {"group size": "4", "max completion tokens": "3", "rank": "4"}.items():
        form.get_by_label(label, exact=True).fill(value)
    expect(form.get_by_text("All rows are valid: 5 for training, 2 for validation.")).to_be_visible()
    expect(form.get_by_text("3: 5 prompts, 1 epoch, 2 prompts a step, 4 answers a prompt")).to_be_visible()

    form.get_by_role("button", name="Create job").click()

    expect(form.get_by_role("heading", level=1)).to_have_text("from-the-form")
    job_id = form.url.rpartition("/")[2]
    job: Any = server.client().fine_tuning.jobs.retrieve(job_id).model_dump()
    assert job["seed"] == 3
    method = job["method"]["reinforcement"]
    assert method["hyperparameters"]["n_epochs"] == 1
    assert method["hyperparameters"]["advanced"]["lora"]["rank"] == 4
    assert method["grader"]["operation"] == "ilike"
    expect(form.locator(".badge").first).to_contain_text("succeeded")
    expect(form.get_by_role("region", name="Result")).to_contain_text("On 2 rows that it never saw")


def test_a_refusal_is_beside_its_field(form: Page) -> None:
    with_template(form)
    form.get_by_text("The server accepts this job.").wait_for()
    create = form.get_by_role("button", name="Create job")

    form.get_by_label("batch size").fill("many")
    expect(refusal(form, "batch size")).to_contain_text("batch_size")
    expect(create).to_be_disabled()
    form.get_by_label("batch size").fill("")

    form.get_by_label("Seed").fill("-1")
    expect(refusal(form, "Seed")).to_contain_text("'seed'")
    form.get_by_label("Seed").fill("")

    budget = "Budget, in minutes of worker time"
    form.get_by_label(budget).fill("0")
    expect(refusal(form, budget)).to_contain_text("budget")
    form.get_by_label(budget).fill("")

    grader = form.get_by_label("Grader, as JSON")
    write(grader, written(grader).replace("ilike", "sounds like"))
    expect(refusal(form, "Grader, as JSON")).to_contain_text("operation")
    write(grader, "{")
    expect(refusal(form, "Grader, as JSON")).to_contain_text("This is not JSON")
    with_template(form)
    write(grader, written(grader).replace("item.answer", "item.reply"))
    expect(refusal(form, "Training file")).to_contain_text("the grader reads {{item.reply}}")
    with_template(form)

    form.get_by_label("A share of the training file").check()
    form.get_by_label("Share of the rows").fill("2")
    expect(refusal(form, "Share of the rows")).to_contain_text("validation_split")
    form.get_by_label("Share of the rows").fill("0.25")
    expect(form.get_by_text("All rows are valid: 3 for training, 1 for validation.")).to_be_visible()
    expect(create).to_be_enabled()


def test_the_files_are_profiled(form: Page, tmp_path: Path) -> None:
    uploaded = tmp_path / "odd.jsonl"
    uploaded.write_bytes(rows([*QUESTIONS, "say yes", "say yes " * 40, "tell me"]))
    form.get_by_label("Upload training file").set_input_files(uploaded)
    with_template(form)
    field = form.locator(".field", has=form.get_by_label("Training file", exact=True))

    expect(field.get_by_text("1 row does not fit in")).to_be_visible()
    expect(field.get_by_text("Every row has what the grader reads: item.answer")).to_be_visible()
    expect(field.get_by_text("1 of 2 validation prompts is in this file")).to_be_visible()
    field.get_by_text("1 row repeats an earlier prompt, all of them with the same fields").click()
    expect(field.get_by_text("lines 1, 5")).to_be_visible()
    field.get_by_text("Fields and lengths as tables").click()
    expect(field.get_by_role("region", name="Fields of the training file")).to_contain_text("answer")


def test_the_grader_is_tested_while_it_is_written(form: Page) -> None:
    with_template(form, "Python code")
    form.get_by_label("Another answer").fill("no")
    results = form.get_by_label("Test of the grader").locator("tbody tr")

    expect(results).to_have_count(2 * len(QUESTIONS))
    expect(results.nth(0)).to_contain_text("1.00")
    expect(results.nth(1)).to_contain_text("0.00")
    write(
        form.get_by_label("Grader: its Python source"), "def grade(sample, item):\n    return item['none']\n"
    )
    expect(results.nth(0)).to_contain_text("KeyError")
    expect(results.nth(0)).to_contain_text("none")


def test_a_preview_samples_the_model_and_its_job_shows_it(form: Page, accessible: Accessible) -> None:
    with_template(form)
    form.get_by_text("Advanced", exact=True).click()
    form.get_by_label("max completion tokens", exact=True).fill("3")
    form.get_by_text("All rows are valid").wait_for()

    form.get_by_role("button", name="Sample 6 rows, 4 answers each").click()

    previewed = form.get_by_role("region", name="Preview").locator("tbody tr")
    expect(previewed).to_have_count(len(QUESTIONS), timeout=180_000)  # the model is loaded first
    expect(form.locator("dt:text-is('Passed') + dd")).to_contain_text("of 16")
    expect(form.get_by_text("the preview's answers")).to_be_visible()
    form.get_by_text("All 16 answers").click()
    expect(form.get_by_role("region", name="All answers").locator("tbody tr")).to_have_count(16)
    accessible(form)
    readable_on_a_telephone(form)
    form.get_by_label("max completion tokens", exact=True).fill("4")
    expect(form.get_by_role("region", name="Preview")).to_have_count(0)  # it was of another request
    form.get_by_label("max completion tokens", exact=True).fill("3")
    expect(form.get_by_role("region", name="Preview")).to_be_visible()  # it is stored
    form.get_by_label("Seed").fill("5")
    expect(form.get_by_text("The server accepts this job.")).to_be_visible()
    form.get_by_role("button", name="Create job").click()
    expect(form.get_by_text("The preview before it was created")).to_be_visible()


JOB_FILE = """
model = "tiny"
training_file = "train.jsonl"
validation_file = "{valid}"
suffix = "from-a-file"

[grader]
type = "string_check"
name = "same"
input = "{{{{sample.output_text}}}}"
reference = "{{{{item.answer}}}}"
operation = "eq"

[hyperparameters]
n_epochs = 2

[hyperparameters.advanced.sampling]
max_completion_tokens = 3
"""


def test_a_job_file_fills_the_form_in_and_its_changes_are_shown(
    form: Page, files: dict[str, str], accessible: Accessible
) -> None:
    form.get_by_text("Fill in from a job file").click()
    form.get_by_label("Job file", exact=True).fill("model = ")
    form.get_by_role("button", name="Fill in the form").click()
    expect(form.locator("#job-file-refused")).to_be_visible()
    form.get_by_label("Job file", exact=True).fill(JOB_FILE.format(valid=files["valid"]))

    form.get_by_role("button", name="Fill in the form").click()

    expect(form.get_by_text("train.jsonl is a local file: upload it as the training file.")).to_be_visible()
    expect(form.get_by_label("epochs", exact=True)).to_have_value("2")
    expect(form.get_by_label("Name of the job")).to_have_value("from-a-file")
    expect(form.get_by_label("Grader, as JSON")).to_contain_text('"operation": "eq"')
    form.get_by_label("Training file", exact=True).select_option(files["train"])
    form.get_by_label("epochs", exact=True).fill("4")
    changes = form.get_by_role("region", name="Changes").locator("tbody tr")
    expect(changes).to_have_text(
        ["method.reinforcement.hyperparameters.n_epochs24", f"training_filenot set{files['train']}"]
    )
    expect(form.get_by_text("The server accepts this job.")).to_be_visible()
    accessible(form)
    readable_on_a_telephone(form)


def test_a_recipe_sets_the_hyperparameters_of_a_paper(form: Page) -> None:
    with_template(form)
    form.get_by_text("Advanced", exact=True).click()
    form.get_by_label("rank", exact=True).fill("4")

    form.get_by_label("Recipe", exact=True).select_option("dapo")
    expect(form.get_by_label("clip high", exact=True)).to_have_value("0.28")
    form.get_by_label("Recipe", exact=True).select_option("deepseekmath")

    kl = form.get_by_role("group", name="kl", exact=True)
    expect(kl.get_by_label("weight", exact=True)).to_have_value("0.04")
    expect(form.get_by_label("rank", exact=True)).to_have_value("4")
    expect(form.get_by_label("clip high", exact=True)).to_have_value("")
    expect(form.get_by_text("The server accepts this job.")).to_be_visible()


def test_other_methods_have_their_own_hyperparameters(form: Page) -> None:
    form.get_by_label("Preference (DPO)").check()

    expect(form.get_by_label("beta", exact=True)).to_have_attribute("placeholder", "auto")
    expect(form.get_by_label("Grader, as JSON")).to_have_count(0)
    form.get_by_label("beta", exact=True).fill("-1")
    expect(refusal(form, "beta")).to_contain_text("beta")


def test_a_reward_model_is_a_method_of_the_form(form: Page) -> None:
    form.get_by_label("Reward model").check()

    form.get_by_text("Advanced").first.click()
    centering = form.get_by_label("centering", exact=True)
    expect(centering).to_have_attribute("placeholder", "0.01")
    centering.fill("2")
    expect(refusal(form, "centering")).to_contain_text("Expected a value <= 1")


def test_the_copied_request_creates_the_job_of_the_form(form: Page, server: Server, tmp_path: Path) -> None:
    form.context.grant_permissions(["clipboard-read", "clipboard-write"])
    with_template(form)
    form.get_by_label("Name of the job").fill('it\'s "copied"')
    form.get_by_label("epochs", exact=True).fill("2")
    form.get_by_text("The server accepts this job.").wait_for()
    environment = os.environ | {
        "REGRAFT_BASE_URL": server.base_url,
        "REGRAFT_API_KEY": server.key,
        "REGRAFT_OUTPUT": "json",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def in_shell(script: str) -> str:
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=True, text=True
        )
        return done.stdout

    made = [json.loads(in_shell(copied(form, "curl")))["id"]]
    command = in_shell(copied(form, "CLI"))
    made.append(next(word for word in command.replace('"', " ").split() if word.startswith("ftjob-")))
    with Regraft(base_url=server.base_url, api_key=server.key) as regraft:
        made.append(eval(copied(form, "Python"), {"client": regraft}).id)

    client = server.client()
    requests: list[Any] = [client.get(f"/regraft/jobs/{job_id}/request", cast_to=object) for job_id in made]
    for request in requests:
        del request["seed"]  # random
    assert requests[0] == requests[1] == requests[2]
    assert requests[0]["suffix"] == 'it\'s "copied"'
    assert requests[0]["method"]["reinforcement"]["hyperparameters"]["n_epochs"] == 2


def test_a_job_is_cloned_into_the_form(form: Page, server: Server, files: dict[str, str]) -> None:
    grader = {
        "type": "string_check",
        "name": "g",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "operation": "eq",
    }
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {
            "grader": grader,
            "shadow_grader": grader | {"name": "strict"},
            "hyperparameters": {"n_epochs": 7, "advanced": {"loss": {"type": "cispo", "cap": 4.0}}},
        },
    }
    client = server.client()
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=files["train"],
        validation_file=files["valid"],
        method=method,
        seed=11,
        suffix="original",
        metadata={"team": "blue"},
        extra_body={"budget": {"gpu_seconds": 5400}},
    )
    form.goto(f"/#/jobs/{job.id}")
    form.get_by_role("link", name="Clone").click()

    expect(form.get_by_label("epochs", exact=True)).to_have_value("7")
    expect(form.get_by_label("Seed")).to_have_value("11")
    expect(form.get_by_label("Training file", exact=True)).to_have_value(files["train"])
    expect(form.get_by_label("batch size")).to_have_value("")
    expect(form.get_by_label("Budget, in minutes of worker time")).to_have_value("90")
    expect(form.get_by_text("cloned from: shadow_grader, metadata.")).to_be_visible()
    expect(form.get_by_role("heading", name="Changes to original")).to_be_visible()
    expect(form.get_by_text("None so far: it would be the same job again.")).to_be_visible()
    form.get_by_text("Advanced: 2 set").click()
    expect(form.get_by_label("cap", exact=True).first).to_have_value("4")


def test_a_key_that_only_reads_creates_nothing(
    page: Page, server: Server, watched: tuple[BrowserContext, Watched]
) -> None:
    watched[1].expected.append(REFUSAL)
    client = server.client()
    session: Any = client.get("/regraft/session", cast_to=object)
    path = f"/organization/projects/{session['project_id']}/api_keys"
    made: Any = client.post(path, cast_to=object, body={"name": "reader", "scope": "read"})
    log_in(page, made["value"])

    expect(page.get_by_role("link", name="New job")).to_have_count(0)
    page.goto("/#/new")

    expect(page.get_by_text("Creating a job needs a key with the scope “write”.")).to_be_visible()
    expect(page.get_by_role("button", name="Create job")).to_be_disabled()
    expect(page.get_by_label("Upload training file")).to_have_count(0)


def test_rows_of_a_supervised_file_show_question_and_answer(form: Page, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Peru?"}, {"role": "assistant", "content": "Lima"}]}
    pair = {
        "input": {"messages": [{"role": "user", "content": "Chile?"}]},
        "preferred_output": [{"role": "assistant", "content": "Santiago"}],
        "non_preferred_output": [{"role": "assistant", "content": "Lima"}],
    }
    path = tmp_path / "answers.jsonl"
    path.write_text(f"{json.dumps(row)}\n{json.dumps(pair)}\n")

    form.get_by_label("Upload training file").set_input_files(path)

    rows = form.get_by_role("region", name="First rows of the training file").locator("tbody tr")
    expect(rows.nth(0).locator("td")).to_have_text(["1", "Peru?", "assistant Lima"])
    expect(rows.nth(1).locator("td")).to_have_text(
        ["2", "Chile?", re.compile("^preferred_output Santiago ?non_preferred_output Lima$")]
    )


def test_a_bad_row_of_a_supervised_file_is_shown_before_the_job_is_created(
    form: Page, tmp_path: Path
) -> None:
    row = {"messages": [{"role": "user", "content": "Peru?"}, {"role": "assistant", "content": "Lima"}]}
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(f"{json.dumps(row)}\n" * 12)
    bad.write_text(f"{json.dumps(row)}\n" * 12 + json.dumps({"messages": row["messages"][:1]}) + "\n")
    form.get_by_role("radio", name="Supervised").check()
    form.get_by_label("Validation file", exact=True).and_(form.locator("select")).select_option("")

    form.get_by_label("Upload training file").set_input_files(bad)
    expect(form.get_by_text(re.compile("^Training file file-.*: line 13: "))).to_be_visible()

    form.get_by_label("Upload training file").set_input_files(good)
    expect(form.get_by_text("All rows are valid: 12 for training, 0 for validation.")).to_be_visible()
    expect(form.get_by_text(re.compile("12 rows, 8 epochs, 1 row a step"))).to_be_visible()
