"""The pages of files, models, usage and keys."""

import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from core.telemetry import checkup
from core.telemetry.checkup import DoctorResult
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
from tests.e2e.conftest import Server, patient
from tests.e2e.test_openai_client import GRADER, until
from tests.hooks import Receiver
from tests.present import present, untyped

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>.jsonl"


def open_page(page: Page, name: str) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=name, exact=True).click()
    page.get_by_role("heading", level=1, name=name, exact=True).wait_for()


@pytest.mark.parametrize("name", ["Files", "Models", "Usage", "Keys"])
def test_the_lists_are_accessible(logged_in: Page, finished: str, name: str, accessible: Accessible) -> None:
    open_page(logged_in, name)
    logged_in.locator("tbody tr").first.wait_for()

    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_the_pages_of_a_file_and_a_model_are_accessible(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    job = server.client().fine_tuning.jobs.retrieve(finished)
    for place, region in (
        (f"files/{job.training_file}", "First rows"),
        (f"models/{job.fine_tuned_model}", "Checkpoints"),
    ):
        logged_in.goto(f"/#/{place}")
        logged_in.get_by_role("region", name=region).wait_for()
        accessible(logged_in)
        readable_on_a_telephone(logged_in)


def profiled(page: Page) -> None:
    """Wait until the profile of a file is shown: its request would fail if the file were deleted before."""
    page.get_by_text("Fields and lengths as tables").wait_for()


def test_a_file_is_uploaded_shown_and_deleted(logged_in: Page, server: Server) -> None:
    open_page(logged_in, "Files")
    content = rows(["first", "second", "third"])
    logged_in.get_by_label("Upload a dataset").set_input_files(
        {"name": HOSTILE, "mimeType": "application/jsonl", "buffer": content}
    )
    expect(logged_in.get_by_role("status").first).to_contain_text("Uploaded")
    logged_in.get_by_role("link", name=HOSTILE).click()

    expect(logged_in.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    expect(logged_in.locator("dt:text-is('Rows') + dd")).to_have_text("3")
    expect(logged_in.get_by_role("region", name="First rows").locator("tbody tr")).to_have_count(3)
    with logged_in.expect_download() as download:
        logged_in.get_by_role("link", name="Download").click()
    assert download.value.path().read_bytes() == content
    file_id = logged_in.url.rpartition("/")[2]
    profiled(logged_in)
    logged_in.on("dialog", lambda dialog: dialog.accept())
    logged_in.get_by_role("button", name="Delete").click()
    expect(logged_in.get_by_role("heading", level=1)).to_have_text("Files")
    assert file_id not in [file.id for file in server.client().files.list()]


def test_a_hostile_name_is_one_word_of_the_copied_command(
    logged_in: Page, server: Server, tmp_path: Path
) -> None:
    logged_in.context.grant_permissions(["clipboard-read", "clipboard-write"])
    name = "$(touch taken) `touch taken` it's.jsonl"
    made = server.client().files.create(file=(name, rows(["x"])), purpose="fine-tune")
    logged_in.goto(f"/#/files/{made.id}")
    environment = os.environ | {
        "REGRAFT_BASE_URL": server.base_url,
        "REGRAFT_API_KEY": server.key,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    subprocess.run(["bash", "-c", copied(logged_in, "CLI")], cwd=tmp_path, env=environment, check=True)

    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_line_that_is_not_json_is_named(logged_in: Page, server: Server) -> None:
    made = server.client().files.create(file=("bad.jsonl", b'{"messages": []}\nno\n'), purpose="fine-tune")

    logged_in.goto(f"/#/files/{made.id}")

    expect(logged_in.get_by_role("alert")).to_contain_text("Line 2: not JSON")


def test_a_file_goes_into_a_new_job(logged_in: Page, server: Server, finished: str) -> None:
    job = server.client().fine_tuning.jobs.retrieve(finished)
    logged_in.goto(f"/#/files/{job.training_file}")
    expect(logged_in.get_by_role("link", name="finished")).to_be_visible()

    logged_in.get_by_role("link", name="Use in a new job").click()

    expect(logged_in.get_by_label("Training file", exact=True)).to_have_value(job.training_file)


def test_a_tuned_model_shows_its_job_and_its_archives(logged_in: Page, server: Server, finished: str) -> None:
    job = server.client().fine_tuning.jobs.retrieve(finished)
    assert job.fine_tuned_model is not None
    open_page(logged_in, "Models")
    logged_in.get_by_role("link", name=job.fine_tuned_model, exact=True).click()

    expect(logged_in.get_by_role("link", name="finished", exact=True)).to_be_visible()
    expect(logged_in.get_by_text("Its job:")).to_be_visible()
    checkpoints = server.client().fine_tuning.jobs.checkpoints.list(finished).data
    table = logged_in.get_by_role("region", name="Checkpoints")
    expect(table.locator("tbody tr")).to_have_count(len(checkpoints))
    with logged_in.expect_download() as download:
        table.get_by_role("link", name="Download").first.click()
    with tarfile.open(fileobj=io.BytesIO(download.value.path().read_bytes())) as archive:
        assert any(name.endswith("adapter_config.json") for name in archive.getnames())
    logged_in.get_by_role("link", name="Train it further").click()
    expect(logged_in.get_by_label("Model", exact=True)).to_have_value(job.fine_tuned_model)


def test_a_model_is_downloaded_and_deleted_in_the_list(logged_in: Page, server: Server) -> None:
    client = server.client()
    job = create(client, epochs=1, suffix="spare")
    path = f"/regraft/jobs/{job}/stream"
    for _ in client.get(path, cast_to=object, stream=True, stream_cls=openai.Stream[object]):
        pass
    name = client.fine_tuning.jobs.retrieve(job).fine_tuned_model
    open_page(logged_in, "Models")
    logged_in.on("dialog", lambda dialog: dialog.accept())

    with logged_in.expect_download() as download:
        logged_in.get_by_role("link", name=f"Download {name}", exact=True).click()
    logged_in.get_by_role("button", name=f"Delete {name}", exact=True).click()

    with tarfile.open(fileobj=io.BytesIO(download.value.path().read_bytes())) as archive:
        assert any(file.endswith("adapter_config.json") for file in archive.getnames())
    expect(logged_in.get_by_role("button", name=f"Delete {name}", exact=True)).to_have_count(0)
    assert name not in [model.id for model in client.models.list().data]


def test_the_copied_call_of_a_model_answers(
    logged_in: Page, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    logged_in.context.grant_permissions(["clipboard-read", "clipboard-write"])
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    patient(server.client()).chat.completions.create(**asked)  # the inference server has started
    logged_in.goto("/#/models/tiny")
    logged_in.get_by_role("button", name="Copy", exact=True).click()
    expect(logged_in.get_by_text("Copied.", exact=True)).to_be_visible()
    program: str = logged_in.evaluate("navigator.clipboard.readText()")
    assert program == logged_in.get_by_role("region", name="A call in Python").text_content()

    exec(program.replace('api_key="..."', f'api_key="{server.key}"'), {})

    assert capsys.readouterr().out.strip()


def test_usage_is_reported_by_day_and_model_and_job(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    logged_in.context.grant_permissions(["clipboard-read", "clipboard-write"])
    client = server.client()
    jobs = untyped(client.get("/fine_tuning/jobs?limit=100", cast_to=object))["data"]
    sampled = sum((job["usage_metrics"] or {}).get("sampled_tokens", 0) for job in jobs)
    open_page(logged_in, "Usage")
    table = logged_in.get_by_role("region", name="Usage", exact=True)

    expect(table.locator("tfoot td").nth(1)).to_have_text(f"{sampled:,}")
    expect(logged_in.get_by_role("img", name="Worker time of each day")).to_be_visible()
    expect(logged_in.get_by_role("region", name="Limits")).to_contain_text("6,000")
    accessible(logged_in)
    logged_in.get_by_label(re.compile("^By")).select_option("model")
    expect(table.locator("tbody td").first).to_have_text("tiny")
    logged_in.get_by_label("All projects").check()
    logged_in.get_by_label(re.compile("^By")).select_option("project")
    expect(table.locator("tbody tr", has_text="test_management")).to_contain_text(f"{sampled:,}")
    assert copied(logged_in, "CLI") == "regraft usage --by project --days 30 --all-projects"
    logged_in.get_by_label("All projects").uncheck()
    logged_in.get_by_label(re.compile("^By")).select_option("job")
    of_jobs = logged_in.get_by_role("region", name="Usage of jobs")
    expect(of_jobs.locator("tbody tr")).to_have_count(len(jobs))
    expect(of_jobs.locator("tfoot td").nth(2)).to_have_text(f"{sampled:,}")


def test_an_operator_sees_workers_and_queues(logged_in: Page, server: Server, accessible: Accessible) -> None:
    logged_in.get_by_role("link", name="Workers").click()

    row = logged_in.get_by_role("region", name="Workers").locator("tbody tr")
    expect(row).to_contain_text(f"/{server.process.pid}")
    expect(row).to_contain_text("idle")
    results = [
        DoctorResult(
            check="disk", state="failed", text="1 GiB free", remedy="Free some space.", checked_at=time.time()
        ),
        DoctorResult(
            check="clock", state="warning", text="1 s late", remedy="Set it.", checked_at=time.time()
        ),
    ]
    checkup.keep(server.folder, socket.gethostname(), results)
    summary = row.get_by_text("1 failed, 1 warning")
    expect(summary).to_be_visible(timeout=60_000)  # workers report themselves every 15 s
    summary.click()
    expect(row).to_contain_text("disk: 1 GiB freeFree some space.")
    queues = logged_in.get_by_role("region", name="Queues")
    expect(queues.locator("tbody tr")).to_have_count(3)
    expect(queues.locator("tbody tr").first).to_contain_text("nothing waits")
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_a_tenant_has_no_page_of_workers(page: Page, server: Server) -> None:
    client = server.client()
    made = untyped(
        client.post(
            f"/organization/projects/{project_of(client)}/api_keys",
            body={"name": "tenant", "scope": "admin"},
            cast_to=object,
        )
    )
    log_in(page, made["value"])

    expect(page.get_by_role("link", name="Keys")).to_be_visible()
    expect(page.get_by_role("link", name="Workers")).to_have_count(0)
    page.goto("/#/workers")
    expect(page.get_by_text("need a key with the scope")).to_be_visible()


def test_a_key_is_created_rotated_and_revoked(logged_in: Page, server: Server) -> None:
    open_page(logged_in, "Keys")
    logged_in.get_by_label("Name", exact=True).fill("for a test")
    logged_in.get_by_label("Scope").select_option("read")
    logged_in.get_by_label("Expires after days").fill("7")
    logged_in.get_by_role("button", name="Create key").click()
    value = logged_in.locator(".secret")
    first = value.inner_text()
    assert server.client(api_key=first).models.list().data
    row = logged_in.get_by_role("region", name="Keys of the project").locator("tr", has_text="for a test")
    expect(row).to_contain_text("read")
    logged_in.on("dialog", lambda dialog: dialog.accept())

    row.get_by_role("button", name="Rotate").click()
    expect(value).not_to_have_text(first)
    second = value.inner_text()
    assert server.client(api_key=second).models.list().data
    logged_in.get_by_role("button", name="Done").click()
    expect(value).to_have_count(0)
    row.get_by_role("button", name="Revoke").last.click()

    expect(row.get_by_role("button")).to_have_count(0)
    for key in (first, second):
        with pytest.raises(Exception, match="revoked"):
            server.client(api_key=key).models.list()


def test_a_key_that_only_reads_manages_nothing(page: Page, server: Server, finished: str) -> None:
    client = server.client()
    path = f"/organization/projects/{project_of(client)}/api_keys"
    made: Any = client.post(path, cast_to=object, body={"name": "reader", "scope": "read"})
    log_in(page, made["value"])

    open_page(page, "Files")
    page.locator("tbody tr").first.wait_for()
    expect(page.get_by_role("button", name="Delete")).to_have_count(0)
    open_page(page, "Keys")
    expect(page.get_by_text("needs a key with the scope “admin”")).to_be_visible()
    open_page(page, "Usage")
    expect(page.get_by_text("need a key with the scope “admin”")).to_be_visible()
    page.get_by_role("region", name="Usage", exact=True).wait_for()


def test_the_list_of_files_names_the_jobs_that_use_them(
    logged_in: Page, server: Server, finished: str
) -> None:
    job = server.client().fine_tuning.jobs.retrieve(finished)
    files = {job.training_file: "training", job.validation_file: "validation", job.result_files[0]: "results"}

    open_page(logged_in, "Files")

    for file, role in files.items():
        row = logged_in.locator("tr", has=logged_in.locator(f'a[href$="{file}"]'))
        expect(row).to_contain_text(f"{role} of finished")
        expect(row).not_to_contain_text(str(file))


def test_a_file_is_profiled_once(logged_in: Page, server: Server) -> None:
    made = server.client().files.create(file=("once.jsonl", rows(["x"])), purpose="fine-tune")
    asked: list[str] = []
    logged_in.on("request", lambda request: asked.append(request.url))
    logged_in.clock.install()
    logged_in.goto(f"/#/files/{made.id}")
    logged_in.get_by_role("region", name="First rows").wait_for()
    logged_in.clock.run_for(500)
    profiled(logged_in)

    logged_in.clock.run_for(5000)

    assert len([url for url in asked if url.endswith("/profile")]) == 1


def test_a_refused_deletion_is_shown(
    logged_in: Page, server: Server, watched: tuple[BrowserContext, Watched]
) -> None:
    watched[1].expected.append("404")
    made = server.client().files.create(file=("gone.jsonl", rows(["x"])), purpose="fine-tune")
    logged_in.goto(f"/#/files/{made.id}")
    logged_in.get_by_role("region", name="First rows").wait_for()
    profiled(logged_in)
    server.client().files.delete(made.id)
    logged_in.on("dialog", lambda dialog: dialog.accept())

    logged_in.get_by_role("button", name="Delete").click()

    expect(logged_in.get_by_role("alert")).to_contain_text(made.id)


def arena(page: Page, server: Server, finished: str) -> str:
    """Open it with the tuned model and its base. Returns the tuned model."""
    client = patient(server.client())  # the page shows the 503 of an inference server that is starting
    model = present(client.fine_tuning.jobs.retrieve(finished).fine_tuned_model)
    client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "say it"}], max_tokens=1
    )
    page.goto(f"/#/models/{model}")
    page.get_by_role("link", name="Compare answers").click()
    page.get_by_role("heading", level=1, name="Arena").wait_for()
    page.get_by_label("Tokens, at most").fill("4")
    return model


def answer(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=f"Answer of {name}")


def ask(page: Page) -> None:
    page.get_by_role("button", name="Answer with 2 models").click()
    page.get_by_role("button", name="Equally good").wait_for()


def test_a_tuned_model_is_tried_beside_its_base_on_a_row_of_the_validation(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    client = patient(server.client())  # the page shows the 503 of an inference server that is starting
    model = present(client.fine_tuning.jobs.retrieve(finished).fine_tuned_model)
    asked: Any = {"messages": [{"role": "user", "content": "is it green"}], "temperature": 0, "seed": 1}
    said = [
        client.chat.completions.create(model=name, max_completion_tokens=256, **asked)
        .choices[0]
        .message.content
        for name in ("tiny", model)
    ]
    logged_in.goto(f"/#/models/{model}")
    box = logged_in.get_by_role("region", name="Try it")

    box.get_by_role("button", name="is it green").click()
    expect(box.get_by_text("Expected: yes")).to_be_visible()
    box.get_by_role("button", name="Answer").click()

    for at, text in enumerate(said):
        expect(box.get_by_test_id(f"try-{at}")).to_have_text(present(text))
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_the_rows_of_any_method_are_offered_as_questions_of_their_user(
    logged_in: Page, server: Server, finished: str
) -> None:
    job = server.client().fine_tuning.jobs.retrieve(finished)
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "is it red"}]
    looked_up = [{"role": "user", "content": "how warm"}, {"role": "tool", "content": "21 degrees"}]
    rows = [{"input": {"messages": asked}}, {"messages": looked_up}, {"messages": [None]}]
    logged_in.route(
        f"**/files/{job.validation_file}/content",
        lambda route: route.fulfill(body="".join(json.dumps(row) + "\n" for row in rows)),
    )
    logged_in.goto(f"/#/models/{job.fine_tuned_model}")
    box = logged_in.get_by_role("region", name="Try it")

    expect(box.get_by_role("button", name="is it red")).to_be_visible()
    expect(box.locator(".example")).to_have_text(["is it red", "how warm"])
    box.get_by_role("button", name="is it red").click()
    expect(box.get_by_text("With the 1 message before it in the row.")).to_be_visible()


def test_the_arena_has_two_models_answer_side_by_side(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    model = arena(logged_in, server, finished)
    logged_in.get_by_label("Message", exact=True).fill("say it")
    ask(logged_in)

    for name in ("tiny", model):
        said = server.client().chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "say it"}],
            temperature=0,
            seed=1,
            max_completion_tokens=4,
        )
        expect(answer(logged_in, name).locator(".answer")).to_have_text(
            present(said.choices[0].message.content)
        )
    logged_in.get_by_role("button", name="Equally good").click()
    logged_in.get_by_role("region", name="Votes by model").wait_for()
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_answers_to_a_row_are_scored_by_the_grader_of_the_models_job(
    logged_in: Page, server: Server, finished: str
) -> None:
    model = arena(logged_in, server, finished)
    logged_in.get_by_label("From").select_option("valid.jsonl")
    logged_in.get_by_text("Scored by the grader of").wait_for()
    logged_in.get_by_role("button", name="Next row").click()
    expect(logged_in.locator(".prompt")).to_have_text("is it green")
    ask(logged_in)

    graders = server.client().fine_tuning.alpha.graders
    for name in ("tiny", model):
        text = answer(logged_in, name).locator(".answer").inner_text()
        reward = graders.run(grader=GRADER, model_sample=text, item={"answer": "yes"}).reward
        expect(answer(logged_in, name)).to_contain_text(f"Score {reward:.2f}")


def test_a_blind_vote_hides_the_models_until_it_is_given(
    logged_in: Page, server: Server, finished: str
) -> None:
    model = arena(logged_in, server, finished)
    logged_in.get_by_label("Hide which model answered").check()
    logged_in.get_by_label("Message", exact=True).fill("say it")
    ask(logged_in)
    expect(answer(logged_in, "tiny")).to_have_count(0)

    logged_in.get_by_role("button", name="Model A is better").click()
    expect(answer(logged_in, "tiny")).to_have_count(1)
    with logged_in.expect_download() as waiting:
        logged_in.get_by_role("button", name="Download as JSONL").click()

    [vote] = [json.loads(line) for line in waiting.value.path().read_text().splitlines()]
    assert vote["winner"] in ("tiny", model)
    assert vote["winner"] == vote["answers"][0]["model"]
    assert {one["model"] for one in vote["answers"]} == {"tiny", model}
    assert vote["messages"] == [{"role": "user", "content": "say it"}]
    assert vote["blind"] is True


def test_a_row_that_cannot_be_read_is_neither_asked_nor_copied_as_another_prompt(
    logged_in: Page, server: Server, finished: str
) -> None:
    made = server.client().files.create(file=("broken.jsonl", b"{\n"), purpose="fine-tune")
    arena(logged_in, server, finished)
    logged_in.get_by_label("Message", exact=True).fill("say it")
    expect(logged_in.get_by_text("Copy as")).to_be_visible()

    logged_in.get_by_label("From").select_option("broken.jsonl")

    expect(logged_in.get_by_role("button", name="Answer with 2 models")).to_be_disabled()
    expect(logged_in.get_by_text("Copy as")).to_have_count(0)
    server.client().files.delete(made.id)


def test_a_refused_prompt_is_said_in_each_answer(
    logged_in: Page, server: Server, finished: str, watched: tuple[BrowserContext, Watched]
) -> None:
    watched[1].expected.append("400")
    arena(logged_in, server, finished)
    logged_in.get_by_label("Message", exact=True).fill("it " * 500)

    logged_in.get_by_role("button", name="Answer with 2 models").click()

    expect(logged_in.locator(".answers .bad")).to_have_count(2)
    expect(logged_in.get_by_role("button", name="Equally good")).to_have_count(0)


def test_an_endpoint_of_webhooks_is_created_tested_and_deleted(
    logged_in: Page, accessible: Accessible
) -> None:
    logged_in.on("dialog", lambda dialog: dialog.accept())
    with Receiver() as receiver:
        open_page(logged_in, "Webhooks")
        logged_in.get_by_label("Name", exact=True).fill("mine")
        logged_in.get_by_label("URL").fill(receiver.url)
        logged_in.get_by_label("fine_tuning.job.succeeded").check()
        logged_in.get_by_role("button", name="Create endpoint").click()
        expect(logged_in.get_by_role("heading", name="The secret of “mine”")).to_be_visible()
        assert logged_in.locator(".secret").inner_text().startswith("whsec_")
        accessible(logged_in)
        readable_on_a_telephone(logged_in)

        logged_in.get_by_role("button", name="Test mine").click()
        expect(logged_in.get_by_text("answered fine_tuning.job.succeeded with status 200.")).to_be_visible()
        assert len(receiver.received) == 1

    logged_in.get_by_role("button", name="Delete mine").click()
    expect(logged_in.get_by_text("No endpoints:")).to_be_visible()


def test_the_deliveries_to_an_endpoint_are_shown_and_sent_again(
    logged_in: Page, server: Server, finished: str, accessible: Accessible
) -> None:
    client = server.client()
    logged_in.on("dialog", lambda dialog: dialog.accept())
    with Receiver() as receiver:
        endpoint = client.webhooks.create(
            name="mine", url=receiver.url, event_types=["fine_tuning.job.cancelled"]
        )
        request = untyped(client.get(f"/regraft/jobs/{finished}/request", cast_to=object))
        job: Any = client.post("/fine_tuning/jobs", body=request, cast_to=object)
        client.fine_tuning.jobs.cancel(job["id"])
        until(lambda: receiver.received)
        open_page(logged_in, "Webhooks")
        logged_in.get_by_role("button", name="Deliveries to mine").click()
        table = logged_in.get_by_role("region", name="Deliveries to mine")
        expect(table).to_contain_text("delivered")
        accessible(logged_in)
        readable_on_a_telephone(logged_in)

        table.get_by_role("button", name="Send").click()

        until(lambda: len(receiver.received) == 2)
    [first, again] = [one.headers["webhook-id"] for one in receiver.received]
    assert first == again
    logged_in.get_by_label("State").select_option("failed")
    expect(logged_in.get_by_text("No failed deliveries in the last 30 days.")).to_be_visible()
    client.webhooks.delete(endpoint.id)


def test_the_audit_log_names_the_key_of_each_change(
    logged_in: Page, server: Server, accessible: Accessible
) -> None:
    client = server.client()
    path = f"/organization/projects/{project_of(client)}/api_keys"
    made = untyped(client.post(path, body={"name": "short-lived", "scope": "read"}, cast_to=object))
    client.delete(f"{path}/{made['id']}", cast_to=object)

    open_page(logged_in, "Audit log")

    changes = logged_in.get_by_role("region", name="Changes, newest first").locator("tbody tr")
    expect(changes.nth(0)).to_contain_text(made["id"])
    logged_in.get_by_label("Type").select_option("api_key.created")
    expect(changes.nth(0)).to_contain_text("api_key.created")
    assert "type=api_key.created" in logged_in.url
    accessible(logged_in)
    readable_on_a_telephone(logged_in)


def test_the_audit_log_is_for_admins(page: Page, server: Server) -> None:
    client = server.client()
    path = f"/organization/projects/{project_of(client)}/api_keys"
    reader = untyped(client.post(path, body={"name": "reader", "scope": "read"}, cast_to=object))
    log_in(page, reader["value"])

    open_page(page, "Audit log")

    expect(page.get_by_text("needs a key with the scope “admin”")).to_be_visible()
