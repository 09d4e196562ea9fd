"""/v1/evals with OpenAI's client: what a job's validations look like where its users look for them."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.pagination import SyncCursorPage
from openai.types.evals.run_list_response import RunListResponse
from openai.types.evals.runs.output_item_list_response import OutputItemListResponse
from starlette.testclient import TestClient

from core.database.tables import Checkpoint, Job, TunedModel
from core.results import evals, rollouts
from tests.api.conftest import House
from tests.api.test_rollouts import row
from tests.present import untyped
from tests.rollout_pages import store_page

MULTI = {
    "type": "multi",
    "name": "both",
    "graders": {
        "exact": {
            "type": "string_check",
            "name": "exact",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
            "operation": "eq",
        },
        "close": {
            "type": "text_similarity",
            "name": "close",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
            "evaluation_metric": "fuzzy_match",
            "pass_threshold": 0.6,
        },
    },
    "calculate_output": "0.5*exact+0.5*close",
    "pass_threshold": 0.2,
}
# The scores of a run's three groups of two, by the order of its items.
SCORES = [0.0, 0.1, 0.2, None, 0.9, 1.0]


@pytest.fixture
def client(house: House) -> OpenAI:
    return OpenAI(
        api_key=house.key, base_url="http://testserver/v1", http_client=house.client(), max_retries=0
    )


def validate(house: House, job_id: str, step: int) -> None:
    """Store the validation of a step, as a run does."""
    with house.database.read() as session:
        grader = session.query(Job).where(Job.id == job_id).one().body["grader"]
    rows = [
        row(
            step,
            "valid",
            number // 2,
            number % 2,
            score=score,
            error=None if score is not None else "other_error",
            sub_scores={"exact": score, "close": 0.5},
            sub_reasons={"close": "half"},
        )
        for number, score in enumerate(SCORES)
    ]
    page = store_page(house.blobs, job_id, step, "valid", rows)
    page.summary, page.created_at = evals.summary(rows, evals.criteria(grader)), 1000 + step
    with house.database.write() as session:
        session.add(page)


@pytest.fixture
def job(house: House, api: TestClient, create_job: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A job that was validated before its first step and after its second and fourth."""
    job = create_job(reinforcement={"grader": MULTI}, suffix="colours", metadata={"team": "a"})
    for step in (0, 2, 4):
        validate(house, job["id"], step)
    return job


@pytest.mark.both_databases
def test_a_job_names_its_eval_and_the_eval_its_graders(client: OpenAI, job: dict[str, Any]) -> None:
    found = client.evals.retrieve(untyped(client.fine_tuning.jobs.retrieve(job["id"])).eval_id)

    assert found.id == job["eval_id"] == job["id"].replace("ftjob-", "eval_")
    assert (found.object, found.name, found.metadata) == ("eval", "colours", {"team": "a"})
    assert [one.name for one in found.testing_criteria] == ["both", "exact", "close"]
    assert [untyped(one).pass_threshold for one in found.testing_criteria] == [0.2, 0.5, 0.6]
    assert found.data_source_config.type == "custom"
    assert found.data_source_config.schema_["required"] == ["item", "sample"]


def test_a_fresh_job_has_an_eval_without_runs(
    client: OpenAI, create_job: Callable[..., dict[str, Any]]
) -> None:
    runs = client.evals.runs.list(create_job()["eval_id"])

    assert (runs.data, runs.has_more) == ([], False)


def test_headers_of_an_endpoint_grader_are_not_shown(
    house: House, client: OpenAI, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    grader = {
        "type": "endpoint",
        "name": "e",
        "url": "https://8.8.8.8",
        "headers": {"authorization": "s3cret"},
    }
    with house.database.write() as session:
        session.query(Job).where(Job.id == job["id"]).one().body = {"grader": grader}

    shown = client.evals.with_raw_response.retrieve(job["eval_id"]).text
    assert "authorization" in shown
    assert "s3cret" not in shown


@pytest.mark.both_databases
def test_evals_are_listed_page_by_page_from_either_end(
    client: OpenAI, create_job: Callable[..., dict[str, Any]]
) -> None:
    made = [create_job()["eval_id"] for _ in range(5)]

    assert [one.id for one in client.evals.list(limit=2)] == made
    assert [one.id for one in client.evals.list(limit=2, order="desc", order_by="updated_at")] == made[::-1]
    assert untyped(client.evals.list(limit=2)).first_id == made[0]


@pytest.mark.both_databases
def test_a_run_is_a_validation(client: OpenAI, job: dict[str, Any]) -> None:
    run = client.evals.runs.list(job["eval_id"]).data[1]

    assert (run.name, run.status, run.object, run.created_at) == ("Step 2", "completed", "eval.run", 1002)
    counts = run.result_counts
    assert (counts.total, counts.passed, counts.failed, counts.errored) == (6, 3, 2, 1)
    assert [(r.testing_criteria, r.passed, r.failed) for r in run.per_testing_criteria_results] == [
        ("both", 3, 2),
        ("exact", 2, 3),
        ("close", 0, 6),  # its own line is at 0.6
    ]
    [usage] = run.per_model_usage
    assert (usage.invocation_count, usage.prompt_tokens, usage.total_tokens) == (6, 30, 42)
    assert untyped(run.data_source.source).id == job["validation_file"]
    assert client.evals.runs.retrieve(run.id, eval_id=job["eval_id"]).to_dict() == run.to_dict()


@pytest.mark.both_databases
def test_runs_are_listed_page_by_page_from_either_end(client: OpenAI, job: dict[str, Any]) -> None:
    names = ["Step 0", "Step 2", "Step 4"]

    assert [run.name for run in client.evals.runs.list(job["eval_id"], limit=1)] == names
    assert [run.name for run in client.evals.runs.list(job["eval_id"], limit=2, order="desc")] == names[::-1]


@pytest.mark.both_databases
def test_only_completed_runs_are_there(client: OpenAI, job: dict[str, Any]) -> None:
    assert len(client.evals.runs.list(job["eval_id"], status="completed").data) == 3
    assert client.evals.runs.list(job["eval_id"], status="failed").data == []


@pytest.mark.both_databases
def test_a_run_names_the_checkpoint_it_measured(house: House, client: OpenAI, job: dict[str, Any]) -> None:
    with house.database.write() as session:
        checkpoint = Checkpoint(job_id=job["id"], step=4, epoch=1, blob_prefix="x")
        session.add(checkpoint)
        session.flush()
        for name in ("ft:tiny:default:colours:1", "ft:tiny:default:colours:1:ckpt-step-4"):
            session.add(
                TunedModel(
                    name=name,
                    project_id=house.project.id,
                    job_id=job["id"],
                    base_model="tiny",
                    checkpoint_id=checkpoint.id,
                )
            )

    models = [run.model for run in client.evals.runs.list(job["eval_id"])]

    assert models == ["tiny", "tiny", "ft:tiny:default:colours:1:ckpt-step-4"]


@pytest.fixture
def run(client: OpenAI, job: dict[str, Any]) -> RunListResponse:
    return client.evals.runs.list(job["eval_id"]).data[1]


def items(client: OpenAI, run: RunListResponse, **params: Any) -> SyncCursorPage[OutputItemListResponse]:
    return client.evals.runs.output_items.list(run.id, eval_id=run.eval_id, **params)


@pytest.mark.both_databases
def test_an_output_item_is_a_sample(client: OpenAI, job: dict[str, Any], run: RunListResponse) -> None:
    item = items(client, run).data[2]

    assert (item.object, item.status, item.run_id, item.eval_id) == (
        "eval.run.output_item",
        "pass",
        run.id,
        job["eval_id"],
    )
    assert (item.datasource_item_id, item.datasource_item["answer"]) == (2, "4")
    assert item.sample.input[0].content == "2+2?"
    assert item.sample.output[0].content == "answer 2 1 0"
    assert item.sample.usage.total_tokens == 7
    assert [(r.name, r.type, r.passed, r.score) for r in item.results] == [
        ("both", "multi", True, 0.2),
        ("exact", "string_check", False, 0.2),
        ("close", "text_similarity", False, 0.5),
    ]
    assert item.results[2].reason == "half"
    assert (
        client.evals.runs.output_items.retrieve(item.id, run_id=run.id, eval_id=run.eval_id).to_dict()
        == item.to_dict()
    )


def test_an_output_item_leads_to_the_same_sample_among_the_rollouts(
    api: TestClient, client: OpenAI, job: dict[str, Any], run: RunListResponse
) -> None:
    item = items(client, run).data[3]

    listed = api.get(f"/v1/regraft/jobs/{job['id']}/rollouts", params={"step": 2, "split": "valid"}).json()
    assert untyped(item).rollout_id == listed["data"][3]["id"]


def test_what_could_not_be_graded_is_an_error_and_neither_passed_nor_failed(
    client: OpenAI, run: RunListResponse
) -> None:
    statuses = [item.status for item in items(client, run)]

    assert statuses == ["fail", "fail", "pass", "error", "pass", "pass"]
    assert [item.results[0].score for item in items(client, run, status="error")] == [None]


@pytest.mark.parametrize(("status", "expected"), [("pass", [2, 4, 5]), ("fail", [0, 1])])
def test_output_items_are_filtered_by_status_over_all_pages(
    client: OpenAI, run: RunListResponse, status: str, expected: list[int]
) -> None:
    everything = [item.id for item in items(client, run)]

    assert [item.id for item in items(client, run, status=status, limit=1)] == [
        everything[i] for i in expected
    ]


def test_output_items_are_listed_page_by_page_from_either_end(client: OpenAI, run: RunListResponse) -> None:
    forward = [item.id for item in items(client, run, limit=4)]

    assert len(set(forward)) == 6
    assert [item.id for item in items(client, run, limit=4, order="desc")] == forward[::-1]


@pytest.mark.parametrize(
    "grader", [{}, {"pass_threshold": 0.5}, {"type": "score_model", "range": [-1.0, 2.0]}]
)
def test_half_of_what_there_is_to_get_passes_unless_the_grader_says(grader: dict[str, Any]) -> None:
    [whole] = evals.criteria({"type": "python", "name": "g"} | grader)

    assert whole.threshold == 0.5


def test_what_is_not_there_is_not_found(client: OpenAI, job: dict[str, Any], run: RunListResponse) -> None:
    theirs, nothing = {"eval_id": job["eval_id"]}, run.id.replace("_2", "_3")
    find = client.evals
    for ask in (
        lambda: find.retrieve("eval_nothing"),
        lambda: find.retrieve(job["id"]),
        lambda: find.runs.list("eval_nothing"),
        lambda: find.runs.retrieve(nothing, **theirs),
        lambda: find.runs.retrieve("evalrun_other_2", **theirs),
        lambda: find.runs.output_items.list(nothing, **theirs),
        lambda: find.runs.output_items.retrieve("outputitem_x", run_id=run.id, **theirs),
        lambda: find.runs.output_items.retrieve(
            evals.item_id(job["id"], rollouts.SamplePosition(2, "valid", 99, 0)), run_id=run.id, **theirs
        ),
    ):
        with pytest.raises(openai.NotFoundError, match="No such"):
            ask()


def test_an_unknown_cursor_is_refused(client: OpenAI, job: dict[str, Any], run: RunListResponse) -> None:
    for ask in (
        lambda: client.evals.list(after="eval_nothing"),
        lambda: client.evals.runs.list(job["eval_id"], after="evalrun_other_2"),
        lambda: items(client, run, after="outputitem_other_2_0_0"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert refused.value.param == "after"


def test_the_eval_of_a_job_is_read_only(client: OpenAI, job: dict[str, Any], run: RunListResponse) -> None:
    eval_id = job["eval_id"]
    for ask in (
        lambda: client.evals.update(eval_id, name="mine"),
        lambda: client.evals.delete(eval_id),
        lambda: client.evals.runs.create(
            eval_id, data_source={"type": "jsonl", "source": {"type": "file_id", "id": "file-x"}}
        ),
        lambda: client.evals.runs.cancel(run.id, eval_id=eval_id),
        lambda: client.evals.runs.delete(run.id, eval_id=eval_id),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            ask()
        assert (refused.value.status_code, refused.value.code) == (405, "method_not_supported")
        assert "shows the validations of a fine-tuning job" in refused.value.message


@pytest.mark.both_databases
def test_another_projects_eval_does_not_exist(
    house: House, job: dict[str, Any], run: RunListResponse
) -> None:
    theirs = house.client(house.other_key)
    item = evals.item_id(job["id"], rollouts.SamplePosition(2, "valid", 0, 0))
    base = f"/v1/evals/{job['eval_id']}"
    urls = [base, f"{base}/runs", f"{base}/runs/{run.id}", f"{base}/runs/{run.id}/output_items"]
    urls.append(f"{urls[-1]}/{item}")

    assert [theirs.get(url).status_code for url in urls] == [404] * 5
    assert [house.client(house.key).get(url).status_code for url in urls] == [200] * 5
    assert theirs.get("/v1/evals").json()["data"] == []
    assert theirs.get("/v1/evals", params={"after": job["eval_id"]}).status_code == 400
