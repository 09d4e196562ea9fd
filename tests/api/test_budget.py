"""Budgets, usage and estimates as their user sees them."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from sqlalchemy import event, update
from starlette.testclient import TestClient

from core.database.engine import Work
from core.database.tables import Checkpoint, File, Job
from core.jobs import lifecycle, usage
from core.jobs.job_files import BadFile
from core.jobs.remaining import RemainingSteps
from core.step_metrics import StepMetrics
from core.storage.datasets import MAX_LINE_BYTES
from graders.spec import parse_grader
from tests import factories
from tests.api.conftest import House
from tests.api.test_jobs import JOBS, change, error, post
from tests.hyperparameters import in_groups
from tests.present import present, untyped
from worker.supervisor.validation import check_file

ESTIMATE = "/v1/regraft/estimate"


@pytest.fixture
def run_steps(house: House) -> Callable[..., None]:
    """Record steps of ten seconds and 80 tokens for the only job, as its worker would."""

    def run_steps(count: int, *, ahead: int = 10, status: str = "running") -> None:
        with house.database.write() as session:
            job = session.query(Job).one()
            job.status, job.started_at = status, 1
            for number in range(1, count + 1):
                step = factories.step(session, job, number, seconds=10.0, tokens=80)
                usage.record(
                    session,
                    job,
                    StepMetrics.load(step.data),
                    RemainingSteps(ahead, 0, False),
                    grader_tokens=0,
                )

    return run_steps


def shown(api: TestClient, job: dict[str, Any]) -> Any:
    return api.get(f"{JOBS}/{job['id']}").json()


# Asking for a budget.


@pytest.mark.both_databases
def test_a_budget_in_seconds_is_shown_as_asked_and_as_a_cap(
    create_job: Callable[..., dict[str, Any]],
) -> None:
    assert create_job(budget={"gpu_seconds": 3600})["budget"] == {
        "asked": {"gpu_seconds": 3600.0},
        "gpu_seconds": 3600.0,
        "used_gpu_seconds": 0.0,
        "remaining_gpu_seconds": 3600.0,
    }


@pytest.mark.both_databases
def test_a_budget_in_money_is_turned_into_seconds_at_the_price_of_the_moment(
    priced: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    budget = {"amount": 12.5, "currency": "EUR"}

    job = priced.post(JOBS, json=job_request(budget=budget)).json()

    assert (job["budget"]["asked"], job["budget"]["gpu_seconds"]) == (budget, 1250.0)


@pytest.mark.both_databases
def test_no_budget_is_null(create_job: Callable[..., dict[str, Any]]) -> None:
    assert create_job()["budget"] is None
    assert create_job(budget=None)["budget"] is None


REFUSED = {
    "nothing in it": ({}, "budget", "invalid_value"),
    "both kinds": ({"gpu_seconds": 1, "amount": 1, "currency": "EUR"}, "budget", "invalid_value"),
    "an amount of what": ({"amount": 1}, "budget", "invalid_value"),
    "a currency of seconds": ({"gpu_seconds": 1, "currency": "EUR"}, "budget", "invalid_value"),
    "no seconds": ({"gpu_seconds": 0.0}, "budget.gpu_seconds", "decimal_below_min_value"),
    "less than nothing": ({"amount": -1.0, "currency": "EUR"}, "budget.amount", "decimal_below_min_value"),
    "more than there is": ({"gpu_seconds": 1e13}, "budget.gpu_seconds", "decimal_above_max_value"),
    "seconds as text": ({"gpu_seconds": "60"}, "budget.gpu_seconds", "invalid_type"),
    "seconds as a boolean": ({"gpu_seconds": True}, "budget.gpu_seconds", "invalid_type"),
    "an unknown key": ({"hours": 1}, "budget.hours", "unknown_parameter"),
    "a bare number": (3600, "budget", "invalid_type"),
    "another currency": ({"amount": 1, "currency": "USD"}, "budget.currency", "invalid_value"),
}


@pytest.mark.parametrize(("budget", "param", "code"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("url", [JOBS, ESTIMATE])
def test_what_is_wrong_with_a_budget_is_named(
    priced: TestClient,
    job_request: Callable[..., dict[str, Any]],
    url: str,
    budget: Any,
    param: str,
    code: str,
) -> None:
    answer = priced.post(url, json=job_request(budget=budget))

    assert error(answer) == (param, code)
    assert priced.get(JOBS).json()["data"] == []


@pytest.mark.parametrize("number", ["Infinity", "1e999", "NaN", "1" + "0" * 400])
def test_a_number_without_end_is_refused(
    api: TestClient, job_request: Callable[..., dict[str, Any]], number: str
) -> None:
    body = json.dumps(job_request(budget={"gpu_seconds": "?"})).replace('"?"', number)

    answer = api.post(JOBS, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_money_without_a_price_names_the_setting(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    answer = api.post(JOBS, json=job_request(budget={"amount": 1, "currency": "USD"}))

    assert error(answer) == ("budget.amount", "invalid_value")
    assert "price_per_gpu_second in the hardware file" in answer.json()["error"]["message"]


# Changing it.


@pytest.mark.both_databases
def test_a_budget_is_raised_and_removed(api: TestClient, create_job: Callable[..., dict[str, Any]]) -> None:
    job = create_job(budget={"gpu_seconds": 60})

    raised = api.post(f"{JOBS}/{job['id']}/budget", json={"budget": {"gpu_seconds": 90}})
    assert raised.json()["budget"]["gpu_seconds"] == 90
    assert api.post(f"{JOBS}/{job['id']}/budget", json={"budget": None}).json()["budget"] is None
    assert shown(api, job)["budget"] is None


def test_a_change_that_says_nothing_or_comes_too_late_is_refused(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()

    assert error(api.post(f"{JOBS}/{job['id']}/budget", json={})) == ("budget", "missing_required_parameter")
    assert error(api.post(f"{JOBS}/{job['id']}/budget", json={"budget": {}})) == ("budget", "invalid_value")
    change(house, status="succeeded")
    late = api.post(f"{JOBS}/{job['id']}/budget", json={"budget": {"gpu_seconds": 90}})
    assert error(late) == (None, "invalid_job_state")


def test_the_budget_of_another_projects_job_does_not_exist(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()

    answer = house.client(house.other_key).post(f"{JOBS}/{job['id']}/budget", json={"budget": None})

    assert error(answer, 404) == ("fine_tune_id", "fine_tune_not_found")


@pytest.mark.both_databases
def test_a_job_at_its_budget_is_resumed_only_with_a_higher_one(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]], run_steps: Callable[..., None]
) -> None:
    job = create_job(budget={"gpu_seconds": 25})
    run_steps(2, status="paused")
    with house.database.write() as session:
        session.add(Checkpoint(job_id=job["id"], step=2, epoch=0, blob_prefix="p"))

    refused = post(api, job, "resume")
    assert error(refused) == ("budget", "budget_reached")
    assert "20 of 25 GPU-seconds are used" in refused.json()["error"]["message"]
    assert shown(api, job)["budget"]["remaining_gpu_seconds"] == 5.0

    api.post(f"{JOBS}/{job['id']}/budget", json={"budget": {"gpu_seconds": 30}})
    assert post(api, job, "resume").json()["status"] == "queued"


# Watching it.


@pytest.mark.both_databases
def test_a_running_job_shows_its_usage_and_what_it_will_take(
    priced: TestClient, create_job: Callable[..., dict[str, Any]], run_steps: Callable[..., None]
) -> None:
    job = create_job(budget={"gpu_seconds": 500})
    run_steps(4)

    running = shown(priced, job)

    assert running["usage_metrics"] == {
        "training_seconds": 40.0,
        "gpu_seconds": 40.0,
        "sampled_tokens": 320,
        "trained_tokens": 320,
        "model_grader_tokens": {},
        "cost": {"amount": 0.4, "currency": "EUR"},
    }
    assert running["estimate"] == {
        "remaining_seconds": {"low": 75.0, "expected": 100.0, "high": 125.0},
        "total_gpu_seconds": {"low": 115.0, "expected": 140.0, "high": 165.0},
        "cost": {"low": 1.15, "expected": 1.4, "high": 1.65, "currency": "EUR"},
        "based_on": "this job's steps",
    }
    assert (running["budget"]["used_gpu_seconds"], running["budget"]["remaining_gpu_seconds"]) == (
        40.0,
        460.0,
    )
    assert running["estimated_finish"] is not None
    assert running["trained_tokens"] is None


def test_a_paused_job_still_shows_them_and_one_that_ended_has_no_estimate(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]], run_steps: Callable[..., None]
) -> None:
    job = create_job()
    run_steps(1)
    change(house, status="paused")
    assert shown(api, job)["estimate"]["remaining_seconds"]["expected"] == 100.0

    with house.database.write() as session:
        lifecycle.cancel(Work(session), session.query(Job).one())
    assert shown(api, job)["estimate"] is None
    assert shown(api, job)["usage_metrics"]["training_seconds"] == 10.0


@pytest.mark.both_databases
def test_a_list_of_jobs_is_as_many_queries_as_one_job(
    house: House, api: TestClient, create_job: Callable[..., dict[str, Any]], run_steps: Callable[..., None]
) -> None:
    create_job(budget={"gpu_seconds": 60})
    run_steps(3)
    create_job()  # one that waits: its place in the queue is a query, the places of many are no more
    queries = []
    event.listen(house.database.engine, "before_cursor_execute", lambda *args: queries.append(args[2]))

    one = queries_of(api, queries)
    for _ in range(3):
        create_job(budget={"gpu_seconds": 60})
    with house.database.write() as session:
        session.execute(update(Job).values(usage=present(session.query(Job).first()).usage))
    five = queries_of(api, queries)

    assert len(api.get(JOBS).json()["data"]) == 5
    assert 0 < five == one


def queries_of(api: TestClient, queries: list[Any]) -> int:
    queries.clear()
    api.get(JOBS)
    return len(queries)


# Estimating.


ROW = b'{"messages": [{"role": "user", "content": "hi"}], "answer": "x"}\n'


@pytest.fixture
def sized_request(upload: Callable[..., str], job_request: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Ten rows to learn from, five to validate on; two epochs in batches of five, four answers of up to 100 tokens."""
    advanced = {"group_size": 4, "max_completion_tokens": 100}
    asked = {"n_epochs": 2, "batch_size": 5, "eval_interval": 2, "advanced": in_groups(advanced)}
    files = {"training_file": upload(ROW * 10), "validation_file": upload(ROW * 5, name="valid.jsonl")}
    return job_request(reinforcement={"hyperparameters": asked}, **files)


def test_with_no_history_the_size_is_known_and_the_range_is_not(
    api: TestClient, sized_request: dict[str, Any]
) -> None:
    assert api.post(ESTIMATE, json=sized_request).json() == {
        "object": "regraft.estimate",
        "model": "tiny",
        "gpu_class": "cpu",
        "training_rows": 10,
        "validation_rows": 5,
        "n_epochs": 2,
        "batch_size": 5,
        "group_size": 4,
        "max_completion_tokens": 100,
        "total_steps": 4,
        "estimate": None,
        "reason": "no job of this model has run here yet",
        "warnings": [],
        "preview": None,
    }


@pytest.mark.both_databases
def test_with_history_there_is_a_range_in_seconds_and_money(
    priced: TestClient,
    create_job: Callable[..., dict[str, Any]],
    run_steps: Callable[..., None],
    sized_request: dict[str, Any],
) -> None:
    create_job()
    run_steps(3)  # eight tokens a second, ten an answer

    answer = priced.post(ESTIMATE, json=sized_request).json()

    answers = 10 * 2 * 4 + 3 * 5
    seconds = {"low": answers * 10 / 8, "expected": answers * 10 / 8, "high": answers * 100 / 8}
    assert answer["reason"] is None
    assert answer["estimate"]["remaining_seconds"] == pytest.approx(seconds)
    assert answer["estimate"]["total_gpu_seconds"] == pytest.approx(seconds)
    assert answer["estimate"]["cost"]["expected"] == pytest.approx(answers * 10 / 8 * 0.01)
    assert answer["estimate"]["cost"]["currency"] == "EUR"
    assert answer["estimate"]["based_on"] == "3 steps of 1 earlier job"


def test_an_estimate_creates_nothing(api: TestClient, house: House, sized_request: dict[str, Any]) -> None:
    api.post(ESTIMATE, json=sized_request)

    assert api.get(JOBS).json()["data"] == []
    assert house.sent == []


def test_an_estimate_refuses_what_a_job_would(
    api: TestClient, upload: Callable[..., str], sized_request: dict[str, Any]
) -> None:
    assert error(api.post(ESTIMATE, json=sized_request | {"model": "gpt-9"}), 404) == (
        "model",
        "model_not_found",
    )
    assert error(api.post(ESTIMATE, json=sized_request | {"training_file": "file-none"})) == (
        "training_file",
        "invalid_value",
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ROW + b"x" * (MAX_LINE_BYTES + 1) + b"\n", f"line 2: is longer than {MAX_LINE_BYTES} bytes"),
        (ROW + b"{}\n", "line 2: messages: is missing"),
        (
            b'{"messages": [{"role": "user", "content": "hi"}]}\n',
            "line 1: the grader reads {{item.answer}}, which this row does not have",
        ),
    ],
)
def test_an_estimate_refuses_a_row_that_the_job_would_refuse_in_the_same_words(
    house: House, upload: Callable[..., str], sized_request: dict[str, Any], content: bytes, said: str
) -> None:
    house.app.state.service = replace(
        house.app.state.service,
        settings=house.app.state.service.settings.model_copy(update={"max_upload_bytes": 8 << 20}),
    )
    asked = sized_request | {"training_file": upload(content)}

    refused = house.client(house.key).post(ESTIMATE, json=asked)

    assert error(refused) == ("training_file", "invalid_training_file")
    assert said in refused.json()["error"]["message"]
    with house.database.read() as session:
        file = session.query(File).where(File.id == asked["training_file"]).one()
    spec = parse_grader(asked["method"]["reinforcement"]["grader"])
    with pytest.raises(BadFile) as of_the_job:
        check_file(house.blobs, file, spec, "training_file", 50_000)
    assert of_the_job.value.message == refused.json()["error"]["message"]


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def learned_rows(number: int, last: dict[str, Any] | None = None) -> bytes:
    rows: list[Any] = [{"messages": CHAT}] * number + ([] if last is None else [last])
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_an_estimate_of_a_supervised_job_checks_its_rows_and_counts_its_steps(
    api: TestClient, upload: Callable[..., str]
) -> None:
    asked = {
        "model": "tiny",
        "training_file": upload(learned_rows(40)),
        "validation_split": 0.25,
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 8}}},
    }

    answer = api.post(ESTIMATE, json=asked).json()

    assert (answer["training_rows"], answer["validation_rows"]) == (30, 10)
    assert (answer["n_epochs"], answer["batch_size"], answer["total_steps"]) == (2, 8, 8)
    assert answer["estimate"] is answer["group_size"] is answer["max_completion_tokens"] is None
    assert answer["reason"] == "the time of supervised jobs is not estimated before they start"


def test_a_file_whose_rows_are_counted_is_not_read_to_its_end_by_the_next_estimate(
    api: TestClient, house: House, upload: Callable[..., str]
) -> None:
    asked = {"model": "tiny", "training_file": upload(learned_rows(20))}
    first = api.post(ESTIMATE, json=asked).json()
    with house.database.read() as session:
        key = session.query(File).where(File.id == asked["training_file"]).one().blob_key
    house.blobs.delete(key)

    assert api.post(ESTIMATE, json=asked).json() == first


@pytest.mark.parametrize(
    ("content", "more", "refusal"),
    [
        (learned_rows(12, {"messages": CHAT[:1]}), {}, ("training_file", "invalid_training_file", "line 13")),
        (learned_rows(9), {}, ("training_file", "invalid_n_examples", "has 9 example(s)")),
        (
            learned_rows(12),
            {"validation_split": 0.5},
            ("validation_split", "invalid_n_examples", "leaves 6 of 12"),
        ),
        (
            learned_rows(12),
            {"method": {"type": "dpo"}},
            ("training_file", "invalid_training_file", "fine-tune-chat format"),
        ),
    ],
)
def test_an_estimate_refuses_the_files_that_a_supervised_or_dpo_job_would(
    api: TestClient,
    upload: Callable[..., str],
    content: bytes,
    more: dict[str, Any],
    refusal: tuple[str, str, str],
) -> None:
    asked = {"model": "tiny", "training_file": upload(content)} | more

    answer = api.post(ESTIMATE, json=asked)

    assert error(answer) == refusal[:2]
    assert refusal[2] in answer.json()["error"]["message"]


def test_there_is_no_estimate_of_a_distillation_job(api: TestClient, upload: Callable[..., str]) -> None:
    method = {"type": "distillation", "distillation": {"teacher": {"model": "tiny"}}}
    asked = {"model": "tiny", "training_file": upload(), "validation_split": 0.5, "method": method}

    assert error(api.post(ESTIMATE, json=asked)) == ("method.type", "unsupported_method")


def test_labels_without_their_loss_are_refused_before_the_job_is_created(
    api: TestClient, upload: Callable[..., str]
) -> None:
    row = {"input": {"messages": CHAT[:1]}, "output": CHAT[1:], "label": True}
    file = upload((json.dumps(row) + "\n").encode() * 10)

    def refused(loss: str) -> Any:
        hyperparameters = {"advanced": {"loss": {"type": loss}}}
        method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
        return api.post(ESTIMATE, json={"model": "tiny", "training_file": file, "method": method})

    assert error(refused("sigmoid")) == ("training_file", "invalid_training_file")
    assert refused("kto").json()["training_rows"] == 10


# With OpenAI's own client.


@pytest.fixture
def openai_client(house: House) -> OpenAI:
    return OpenAI(
        api_key=house.key, base_url="http://testserver/v1", http_client=house.client(), max_retries=0
    )


def test_openais_client_sends_a_budget_as_an_extra_and_reads_it_back(
    openai_client: OpenAI, sized_request: dict[str, Any]
) -> None:
    job = openai_client.fine_tuning.jobs.create(**sized_request, extra_body={"budget": {"gpu_seconds": 3600}})

    assert job.status == "validating_files"
    assert untyped(job).budget["gpu_seconds"] == 3600
    again = openai_client.fine_tuning.jobs.retrieve(job.id)
    assert (untyped(again.to_dict()["budget"])["remaining_gpu_seconds"], untyped(again).usage_metrics) == (
        3600,
        None,
    )


def test_openais_client_gets_a_bad_budget_as_a_bad_request(
    openai_client: OpenAI, sized_request: dict[str, Any]
) -> None:
    with pytest.raises(BadRequestError) as refused:
        openai_client.fine_tuning.jobs.create(**sized_request, extra_body={"budget": {"gpu_seconds": -1}})

    assert refused.value.param == "budget.gpu_seconds"


def test_openais_client_reaches_what_is_ours_through_post(
    openai_client: OpenAI, sized_request: dict[str, Any]
) -> None:
    job = openai_client.fine_tuning.jobs.create(**sized_request)

    changed: Any = openai_client.post(
        f"/fine_tuning/jobs/{job.id}/budget", cast_to=object, body={"budget": {"gpu_seconds": 5}}
    )
    estimate: Any = openai_client.post("/regraft/estimate", cast_to=object, body=sized_request)

    assert changed["budget"]["gpu_seconds"] == 5
    assert estimate["total_steps"] == 4
