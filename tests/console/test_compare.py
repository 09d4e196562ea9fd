"""Two to six jobs side by side."""

import json
import re
from typing import Any

import openai
import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import Accessible, create, readable_on_a_telephone
from tests.e2e.conftest import Server
from tests.present import untyped

pytestmark = pytest.mark.slow

NONE = "\N{EN DASH}"


@pytest.fixture(scope="module")
def other(server: Server, finished: str) -> str:
    """A job that differs from `finished` in its epochs and files."""
    client = server.client()
    job = create(client, epochs=3, suffix="other")
    path = f"/regraft/jobs/{job}/stream"
    for _ in client.get(path, cast_to=object, stream=True, stream_cls=openai.Stream[object]):
        pass
    return job


def open_comparison(page: Page, first: str, second: str, more: str = "") -> None:
    page.goto(f"/#/compare?jobs={first},{second}{more}")
    page.locator("figure").first.wait_for()
    page.get_by_role("heading", name="What differs in the requests").wait_for()


def metrics(server: Server, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = untyped(
        server.client().get(f"/regraft/jobs/{job_id}/metrics", cast_to=object)
    )["data"]
    return found


def test_the_comparison_is_accessible(
    logged_in: Page, finished: str, other: str, accessible: Accessible
) -> None:
    open_comparison(logged_in, finished, other)

    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_two_jobs_picked_in_the_list_are_compared(logged_in: Page, finished: str, other: str) -> None:
    logged_in.get_by_label("Compare finished").check()
    logged_in.get_by_label("Compare other").check()
    logged_in.get_by_role("link", name="Compare 2 jobs").click()

    results = logged_in.get_by_role("region", name="Results")
    expect(results).to_contain_text("finished")
    expect(results).to_contain_text("other")
    differences = logged_in.get_by_role("region", name="Differences of the requests")
    epochs = differences.locator("tr", has_text="n_epochs")
    expect(epochs.locator("td")).to_have_text(["hyperparameters.n_epochs", "2", "3"])
    assert {finished, other} == set(logged_in.url.partition("jobs=")[2].split(",")), "deep-linkable"


def test_the_curves_have_the_values_of_both_jobs(
    logged_in: Page, server: Server, finished: str, other: str
) -> None:
    open_comparison(logged_in, finished, other)
    chart = logged_in.locator("figure", has_text="Reward of the validation")
    chart.locator("summary").click()

    rows = chart.locator("details tbody tr")
    both = [metrics(server, job) for job in (finished, other)]
    steps = sorted({step["step"] for some in both for step in some})
    expect(rows).to_have_count(len(steps))
    for step, row in zip(steps, rows.all(), strict=True):
        shown = [cell.inner_text() for cell in row.locator("td").all()]
        values = [
            next((one.get("full_valid_mean_reward") for one in some if one["step"] == step), None)
            for some in both
        ]
        assert shown == [str(step), *(NONE if value is None else f"{value:.3f}" for value in values)]


def test_without_a_choice_the_newest_two_jobs_are_offered(
    logged_in: Page, finished: str, other: str, accessible: Accessible
) -> None:
    logged_in.goto("/#/compare")
    expect(logged_in.get_by_role("heading", name="Which job is better?")).to_be_visible()
    accessible(logged_in)

    logged_in.get_by_role("button", name=re.compile("^Compare .* with ")).click()

    expect(logged_in.get_by_role("list", name="Compared jobs").get_by_role("listitem")).to_have_count(2)


def test_the_legends_show_the_result_of_each_job(
    logged_in: Page, server: Server, finished: str, other: str
) -> None:
    open_comparison(logged_in, finished, other)

    legend = logged_in.locator("figure", has_text="Reward of the validation").locator(".entry")
    results = [untyped(server.client().fine_tuning.jobs.retrieve(job)).result for job in (finished, other)]
    expect(legend).to_have_text(
        [
            re.compile(rf"{name} {result['value']:.3g} ?delivered, step {result['step']}(, last \S+)?$")
            for name, result in zip(("finished", "other"), results, strict=True)
        ]
    )


def test_the_legend_of_the_loss_shows_the_delivered_checkpoint(logged_in: Page, server: Server) -> None:
    client = server.client()
    chat = {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "yes"}]}
    file = client.files.create(
        file=("train.jsonl", ((json.dumps(chat) + "\n") * 12).encode()), purpose="fine-tune"
    ).id
    hyperparameters = {"n_epochs": 2, "batch_size": 4, "advanced": {"lora": {"rank": 4}}}
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    job_id = client.fine_tuning.jobs.create(
        model="tiny", training_file=file, validation_file=file, seed=1, method=method
    ).id
    path = f"/regraft/jobs/{job_id}/stream"
    for _ in client.get(path, cast_to=object, stream=True, stream_cls=openai.Stream[object]):
        pass

    logged_in.goto(f"/#/jobs/{job_id}")

    result = untyped(client.fine_tuning.jobs.retrieve(job_id)).result
    validation = logged_in.locator("figure").filter(has=logged_in.get_by_role("heading", name="Loss"))
    expect(validation.locator(".entry", has_text="validation")).to_have_text(
        re.compile(rf"validation {result['value']:.3g} ?delivered, step {result['step']}(, last \S+)?$")
    )
    assert result["metric"] == "full_valid_loss"


def test_the_axis_may_be_tokens(logged_in: Page, server: Server, finished: str, other: str) -> None:
    open_comparison(logged_in, finished, other)
    logged_in.get_by_label("Axis").select_option("tokens")
    chart = logged_in.locator("figure", has_text="Reward of training")
    chart.locator("summary").click()

    last = int(chart.locator("details tbody tr td:first-child").last.inner_text())
    sums = [
        sum(step.get("sampled_tokens") or 0 for step in metrics(server, job)) for job in (finished, other)
    ]
    assert last == max(sums)
    assert "x=tokens" in logged_in.url


def test_the_axis_may_be_gpu_time_or_money(
    logged_in: Page, server: Server, finished: str, other: str
) -> None:
    open_comparison(logged_in, finished, other, "&x=money")
    chart = logged_in.locator("figure", has_text="Reward of training")
    chart.locator("summary").click()
    last = chart.locator("details tbody tr td:first-child").last

    used: list[Any] = [
        untyped(server.client().fine_tuning.jobs.retrieve(job)).usage_metrics for job in (finished, other)
    ]
    expect(chart.locator("thead th").first).to_have_text("EUR")
    dearest = max(one["cost"]["amount"] for one in used)
    assert float(last.inner_text()) == pytest.approx(dearest, abs=1e-3)
    logged_in.get_by_label("Axis").select_option("gpu")
    expect(chart.locator("thead th").first).to_have_text("minutes of worker time")
    most = max(one["gpu_seconds"] for one in used)
    assert float(last.inner_text()) == pytest.approx(most / 60, abs=0.02)


def test_a_third_job_is_added_and_another_one_becomes_the_first(
    logged_in: Page, server: Server, finished: str, other: str, accessible: Accessible
) -> None:
    client = server.client()
    third = create(client, epochs=1, suffix="third")
    client.fine_tuning.jobs.cancel(third)
    open_comparison(logged_in, finished, other)

    logged_in.get_by_label("Add a job").select_option(third)

    chosen = logged_in.get_by_role("list", name="Compared jobs").get_by_role("listitem")
    expect(chosen).to_have_count(3)
    chosen.filter(has_text="other").get_by_role("button", name="Compare with this").click()
    expect(chosen.first).to_contain_text("other")
    paired = logged_in.get_by_role("region", name="Paired rewards")
    expect(paired.locator("tbody tr", has_text="finished").get_by_role("img")).to_be_visible()
    expect(paired.locator("tbody tr", has_text="third")).to_contain_text("third has no stored validation.")
    accessible(logged_in)
    readable_on_a_telephone(logged_in)
    assert f"jobs={other},{finished},{third}" in logged_in.url
    logged_in.get_by_role("button", name="Remove third").click()
    expect(chosen).to_have_count(2)


def test_jobs_of_two_methods_are_compared(logged_in: Page, server: Server, finished: str) -> None:
    """Both have hyperparameters of the same names."""
    client = server.client()
    lines = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}
        for text in "abcdefghij"
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("answers.jsonl", content), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, seed=1, method={"type": "supervised"}
    )

    logged_in.goto(f"/#/compare?jobs={finished},{job.id}")

    differences = logged_in.get_by_role("region", name="Differences of the requests")
    method = differences.locator("tr", has=logged_in.get_by_text("method", exact=True))
    expect(method.locator("td")).to_have_text(["method", "reinforcement", "supervised"])
    epochs = differences.locator("tr", has_text="n_epochs")
    expect(epochs.locator("td").first).to_have_text("hyperparameters.n_epochs")


def test_two_jobs_are_compared_prompt_by_prompt_with_an_interval(
    logged_in: Page, server: Server, finished: str, other: str, accessible: Accessible
) -> None:
    path = f"/regraft/jobs/{finished}/compare?other={other}"
    reward = untyped(server.client().get(path, cast_to=object))["pairs"][0]["reward"]

    logged_in.goto(f"/#/compare?jobs={finished},{other}")

    row = logged_in.get_by_role("region", name="Paired rewards").locator("tbody tr")
    difference, low, high = (
        f"{value:+.3f}" if round(value, 3) else "0.000"
        for value in (reward["difference"], reward["ci_low"], reward["ci_high"])
    )
    expect(row).to_contain_text(f"{difference} ({low} to {high})")
    expect(row).to_contain_text(f"{reward['wins']}, {reward['losses']}, {reward['ties']}")
    changed = "better" if reward["ci_low"] > 0 else "worse"
    expect(row).to_contain_text(
        "no difference shown" if reward["ci_low"] <= 0 <= reward["ci_high"] else changed
    )
    accessible(logged_in)


def test_the_model_of_a_job_is_promoted_in_place_of_another_one_and_rolled_back(
    logged_in: Page, server: Server, finished: str, other: str, accessible: Accessible
) -> None:
    client = server.client()
    models = [client.fine_tuning.jobs.retrieve(job).fine_tuned_model for job in (finished, other)]
    client.post("/regraft/aliases", body={"name": "production", "model": models[0]}, cast_to=object)
    open_comparison(logged_in, finished, other)

    logged_in.get_by_role("button", name="Promote other").click()

    dialog = logged_in.get_by_role("dialog")
    expect(dialog.get_by_label("Alias")).to_have_value("production")
    expect(dialog).to_contain_text(f"It replaces {models[0]}")
    accessible(logged_in)
    readable_on_a_telephone(logged_in)
    dialog.get_by_role("button", name="Promote").click()
    said = logged_in.get_by_text(f"production is answered by {models[1]} now.")
    expect(said).to_be_visible()
    logged_in.goto("/#/models")
    row = logged_in.get_by_role("region", name="Aliases").locator("tbody tr")
    expect(row.locator("td").nth(1)).to_have_text(str(models[1]))
    accessible(logged_in)
    readable_on_a_telephone(logged_in)
    row.get_by_role("button", name="Roll back production").click()
    expect(row.locator("td").nth(1)).to_have_text(str(models[0]))
    logged_in.get_by_role("link", name="production").click()
    expect(logged_in.get_by_role("heading", name="production")).to_be_visible()
    expect(logged_in.get_by_role("link", name=str(models[0]))).to_be_visible()


def test_jobs_are_compared_by_what_their_tokens_taught(logged_in: Page, finished: str, other: str) -> None:
    open_comparison(logged_in, finished, other)

    rows = logged_in.get_by_role("region", name="What the tokens taught").locator("tbody tr")

    learned = rows.filter(has_text="Learned").locator("td")
    expect(learned).to_have_count(4)
    expect(learned.first).to_have_text(re.compile(r"^\d+\.\d %$"))
