"""The pages of pipelines."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import Accessible, readable_on_a_telephone
from tests.e2e.conftest import Server, jsonl

pytestmark = pytest.mark.slow

HOSTILE = "<script>alert(1)</script>"


def learned(count: int) -> bytes:
    return jsonl(
        [
            {"messages": [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]}
            for _ in range(count)
        ]
    )


def create(server: Server, name: str, *, rows: int) -> str:
    """A mixture, and a supervised job on it, which fails if there are fewer than ten rows."""
    client = server.client()
    file = client.files.create(file=("rows.jsonl", learned(rows)), purpose="fine-tune").id
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}
    job = {"model": "tiny", "training_file": "{{stages.mixed.file}}", "method": method}
    stages = [{"name": "mixed", "mix": {"files": [{"file": file}]}}, {"name": "learned", "job": job}]
    made: Any = client.post("/regraft/pipelines", body={"name": name, "stages": stages}, cast_to=object)
    return str(made["id"])


def test_a_pipeline_is_followed_to_its_end(logged_in: Page, server: Server, accessible: Accessible) -> None:
    pipeline = create(server, HOSTILE, rows=12)
    logged_in.get_by_role("navigation").get_by_role("link", name="Pipelines", exact=True).click()
    logged_in.get_by_role("link", name=HOSTILE).first.click()

    expect(logged_in.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    expect(logged_in.get_by_role("img", name="learned succeeded, after mixed")).to_be_visible()
    expect(logged_in.get_by_text("(12 rows)")).to_be_visible()
    assert logged_in.url.endswith(pipeline)
    accessible(logged_in)
    readable_on_a_telephone(logged_in)
    stages: Any = server.client().get(f"/regraft/pipelines/{pipeline}", cast_to=object)
    logged_in.goto(f"/#/jobs/{stages['stages'][1]['job_id']}")
    expect(logged_in.get_by_role("heading", name="Stage learned of")).to_be_visible()
    expect(logged_in.get_by_role("img", name="learned succeeded, after mixed")).to_be_visible()
    logged_in.get_by_role("link", name=HOSTILE).click()
    logged_in.get_by_role("link", name="ft:tiny").click()
    expect(logged_in.get_by_text("Tuned model", exact=True)).to_be_visible()
    logged_in.goto("/#/pipelines")
    logged_in.locator("tbody tr").first.wait_for()
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_a_sweep_shows_its_jobs_with_their_settings_and_its_conclusion(
    logged_in: Page, server: Server, accessible: Accessible
) -> None:
    client = server.client()
    rows = jsonl([{"messages": [{"role": "user", "content": f"say {word}"}]} for word in ("red", "blue")])
    file = client.files.create(file=("rows.jsonl", rows), purpose="fine-tune").id
    grader = {"type": "string_check", "name": "red", "input": "{{sample.output_text}}", "reference": "red"}
    asked = {
        "n_epochs": 1,
        "batch_size": 2,
        "advanced": {"sampling": {"group_size": 2, "max_completion_tokens": 4}},
    }
    reinforcement = {"grader": grader | {"operation": "like"}, "hyperparameters": asked}
    job = {
        "model": "tiny",
        "training_file": file,
        "validation_file": file,
        "method": {"type": "reinforcement", "reinforcement": reinforcement},
    }
    stage = {"name": "seeds", "sweep": {"job": job, "over": {"seed": [1, 2]}}}
    made: Any = client.post("/regraft/pipelines", body={"name": "sweep", "stages": [stage]}, cast_to=object)

    logged_in.goto(f"/#/pipelines/{made['id']}")

    jobs = logged_in.get_by_role("region", name="Jobs of seeds")
    expect(jobs.get_by_role("row")).to_have_count(3)
    expect(jobs.get_by_role("row").nth(2)).to_contain_text("seed 2")
    stages = logged_in.get_by_role("region", name="Stages", exact=True)
    expect(stages).to_contain_text("2 validation rows are too few to tell: the model is that of seed")
    expect(stages.get_by_role("link", name="ft:tiny")).to_be_visible()
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_a_failed_pipeline_says_why_and_is_retried_and_cloned(logged_in: Page, server: Server) -> None:
    pipeline = create(server, "too few", rows=3)
    logged_in.goto(f"/#/pipelines/{pipeline}")

    expect(logged_in.get_by_text("at least 10")).to_be_visible()
    logged_in.get_by_role("button", name="Retry").click()
    expect(logged_in.get_by_role("button", name="Pause")).to_be_visible()
    expect(logged_in.get_by_role("button", name="Retry")).to_be_visible()
    logged_in.get_by_role("button", name="Clone from here: learned").click()
    expect(logged_in.get_by_text("Cloned from")).to_be_visible()
    expect(logged_in.get_by_text("mix, reused")).to_be_visible()
