"""A sweep as a stage of a pipeline: its jobs, the ones that it stops, and its result."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.pipelines.stages import MAX_ERRORS
from core.database.tables import Job, Pipeline, StepMetric
from core.jobs.verdict import Verdict
from tests.api.conftest import House, request_of
from tests.api.test_jobs import allowing_tools
from tests.graders.mcp_servers import TOOLS, serving_mcp
from tests.hardware import hardware_file

PIPELINES = "/v1/regraft/pipelines"
ROWS = 60
RATES = [1e-5, 1e-4, 1e-2]


def create(api: TestClient, **sweep: Any) -> Any:
    asked = {"job": request_of(api), "over": {"learning_rate": RATES}} | sweep
    return api.post(PIPELINES, json={"stages": [{"name": "rates", "sweep": asked}]})


def stage(api: TestClient, made: dict[str, Any]) -> dict[str, Any]:
    [shown] = api.get(f"{PIPELINES}/{made['id']}").json()["stages"]
    return dict(shown)


def validated(house: House, job_id: str, step: int, right: int) -> None:
    """As a worker stores a validation, of which the first `right` rows are right."""
    with house.database.write() as session:
        scores = [float(row < right) for row in range(ROWS)]
        session.add(StepMetric(job_id=job_id, step=step, epoch=1, data={}, valid_scores=scores))


def change(house: House, job_id: str, **fields: Any) -> None:
    with house.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(**fields))


def succeeded(house: House, job_id: str, step: int, reward: float) -> None:
    verdict = Verdict(
        "improved", 0.1, reward, reward - 0.1, None, None, 1, 0, 0, ROWS, 0, step
    )  # only its step is read
    change(house, job_id, status="succeeded", fine_tuned_model=f"ft:{job_id}", verdict=verdict.to_row())


def test_each_job_of_a_sweep_has_the_functions_of_its_mcp_server(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    allowing_tools(house, "127.0.0.1")
    asked = request_of(api)
    with serving_mcp() as (url, _):
        asked["method"]["reinforcement"]["tools"] = [
            {"type": "mcp", "server_label": "drawers", "server_url": url}
        ]
        made = create(api, job=asked)
        assert made.status_code == 201, made.text
        advance()

    with house.database.read() as session:
        tools = [job.body["tools"] for job in session.scalars(select(Job))]
    assert len(tools) == len(RATES)
    assert tools == [tools[0]] * len(RATES)
    assert [one["function"]["name"] for one in tools[0][0]["functions"]] == list(TOOLS)


@pytest.mark.both_databases
def test_a_sweep_stops_the_losers_and_has_the_model_of_the_best_job(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api)
    assert made.status_code == 201, made.text
    advance()
    running = stage(api, made.json())
    assert [job["settings"] for job in running["jobs"]] == [{"learning_rate": rate} for rate in RATES]
    low, middle, high = ids = [job["job_id"] for job in running["jobs"]]
    rates = [
        api.get(f"/v1/fine_tuning/jobs/{job_id}").json()["method"]["reinforcement"]["hyperparameters"][
            "advanced"
        ]["optimizer"]["learning_rate"]
        for job_id in ids
    ]
    assert rates == RATES
    for job_id, right in zip(ids, (38, 40, 0), strict=True):
        change(house, job_id, status="running")
        validated(house, job_id, 5, right)

    advance()

    looked = stage(api, made.json())
    assert [job["job_status"] for job in looked["jobs"]] == ["running", "running", "cancelled"]
    assert looked["jobs"][2]["stopped"].startswith("learning_rate 1e-05 is better at step 5: by 0.633 on 60")
    events = api.get(f"/v1/fine_tuning/jobs/{high}/events").json()["data"]
    assert any(event["message"].startswith("Stopped by its sweep: learning_rate") for event in events)
    for job_id, right in ((low, 40), (middle, 60)):
        validated(house, job_id, 10, right)
        succeeded(house, job_id, 10, right / ROWS)

    advance()

    ended = stage(api, made.json())
    assert (ended["status"], ended["model"], ended["job_id"]) == ("succeeded", f"ft:{middle}", middle)
    assert ended["conclusion"] == "learning_rate 0.0001 is better than every other one that was compared."
    assert [job["reward"] for job in ended["jobs"]] == [pytest.approx(40 / 60), 1.0, None]
    assert ended["jobs"][0]["low"] > 0
    assert api.get(f"{PIPELINES}/{made.json()['id']}").json()["status"] == "succeeded"


def test_a_sweep_that_keeps_its_losers_stops_none(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api, stop_losers=False).json()
    advance()
    for job, right in zip(stage(api, made)["jobs"], (30, 60, 0), strict=True):
        validated(house, job["job_id"], 5, right)

    advance()

    assert [job["stopped"] for job in stage(api, made)["jobs"]] == [None, None, None]


def test_beyond_the_budget_only_the_best_job_continues(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api, budget={"gpu_seconds": 100}).json()
    advance()
    for job, right in zip(stage(api, made)["jobs"], (30, 33, 31), strict=True):
        change(house, job["job_id"], status="running", gpu_seconds=30.0)
        validated(house, job["job_id"], 5, right)
    advance()
    assert [job["stopped"] for job in stage(api, made)["jobs"]] == [None, None, None]
    change(house, stage(api, made)["jobs"][0]["job_id"], gpu_seconds=40.0)

    advance()

    looked = stage(api, made)["jobs"]
    assert [job["job_status"] for job in looked] == ["cancelled", "running", "cancelled"]
    assert looked[0]["stopped"] == (
        "the jobs of the sweep have used 100 of 100 GPU-seconds, and learning_rate 0.0001 has the highest mean reward"
    )


def test_a_sweep_without_a_model_fails_with_the_error_of_its_first_job_and_can_be_retried(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api, over={"seed": [1, 2]}).json()
    advance()
    first = [job["job_id"] for job in stage(api, made)["jobs"]]
    error = {"code": "invalid_training_file", "message": "no rows", "param": None}
    change(house, first[0], status="cancelled")
    change(house, first[1], status="failed", error=error)

    advance()

    failed = stage(api, made)
    assert failed["error"] == {
        "code": "invalid_training_file",
        "message": "No job of the sweep has succeeded: no rows",
    }
    api.post(f"{PIPELINES}/{made['id']}/retry")
    advance()
    again = stage(api, made)
    assert again["earlier"] == first
    assert len({job["job_id"] for job in again["jobs"]} - {*first}) == 2


def test_pausing_resuming_and_cancelling_a_pipeline_concern_all_jobs_of_a_sweep(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api).json()
    advance()
    for job in stage(api, made)["jobs"]:
        change(house, job["job_id"], status="queued")
    path = f"{PIPELINES}/{made['id']}"

    api.post(f"{path}/pause")
    assert {job["job_status"] for job in stage(api, made)["jobs"]} == {"paused"}
    api.post(f"{path}/resume")
    assert {job["job_status"] for job in stage(api, made)["jobs"]} == {"queued"}
    api.post(f"{path}/cancel")
    assert {job["job_status"] for job in stage(api, made)["jobs"]} == {"cancelled"}


def test_a_sweep_whose_jobs_cannot_all_be_queued_now_starts_none_of_them(
    api: TestClient, house: House, upload: Callable[..., str], advance: Callable[[], None]
) -> None:
    house.limit(queued_jobs=3)
    other = api.post("/v1/fine_tuning/jobs", json=request_of(api)).json()["id"]
    made = create(api).json()

    advance()

    waiting = stage(api, made)
    assert (waiting["status"], waiting["jobs"]) == ("waiting", [])
    assert "queued_jobs" in waiting["note"]
    with house.database.read() as session:
        assert [job.id for job in session.scalars(select(Job))] == [other]


def test_a_sweep_of_more_jobs_than_the_project_may_queue_is_refused(api: TestClient, house: House) -> None:
    house.limit(queued_jobs=2)

    error = create(api).json()["error"]

    assert error["param"] == "stages[0].sweep.over"
    assert error["message"].endswith("it has 3 combinations, and the project may queue 2 jobs.")


def test_beyond_the_budget_the_first_job_that_may_win_continues_where_none_has_validated(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api, budget={"gpu_seconds": 100}).json()
    advance()
    first, second, third = (job["job_id"] for job in stage(api, made)["jobs"])
    change(house, first, status="failed", gpu_seconds=100.0)
    change(house, second, status="running")
    change(house, third, status="running")

    advance()

    looked = stage(api, made)["jobs"]
    assert [job["job_status"] for job in looked] == ["failed", "running", "cancelled"]
    assert looked[2]["stopped"].endswith("and learning_rate 0.0001 is the first one")


def test_a_change_of_the_price_does_not_move_the_budget_of_a_sweep_that_has_started(
    priced: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(priced, budget={"amount": 1, "currency": "EUR"}).json()  # 100 GPU-seconds
    advance()
    hardware_file(house.folder, price_per_gpu_second=1.0, currency="USD")
    for job in stage(priced, made)["jobs"]:
        change(house, job["job_id"], status="running", gpu_seconds=33.0)

    advance()
    assert [job["job_status"] for job in stage(priced, made)["jobs"]] == ["running"] * 3
    change(house, stage(priced, made)["jobs"][2]["job_id"], gpu_seconds=34.0)
    advance()
    assert [job["job_status"] for job in stage(priced, made)["jobs"]] == ["running", "cancelled", "cancelled"]


def test_the_jobs_of_a_sweep_have_one_seed(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api, job={**request_of(api), "seed": None}).json()

    advance()

    with house.database.read() as session:
        assert len({job.seed for job in session.scalars(select(Job))}) == 1
    assert len(stage(api, made)["jobs"]) == 3


def test_a_job_that_was_stopped_is_no_reason_to_stop_another(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api).json()
    advance()
    first, second, third = (job["job_id"] for job in stage(api, made)["jobs"])
    for job_id, step, right in (
        (first, 5, 30),
        (second, 5, 60),
        (second, 10, 30),
        (third, 5, 0),
        (third, 10, 60),
    ):
        change(house, job_id, status="running")
        validated(house, job_id, step, right)

    advance()

    assert [job["job_status"] for job in stage(api, made)["jobs"]] == ["cancelled", "cancelled", "running"]


def test_a_job_that_delivers_a_step_without_a_validation_is_not_compared(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api, over={"seed": [1, 2]}).json()
    advance()
    first, second = (job["job_id"] for job in stage(api, made)["jobs"])
    validated(house, second, 10, 60)
    succeeded(house, first, 10, 1.0)
    succeeded(house, second, 10, 1.0)

    advance()

    ended = stage(api, made)
    assert (ended["status"], ended["job_id"]) == ("succeeded", second)
    assert ended["conclusion"] == "seed 2 is the only one to compare."


def test_a_sweep_whose_jobs_were_all_cancelled_is_cancelled(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api, over={"seed": [1, 2]}).json()
    advance()
    for job in stage(api, made)["jobs"]:
        change(house, job["job_id"], status="cancelled")

    advance()

    ended = stage(api, made)
    assert (ended["status"], ended["error"]["message"]) == ("cancelled", "The jobs were cancelled.")


def test_a_paused_job_is_named_by_the_note(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api).json()
    advance()
    job_id = stage(api, made)["jobs"][1]["job_id"]
    change(house, job_id, status="paused")

    advance()
    assert stage(api, made)["note"] == f"The job {job_id} is paused: resume it or cancel it."
    change(house, job_id, status="running")
    advance()
    assert stage(api, made)["note"] is None


def test_the_jobs_of_a_sweep_that_fails_are_cancelled(
    api: TestClient, house: House, advance: Callable[[], None]
) -> None:
    made = create(api).json()
    advance()
    with house.database.write() as session:
        row = session.scalars(select(Pipeline)).one()
        broken = {**row.stages[0], "spec": {**row.stages[0]["spec"], "stop_losers": "unreadable"}}
        row.stages = [broken]

    for _ in range(MAX_ERRORS + 1):
        advance()

    failed = stage(api, made)
    assert failed["status"] == "failed"
    assert {job["job_status"] for job in failed["jobs"]} == {"cancelled"}


@pytest.mark.parametrize(
    ("sweep", "param", "message"),
    [
        ({"over": {"rate": [1, 2]}}, "stages[0].sweep.over.rate", "there is no setting 'rate'"),
        ({"over": {"seed": [1]}}, "stages[0].sweep", "'over' has 1 combinations; a sweep has 2 to 16"),
        ({"over": {"seed": [1, 1]}}, "stages[0].sweep", "'over.seed' has a value twice"),
        (
            {"over": {"learning_rate": [1e-5, 1e-4], "optimizer.learning_rate": [1e-3]}},
            "stages[0].sweep.over.optimizer.learning_rate",
            "names the same setting as another name",
        ),
        ({"over": {"seed": [*range(5)], "n_epochs": [1, 2, 3, 4]}}, "stages[0].sweep", "has 20 combinations"),
        (
            {"over": {"learning_rate": [1e-5, "fast"]}},
            "stages[0].sweep.job.method.reinforcement.hyperparameters.advanced.optimizer.learning_rate",
            "learning_rate",
        ),
        (
            {"budget": {"amount": 5, "currency": "EUR"}},
            "stages[0].sweep.budget.amount",
            "this service has none",
        ),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_by_its_parameter(
    api: TestClient, sweep: dict[str, Any], param: str, message: str
) -> None:
    refused = create(api, **sweep)

    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


@pytest.mark.parametrize("over", [{"seed": [1, 2]}, {"learning_rate": [1e-5, 1e-4]}])
def test_a_sweep_of_jobs_without_rewards_or_common_rows_is_refused(
    api: TestClient, over: dict[str, Any]
) -> None:
    job = request_of(api)
    supervised = {**job, "method": {"type": "supervised"}}
    split = {**job, "validation_file": None, "validation_split": 0.5}

    of_method = create(api, job=supervised, over=over).json()["error"]
    of_rows = create(api, job=split, over=over).json()["error"]

    assert of_method["message"].startswith("A sweep needs a job with method 'reinforcement'")
    assert of_rows["param"] == "stages[0].sweep.job.validation_split"


def test_secrets_of_a_sweeps_grader_are_not_shown(api: TestClient) -> None:
    headers = {"authorization": "Bearer of-the-user"}
    server = {"type": "endpoint", "name": "mine", "url": "https://grader.example/", "headers": headers}
    job = request_of(api, {"grader": server})

    shown = create(api, job=job).text

    assert "of-the-user" not in shown
