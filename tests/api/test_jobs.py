from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update
from starlette.testclient import TestClient

from core.database.tables import Checkpoint, File, Job, StepMetric, TunedModel
from core.hardware import GpuClass
from core.jobs import events, offline_hyperparameters, queue
from core.jobs.hyperparameters import Hyperparameters, resolve
from graders.backends import Backends
from graders.endpoint import Endpoints
from graders.judge.judges import JudgeModel
from tests.api.conftest import GRADER, House
from tests.hardware import hardware_file

if TYPE_CHECKING:
    from httpx2 import Response

JOBS = "/v1/fine_tuning/jobs"


def change(house: House, **columns: Any) -> None:
    """Put what a worker would have written into the only job."""
    with house.database.write() as session:
        session.execute(update(Job).values(**columns))


def error(answer: "Response", status: int = 400) -> tuple[str | None, str | None]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["code"]


# Creating.


@pytest.mark.both_databases
def test_a_new_job_has_every_key_of_openais(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request(suffix="mine", seed=7, metadata={"team": "a"})
    job = api.post(JOBS, json=request).json()

    grader = request["method"]["reinforcement"]["grader"]
    hyperparameters = job["method"]["reinforcement"]["hyperparameters"]
    assert job == {
        "object": "fine_tuning.job",
        "id": job["id"],
        "created_at": job["created_at"],
        "model": "tiny",
        "organization_id": job["organization_id"],
        "status": "validating_files",
        "training_file": request["training_file"],
        "validation_file": request["validation_file"],
        "result_files": [],
        "fine_tuned_model": None,
        "finished_at": None,
        "estimated_finish": None,
        "trained_tokens": None,
        "seed": 7,
        "error": None,
        "integrations": [],
        "metadata": {"team": "a"},
        "hyperparameters": None,
        "lineage": None,
        "method": {
            "type": "reinforcement",
            "reinforcement": {"grader": grader, "hyperparameters": hyperparameters, "response_format": None},
        },
        "user_provided_suffix": "mine",
        "usage_metrics": None,
        "queue": {"position": 1, "reason": "no worker reports itself"},
        "shared_with_openai": False,
        "eval_id": job["id"].replace("ftjob-", "eval_"),
        "budget": None,
        "resources": {"gpus": None, "nodes": None},
        "estimate": None,
        "result": None,
        "verdict": None,
        "progress": None,
        "preview": None,
    }
    assert job["id"].startswith("ftjob-")


def test_hyperparameters_left_out_are_shown_as_auto(create_job: Callable[..., dict[str, Any]]) -> None:
    shown = create_job()["method"]["reinforcement"]["hyperparameters"]

    assert shown.pop("advanced")["loss"]["type"] == "dapo"
    assert shown == {
        "batch_size": "auto",
        "compute_multiplier": "auto",
        "eval_interval": "auto",
        "eval_samples": "auto",
        "learning_rate_multiplier": "auto",
        "n_epochs": "auto",
        "reasoning_effort": "default",
    }


def test_hyperparameters_are_shown_as_asked(create_job: Callable[..., dict[str, Any]]) -> None:
    asked = {
        "n_epochs": 3,
        "batch_size": "auto",
        "eval_samples": 2,
        "advanced": {"evaluation": {"temperature": 0.5}},
    }
    shown = create_job(reinforcement={"hyperparameters": asked})["method"]["reinforcement"]["hyperparameters"]

    assert (shown["n_epochs"], shown["batch_size"], shown["eval_samples"]) == (3, "auto", 2)
    assert shown["advanced"]["evaluation"]["temperature"] == 0.5


@pytest.mark.both_databases
def test_once_resolved_the_numbers_take_the_place_of_auto(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job(reinforcement={"hyperparameters": {"learning_rate_multiplier": 2.0}})
    change(
        house,
        resolved={"batch_size": 8, "n_epochs": 4, "total_steps": 20, "learning_rate": 2e-3, "loss": "dapo"},
    )

    shown = api.get(f"{JOBS}/{job['id']}").json()["method"]["reinforcement"]["hyperparameters"]

    assert (shown["batch_size"], shown["n_epochs"], shown["learning_rate_multiplier"]) == (8, 4, 2.0)
    assert shown["advanced"]["loss"]["type"] == "dapo"
    assert (
        shown["advanced"]["optimizer"]["learning_rate"] == "auto"
    )  # twice the automatic one, as the request has it
    assert "total_steps" not in shown.keys() | shown["advanced"].keys()


@pytest.mark.parametrize("given", [{}, {"learning_rate_multiplier": 2.0, "compute_multiplier": 2.0}])
def test_the_method_of_a_job_that_has_run_creates_the_same_job_again(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]], given: dict[str, Any]
) -> None:
    job = create_job(reinforcement={"hyperparameters": given})
    run = resolve(Hyperparameters.model_validate(given), rows=100, parameters=500_000_000, context=4096)
    change(house, resolved=run.model_dump(mode="json"))
    shown = api.get(f"{JOBS}/{job['id']}").json()
    files = {name: shown[name] for name in ("model", "training_file", "validation_file")}

    again = api.post(JOBS, json={**files, "method": shown["method"]})

    assert again.status_code == 200, again.text
    resent = Hyperparameters.model_validate(again.json()["method"]["reinforcement"]["hyperparameters"])
    assert resolve(resent, rows=100, parameters=500_000_000, context=4096) == run


def test_the_method_of_a_job_with_a_stored_grader_can_be_sent_again(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    api.post("/v1/regraft/graders", json={"name": "close", "grader": GRADER})
    job = create_job(reinforcement={"grader": {"type": "stored", "name": "close"}})
    files = {name: job[name] for name in ("model", "training_file", "validation_file")}
    assert job["method"]["reinforcement"]["stored_grader"]["name"] == "close"

    again = api.post(JOBS, json={**files, "method": job["method"]})

    assert again.status_code == 200, again.text
    assert again.json()["method"]["reinforcement"]["grader"] == job["method"]["reinforcement"]["grader"]


def test_the_mask_of_a_secret_is_no_value_of_a_header(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    grader = {"type": "endpoint", "name": "mine", "url": "https://example.com", "headers": {"key": "***"}}

    answer = api.post(JOBS, json=job_request(reinforcement={"grader": grader}))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "method.reinforcement.grader.headers.key"
    assert "has the mask of a secret: send its value" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["supervised", "dpo"])
@pytest.mark.parametrize("given", [{}, {"learning_rate_multiplier": 2.0}])
def test_the_method_of_an_offline_job_that_has_run_creates_the_same_job_again(
    api: TestClient, house: House, upload: Callable[..., str], kind: str, given: dict[str, Any]
) -> None:
    asked = {
        "model": "tiny",
        "training_file": upload(),
        "method": {"type": kind, kind: {"hyperparameters": given}},
    }
    created = api.post(JOBS, json=asked)
    assert created.status_code == 200, created.text
    stored = offline_hyperparameters.requested_hyperparameters(
        kind, created.json()["method"][kind]["hyperparameters"]
    )
    run = offline_hyperparameters.resolve(kind, stored, rows=100, parameters=500_000_000)
    change(house, resolved=run.model_dump(mode="json"))
    shown = api.get(f"{JOBS}/{created.json()['id']}").json()["method"]

    again = api.post(JOBS, json={**asked, "method": shown})

    assert again.status_code == 200, again.text
    resent = offline_hyperparameters.requested_hyperparameters(
        kind, again.json()["method"][kind]["hyperparameters"]
    )
    assert offline_hyperparameters.resolve(kind, resent, rows=100, parameters=500_000_000) == run


GROUPS: dict[str, Any] = {
    "loss": {"type": "cispo", "cap": 3.0},
    "sampling": {"group_size": 4},
    "lora": {"rank": 8},
}


def test_hyperparameters_in_groups_are_shown_in_groups(create_job: Callable[..., dict[str, Any]]) -> None:
    asked = {"hyperparameters": {"advanced": GROUPS}}
    shown = create_job(reinforcement=asked)["method"]["reinforcement"]["hyperparameters"]["advanced"]

    assert shown["loss"].items() >= GROUPS["loss"].items()
    assert shown["sampling"] == {
        "group_size": 4,
        "order": "shuffled",
        "temperature": 1.0,
        "max_completion_tokens": "auto",
        "chat_template": "auto",
        "chat_template_kwargs": {},
        "thinking_budget": "auto",
    }
    assert (shown["lora"], shown["kl"]) == ({"rank": 8, "alpha": 32, "targets": "auto"}, None)


@pytest.mark.both_databases
def test_groups_show_the_resolved_numbers_where_they_had_auto(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job(reinforcement={"hyperparameters": {"advanced": GROUPS}})
    asked = Hyperparameters.model_validate({"advanced": GROUPS})
    run = resolve(asked, rows=100, parameters=500_000_000, context=4096)
    change(house, resolved=run.model_dump(mode="json"))

    shown = api.get(f"{JOBS}/{job['id']}").json()["method"]["reinforcement"]["hyperparameters"]
    request = api.get(f"/v1/regraft/jobs/{job['id']}/request").json()

    assert shown["advanced"]["loss"]["std"] == "population"
    assert shown["advanced"]["sampling"]["max_completion_tokens"] == 512
    assert shown["advanced"]["optimizer"]["learning_rate"] == run.learning_rate
    assert shown["batch_size"] == run.batch_size
    advanced = request["method"]["reinforcement"]["hyperparameters"]["advanced"]
    assert advanced["sampling"]["max_completion_tokens"] == "auto"
    assert api.post(JOBS, json=request).status_code == 200


def test_a_job_without_a_seed_gets_one(create_job: Callable[..., dict[str, Any]]) -> None:
    assert 0 <= create_job()["seed"] < 2**31


def test_creating_a_job_wakes_the_validation_and_no_more(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    create_job()

    assert house.sent == [(queue.VALIDATE, queue.DEFAULT_QUEUE)]


def test_the_registry_says_where_a_model_is_trained(
    house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    create_job(model="org/large")
    create_job(model="tiny")

    with house.database.read() as session:
        assert session.scalars(select(Job.gpu_class).order_by(Job.seq)).all() == ["h200", "cpu"]


def test_a_grader_is_kept_normalised(create_job: Callable[..., dict[str, Any]]) -> None:
    listed = {
        "type": "multi",
        "name": "both",
        "graders": [
            {"type": "string_check", "name": "a", "input": "x", "reference": "x", "operation": "eq"},
            {"type": "string_check", "name": "b", "input": "x", "reference": "y", "operation": "ne"},
        ],
        "calculate_output": "a + b",
    }

    assert set(
        create_job(reinforcement={"grader": listed})["method"]["reinforcement"]["grader"]["graders"]
    ) == {"a", "b"}


# Refusing.

REFUSED = {
    "no model": ({"model": None}, "model", "invalid_type"),
    "a suffix too long": ({"suffix": "x" * 65}, "suffix", "string_above_max_length"),
    "an empty suffix": ({"suffix": ""}, "suffix", "string_below_min_length"),
    "a suffix with a line end": ({"suffix": "a\nb"}, "suffix", "invalid_value"),
    "a suffix with a terminal's code": ({"suffix": "a\u009b31m"}, "suffix", "invalid_value"),
    "a suffix that turns the text around": ({"suffix": "a\u202eb"}, "suffix", "invalid_value"),
    "a suffix with a line separator": ({"suffix": "a\u2028b"}, "suffix", "invalid_value"),
    "a negative seed": ({"seed": -1}, "seed", "integer_below_min_value"),
    "a seed too large": ({"seed": 2**31}, "seed", "integer_above_max_value"),
    "a seed that is text": ({"seed": "7"}, "seed", "invalid_type"),
    "a seed that is a boolean": ({"seed": True}, "seed", "invalid_type"),
    "metadata with too many keys": (
        {"metadata": {str(n): "" for n in range(17)}},
        "metadata",
        "object_above_max_properties",
    ),
    "metadata with a key too long": (
        {"metadata": {"k" * 65: ""}},
        f"metadata.{'k' * 65}",
        "string_above_max_length",
    ),
    "a metadata value too long": (
        {"metadata": {"k": "v" * 513}},
        "metadata.k",
        "string_above_max_length",
    ),
    "metadata with a number in it": ({"metadata": {"k": 1}}, "metadata.k", "invalid_type"),
    "metadata with a NUL": ({"metadata": {"k": "\0"}}, "metadata.k", "invalid_value"),
    "an integration of nobody's": (
        {"integrations": [{"type": "neptune"}]},
        "integrations[0].type",
        "invalid_value",
    ),
    "an integration without its object": (
        {"integrations": [{"type": "wandb"}]},
        "integrations[0].wandb",
        "missing_required_parameter",
    ),
    "an integration with an address": (
        {"integrations": [{"type": "mlflow", "mlflow": {"project": "p", "url": "http://10.0.0.1"}}]},
        "integrations[0].mlflow.url",
        "unknown_parameter",
    ),
    "an integration into another folder": (
        {"integrations": [{"type": "trackio", "trackio": {"project": "../p"}}]},
        "integrations[0].trackio.project",
        "invalid_value",
    ),
    "an integration twice": (
        {"integrations": [{"type": "wandb", "wandb": {"project": p}} for p in "ab"]},
        "integrations",
        "invalid_value",
    ),
    "an unknown key": ({"test_file": "file-x"}, "test_file", "unknown_parameter"),
    "the deprecated hyperparameters": (
        {"hyperparameters": {"n_epochs": 1}},
        "hyperparameters",
        "unsupported_parameter",
    ),
    "no validation file": ({"validation_file": None}, "validation_file", "missing_required_parameter"),
    "an unknown training file": ({"training_file": "file-none"}, "training_file", "invalid_value"),
    "an unknown validation file": ({"validation_file": "file-none"}, "validation_file", "invalid_value"),
    "no method": ({"method": {}}, "method.type", "missing_required_parameter"),
    "the object of another method": (
        {"method": {"type": "supervised", "dpo": {"hyperparameters": {"beta": 0.1}}}},
        "method.dpo",
        "invalid_value",
    ),
    "a grader for a method without": (
        {"method": {"type": "supervised", "supervised": {"grader": {}}}},
        "method.supervised.grader",
        "unknown_parameter",
    ),
    "too many epochs": (
        {"method": {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 51}}}},
        "method.dpo.hyperparameters.n_epochs",
        "integer_above_max_value",
    ),
    "two different hyperparameters": (
        {
            "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}},
            "hyperparameters": {"n_epochs": 2},
        },
        "hyperparameters",
        "invalid_value",
    ),
    "a learning rate twice": (
        {
            "method": {
                "type": "supervised",
                "supervised": {
                    "hyperparameters": {
                        "learning_rate_multiplier": 2,
                        "advanced": {"optimizer": {"learning_rate": 0.1}},
                    }
                },
            }
        },
        "method.supervised.hyperparameters",
        "invalid_value",
    ),
    "a method of nobody's": ({"method": {"type": "vibes"}}, "method.type", "invalid_value"),
    "a method without its object": (
        {"method": {"type": "reinforcement"}},
        "method.reinforcement",
        "missing_required_parameter",
    ),
    "a method that is text": ({"method": "reinforcement"}, "method", "invalid_type"),
}


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_named_and_nothing_is_written(
    api: TestClient,
    house: House,
    job_request: Callable[..., dict[str, Any]],
    fields: Any,
    param: str,
    code: str,
) -> None:
    answer = api.post(JOBS, json=job_request(**fields))

    assert error(answer) == (param, code)
    assert api.get(JOBS).json()["data"] == []
    assert house.sent == []


def hyperparameters(**asked: Any) -> dict[str, Any]:
    return {"hyperparameters": asked}


def tool(**changed: Any) -> dict[str, Any]:
    return {"name": "search", "server_url": "https://tools.example/search"} | changed


INSIDE = "method.reinforcement"
REFUSED_INSIDE = {
    "zero epochs": (
        {"hyperparameters": {"n_epochs": 0}},
        "hyperparameters.n_epochs",
        "integer_below_min_value",
    ),
    "too many epochs": (
        {"hyperparameters": {"n_epochs": 51}},
        "hyperparameters.n_epochs",
        "integer_above_max_value",
    ),
    "epochs as text": (hyperparameters(n_epochs="3"), "hyperparameters.n_epochs", "invalid_type"),
    "no learning rate": (
        hyperparameters(learning_rate_multiplier=0),
        "hyperparameters.learning_rate_multiplier",
        "decimal_below_min_value",
    ),
    "an unknown effort": (
        hyperparameters(reasoning_effort="extreme"),
        "hyperparameters.reasoning_effort",
        "invalid_value",
    ),
    "an unknown hyperparameter": (
        {"hyperparameters": {"beta": 1}},
        "hyperparameters.beta",
        "unknown_parameter",
    ),
    "a loss that is text": (
        hyperparameters(advanced={"loss": "dapo"}),
        "hyperparameters.advanced.loss",
        "invalid_value",
    ),
    "two that exclude each other": (
        hyperparameters(compute_multiplier=2.0, advanced={"sampling": {"group_size": 4}}),
        "hyperparameters",
        "invalid_value",
    ),
    "an unknown loss in a group": (
        hyperparameters(advanced={"loss": {"type": "trpo"}}),
        "hyperparameters.advanced.loss.type",
        "invalid_value",
    ),
    "a loss without a type": (
        hyperparameters(advanced={"loss": {"cap": 5.0}}),
        "hyperparameters.advanced.loss.type",
        "missing_required_parameter",
    ),
    "a field of another loss": (
        hyperparameters(advanced={"loss": {"type": "dapo", "cap": 5.0}}),
        "hyperparameters.advanced.loss.cap",
        "unknown_parameter",
    ),
    "a bound in a group": (
        hyperparameters(advanced={"lora": {"rank": 0}}),
        "hyperparameters.advanced.lora.rank",
        "integer_below_min_value",
    ),
    "a bound of a field that may be auto": (
        hyperparameters(advanced={"evaluation": {"temperature": 9.0}}),
        "hyperparameters.advanced.evaluation.temperature",
        "decimal_above_max_value",
    ),
    "a bound of a field of a loss": (
        hyperparameters(advanced={"loss": {"type": "dapo", "clip_low": 0}}),
        "hyperparameters.advanced.loss.clip_low",
        "decimal_below_min_value",
    ),
    "a field outside of its group": (
        hyperparameters(advanced={"lora_rank": 8}),
        "hyperparameters.advanced.lora_rank",
        "unknown_parameter",
    ),
    "a tool without a server": (
        {"tools": [{"name": "a"}]},
        "tools[0].server_url",
        "missing_required_parameter",
    ),
    "a tool that is not called": ({"tools": [tool()]}, "tools[0].server_url", "invalid_value"),
    "a tool over http": (
        {"tools": [tool(server_url="http://a.example")]},
        "tools[0].server_url",
        "invalid_value",
    ),
    "a tool of another kind": ({"tools": [tool(type="bash")]}, "tools[0]", "unsupported_parameter"),
    "a type that is no text": ({"tools": [tool(type=7)]}, "tools[0].type", "unknown_parameter"),
    "two tools of one name": ({"tools": [tool(), tool()]}, "tools[1].name", "invalid_value"),
    "no steps": ({"tools": [tool()], "max_episode_steps": 0}, "max_episode_steps", "integer_below_min_value"),
    "many steps": (
        {"tools": [tool()], "max_episode_steps": 1001},
        "max_episode_steps",
        "integer_above_max_value",
    ),
    "steps in words": ({"tools": [tool()], "max_episode_steps": "ten"}, "max_episode_steps", "invalid_type"),
    "steps without tools": ({"max_episode_steps": 10}, "max_episode_steps", "invalid_value"),
    "episodes off policy": (
        {"tools": [tool()]} | hyperparameters(advanced={"schedule": {"type": "off_policy"}}),
        "hyperparameters.advanced.schedule.steps",
        "invalid_value",
    ),
    "a grader that is text": ({"grader": "string_check"}, "grader", "invalid_type"),
    "an unknown grader": ({"grader": {"type": "vibes", "name": "g"}}, "grader.type", "invalid_value"),
    "a grader without its fields": (
        {"grader": {"type": "string_check", "name": "g"}},
        "grader.input",
        "missing_required_parameter",
    ),
}


@pytest.mark.parametrize(("inside", "param", "code"), REFUSED_INSIDE.values(), ids=REFUSED_INSIDE.keys())
def test_what_is_wrong_inside_the_method_is_named_by_its_path(
    api: TestClient, job_request: Callable[..., dict[str, Any]], inside: dict[str, Any], param: str, code: str
) -> None:
    answer = api.post(JOBS, json=job_request(reinforcement=inside))

    assert error(answer) == (f"{INSIDE}.{param}", code)


def test_process_supervision_needs_a_grader_that_gives_steps(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    process = hyperparameters(advanced={"loss": {"type": "dapo", "supervision": "process"}})
    python = {"type": "python", "name": "p", "source": "def grade(sample, item): return 1.0"}

    refused = api.post(JOBS, json=job_request(reinforcement=process))
    accepted = api.post(JOBS, json=job_request(reinforcement=process | {"grader": python}))

    assert error(refused) == (INSIDE, "invalid_value")
    assert "'string_check' gives one score per answer" in refused.json()["error"]["message"]
    assert accepted.status_code == 200


@pytest.mark.parametrize(("formula", "says"), [("a + 2 * b", ""), ("a * b", "must be a weighted sum")])
def test_the_parts_of_a_grader_are_normalized_only_if_they_are_added_up(
    api: TestClient, job_request: Callable[..., dict[str, Any]], formula: str, says: str
) -> None:
    exact = {"type": "string_check", "name": "e", "input": "x", "reference": "x", "operation": "eq"}
    multi = {"type": "multi", "name": "m", "graders": {"a": exact, "b": exact}, "calculate_output": formula}
    each = hyperparameters(advanced={"loss": {"type": "dapo", "advantage_scale": "each"}})

    answer = api.post(JOBS, json=job_request(reinforcement=each | {"grader": multi}))
    of_one_score = api.post(JOBS, json=job_request(reinforcement=each))

    assert answer.status_code == (400 if says else 200)
    assert says in answer.text
    assert error(of_one_score) == (INSIDE, "invalid_value")
    assert "a grader of the type 'multi' is needed" in of_one_score.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "Invalid value for '{}': expected 'auto' or an integer >= 1, but got 0 instead."),
        ("many", "Invalid type for '{}': expected 'auto' or an integer, but got a string instead."),
        ({"int": 3}, "Invalid type for '{}': expected 'auto' or an integer, but got an object instead."),
    ],
)
def test_a_value_that_fits_neither_auto_nor_a_number_gets_one_sentence(
    api: TestClient,
    job_request: Callable[..., dict[str, Any]],
    value: int | str | dict[str, int],
    message: str,
) -> None:
    answer = api.post(JOBS, json=job_request(reinforcement={"hyperparameters": {"n_epochs": value}}))

    assert answer.json()["error"]["message"] == message.format(f"{INSIDE}.hyperparameters.n_epochs")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"group_size": 4}, "hyperparameters.advanced.sampling.group_size"),
        ({"num_generations": 4}, "hyperparameters.advanced.sampling.group_size"),
        ({"beta": 0.1}, "hyperparameters.advanced.kl"),
        ({"epsilon": 0.2}, "hyperparameters.advanced.loss.clip_low"),
        ({"max_completion_length": 64}, "hyperparameters.advanced.sampling.max_completion_tokens"),
        ({"lora_rnak": 8}, "hyperparameters.advanced.lora.rank"),
        ({"num_train_epochs": 1}, "hyperparameters.n_epochs"),
        ({"advanced": {"batch_size": 4}}, "hyperparameters.batch_size"),
        ({"advanced": {"num_generations": 4}}, "hyperparameters.advanced.sampling.group_size"),
        ({"advanced": {"lora": {"r": 4}}}, "hyperparameters.advanced.lora.rank"),
        ({"lora": {"rank": 4}}, "hyperparameters.advanced.lora"),
    ],
    ids=str,
)
def test_an_unknown_hyperparameter_hears_what_it_is_called_here(
    api: TestClient, job_request: Callable[..., dict[str, Any]], asked: dict[str, Any], meant: str
) -> None:
    answer = api.post(JOBS, json=job_request(reinforcement={"hyperparameters": asked}))

    assert answer.json()["error"]["message"].endswith(f"'. Did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("training_fil", "training_file"),
        ("sufix", "suffix"),
        ("n_epochs", "hyperparameters.n_epochs"),
        ("group_size", "hyperparameters.advanced.sampling.group_size"),
        ("colour", None),
    ],
)
@pytest.mark.parametrize("path", [JOBS, "/v1/regraft/jobs/validate"])
def test_an_unknown_field_of_a_job_gets_the_one_that_it_may_mean(
    api: TestClient,
    job_request: Callable[..., dict[str, Any]],
    path: str,
    field: str,
    meant: str | None,
) -> None:
    body = job_request() | {field: "x"}

    answer = api.post(path, json=body if path == JOBS else {"job": body})

    hint = "" if meant is None else f" Did you mean '{meant}'?"
    assert answer.json()["error"]["message"] == f"Unknown parameter: '{field}'.{hint}"


def test_an_unknown_field_of_any_body_gets_the_one_that_it_may_mean(api: TestClient) -> None:
    body = {"name": "hook", "url": "https://example.com", "event_types": ["fine_tuning.job.failed"]}

    answer = api.post("/v1/webhook_endpoints", json=body | {"treshold": {}})

    assert answer.json()["error"]["message"] == "Unknown parameter: 'treshold'. Did you mean 'thresholds'?"


@pytest.mark.parametrize(
    ("method", "asked", "meant"),
    [
        ("supervised", {"epochs": 2}, "hyperparameters.n_epochs"),
        ("supervised", {"lora_rank": 4}, "hyperparameters.advanced.lora.rank"),
        ("supervised", {"beta": 0.1}, None),
        ("dpo", {"advanced": {"loss": {"simpo_gamma": 1}}}, "hyperparameters.advanced.loss.gamma"),
        ("dpo", {"loss_type": "simpo"}, "hyperparameters.advanced.loss"),
    ],
    ids=str,
)
def test_jobs_without_a_grader_hear_of_their_own_hyperparameters(
    api: TestClient, method: str, asked: dict[str, Any], meant: str | None
) -> None:
    body = {"model": "tiny", "training_file": "file-1"}
    answer = api.post(
        JOBS, json=body | {"method": {"type": method, method: {"hyperparameters": asked}}}
    ).json()

    hint = "'." if meant is None else f"'. Did you mean '{meant}'?"
    assert answer["error"]["message"].endswith(hint)


@pytest.mark.parametrize(
    ("method", "field", "meant"),
    [
        ("reinforcement", "n_epochs", "hyperparameters.n_epochs"),
        ("reinforcement", "group_size", "hyperparameters.advanced.sampling.group_size"),
        ("supervised", "lora_rank", "hyperparameters.advanced.lora.rank"),
        ("dpo", "bta", "hyperparameters.beta"),
        ("dpo", "colour", None),
    ],
)
def test_a_hyperparameter_that_is_a_level_too_high_is_shown_its_place(
    api: TestClient,
    job_request: Callable[..., dict[str, Any]],
    method: str,
    field: str,
    meant: str | None,
) -> None:
    job = {"model": "tiny", "training_file": "file-1", "validation_file": "file-2"}
    inside = job_request()["method"]["reinforcement"] if method == "reinforcement" else {}
    beside = job | {"method": {"type": method, method: inside | {field: 4}}}
    above = job | {"method": {"type": method, method: inside}, field: 4}

    hint = "'." if meant is None else f"'. Did you mean '{meant}'?"
    assert api.post(JOBS, json=beside).json()["error"]["message"].endswith(hint)
    assert api.post(JOBS, json=above).json()["error"]["message"].endswith(hint)


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"beta": 2.5}, "beta", "a number <= 2 (<= 10 for the loss simpo), but got 2.5"),
        ({"advanced": {"loss": "simpo"}}, "advanced.loss", 'an object such as {"type": "simpo"}'),
    ],
)
def test_the_loss_of_a_dpo_job_is_explained(
    api: TestClient, asked: dict[str, Any], param: str, said: str
) -> None:
    body = {"model": "tiny", "training_file": "file-1"}
    answer = api.post(JOBS, json=body | {"method": {"type": "dpo", "dpo": {"hyperparameters": asked}}})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"method.dpo.hyperparameters.{param}")
    assert said in error["message"]


def test_simpo_may_have_its_papers_beta(api: TestClient, upload: Callable[..., str]) -> None:
    hyperparameters = {"beta": 2.5, "advanced": {"loss": {"type": "simpo"}}}
    body = {"model": "tiny", "training_file": upload()}
    made = api.post(
        JOBS, json=body | {"method": {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}}
    )

    assert made.json()["method"]["dpo"]["hyperparameters"]["beta"] == 2.5


def test_a_tuned_model_that_does_not_exist_is_not_called_unsupported(api: TestClient) -> None:
    answer = api.post(JOBS, json={"model": "ft:tiny:acme::none:ckpt-step-9", "training_file": "file-1"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "no tuned model or checkpoint with the name 'ft:tiny:acme::none:ckpt-step-9'" in error["message"]


def test_a_hyperparameter_like_no_other_gets_no_guess(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    answer = api.post(JOBS, json=job_request(reinforcement={"hyperparameters": {"colour": 1}}))

    assert answer.json()["error"]["message"].endswith("'."), "and no question"


def test_nulls_of_a_typed_object_count_as_not_sent(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    grader = {"type": "string_check", "name": None, "operation": "eq", "input": "a", "reference": "b"}
    body = job_request(reinforcement={"grader": grader, "response_format": None})
    body["method"] |= {"supervised": None, "dpo": None}

    answer = api.post(JOBS, json=body)

    assert answer.status_code == 200
    assert answer.json()["method"]["reinforcement"]["grader"]["name"].startswith("grader-")


def test_a_second_method_beside_reinforcement_is_refused(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    body = job_request()
    body["method"]["dpo"] = {"hyperparameters": {"beta": 0.1}}

    assert error(api.post(JOBS, json=body)) == ("method.dpo", "invalid_value")


def test_a_grader_may_read_tool_calls(api: TestClient, job_request: Callable[..., dict[str, Any]]) -> None:
    calls = {
        "type": "string_check",
        "name": "calls",
        "operation": "eq",
        "input": "{{sample.output_tools[0].function.name}}",
        "reference": "find",
    }
    multi = {"type": "multi", "name": "m", "graders": {"calls": calls}, "calculate_output": "calls"}

    for grader in (calls, multi):
        assert api.post(JOBS, json=job_request(reinforcement={"grader": grader})).status_code == 200
        assert api.post("/v1/fine_tuning/alpha/graders/validate", json={"grader": grader}).status_code == 200


HYPERPARAMETERS = {"n_epochs": 3}


@pytest.mark.parametrize(
    "fields",
    [
        {"method": {"type": "supervised", "supervised": {"hyperparameters": HYPERPARAMETERS}}},
        {"hyperparameters": HYPERPARAMETERS},
        {"method": {"type": "supervised"}, "hyperparameters": HYPERPARAMETERS},
        {
            "method": {"type": "supervised", "supervised": {"hyperparameters": HYPERPARAMETERS}},
            "hyperparameters": HYPERPARAMETERS,
        },
    ],
)
def test_every_spelling_of_a_supervised_job_is_the_same_job(
    api: TestClient, upload: Callable[..., str], fields: dict[str, Any]
) -> None:
    job = api.post(JOBS, json={"model": "tiny", "training_file": upload(), **fields}).json()

    asked = job["method"]["supervised"]["hyperparameters"]
    assert job["method"]["type"] == "supervised"
    assert job["hyperparameters"] == asked
    assert (asked["n_epochs"], asked["batch_size"], asked["learning_rate_multiplier"]) == (3, "auto", "auto")
    assert (job["validation_file"], job["eval_id"]) == (None, None)


def test_openais_quickstart_is_a_supervised_job(api: TestClient, upload: Callable[..., str]) -> None:
    job = api.post(JOBS, json={"model": "tiny", "training_file": upload()}).json()

    assert job["status"] == "validating_files"
    assert job["method"]["type"] == "supervised"
    assert {job["hyperparameters"][name] for name in ("n_epochs", "batch_size")} == {"auto"}


def test_a_preference_job_is_shown_as_at_openai(api: TestClient, upload: Callable[..., str]) -> None:
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}

    job = api.post(JOBS, json={"model": "tiny", "training_file": upload(), "method": method}).json()

    assert job["hyperparameters"] is None
    assert job["method"]["dpo"]["hyperparameters"]["beta"] == 0.2
    assert job["method"]["dpo"]["hyperparameters"]["advanced"]["loss"]["type"] == "sigmoid"


def test_a_preview_is_for_reinforcement_jobs(api: TestClient, upload: Callable[..., str]) -> None:
    answer = api.post("/v1/regraft/previews", json={"model": "tiny", "training_file": upload()})

    assert error(answer) == ("method.type", "unsupported_method")


@pytest.mark.parametrize("effort", ["medium", "default"])
def test_a_reasoning_effort_is_echoed_and_the_worker_may_warn_of_it(
    effort: str, api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    """A second warning on creation could not know the model's template."""
    job = create_job(reinforcement=hyperparameters(reasoning_effort=effort))

    assert job["method"]["reinforcement"]["hyperparameters"]["reasoning_effort"] == effort
    levels = {event["level"] for event in api.get(f"{JOBS}/{job['id']}/events").json()["data"]}
    assert levels == {"info"}


@pytest.mark.parametrize("training_type", ["standard", "globalStandard", "developer", None])
def test_azures_training_type_is_accepted_and_means_nothing(
    api: TestClient, job_request: Callable[..., dict[str, Any]], training_type: str | None
) -> None:
    answer = api.post(JOBS, json=job_request(trainingType=training_type))

    assert answer.status_code == 200
    assert "trainingType" not in answer.json()


def allowing_tools(house: House, *hosts: str) -> None:
    service = house.app.state.service
    house.app.state.service = replace(service, all_backends=Backends({}, Endpoints(hosts)))


def test_a_job_shows_its_tools_without_their_secrets_and_how_many_steps_an_episode_has(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    allowing_tools(house, "tools.example")
    made = create_job(reinforcement={"tools": [tool(headers={"X-Key": "secret"})]})

    shown = made["method"]["reinforcement"]
    again = api.get(f"/v1/regraft/jobs/{made['id']}/request").json()["method"]["reinforcement"]

    assert shown["tools"] == again["tools"] == [tool(headers={"X-Key": "***"})]
    assert shown["max_episode_steps"] == again["max_episode_steps"] == 10
    with house.database.read() as session:
        job = session.scalars(select(Job)).one()
    assert job.body["tools"] == [tool(headers={"X-Key": "secret"})]


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"headers": {"Host": "very-secret"}}, "headers"),
        ({"headers": {"Idempotency-Key": "very-secret"}}, "headers"),
        ({"headers": {"X": "very-secret\n"}}, "headers"),
        ({"headers": {"X": "***"}}, "headers.X"),
        ({"headers": "very-secret"}, "headers"),
        ({"server_url": "https://elsewhere.example/very-secret"}, "server_url"),
        ({"server_url": "https://10.0.0.1/very-secret"}, "server_url"),
    ],
)
def test_a_tool_that_is_refused_is_named_and_its_secrets_are_not_quoted(
    api: TestClient,
    house: House,
    job_request: Callable[..., dict[str, Any]],
    changed: dict[str, Any],
    where: str,
) -> None:
    allowing_tools(house, "tools.example", "10.0.0.*")
    answer = api.post(JOBS, json=job_request(reinforcement={"tools": [tool(**changed)]}))

    assert error(answer)[0] == f"{INSIDE}.tools[0].{where}"
    assert "very-secret" not in answer.text


@pytest.mark.parametrize("nothing", [{"tools": []}, {"tools": None}, {"max_episode_steps": None}])
def test_tools_that_are_none_are_accepted(
    create_job: Callable[..., dict[str, Any]], nothing: dict[str, Any]
) -> None:
    shown = create_job(reinforcement=nothing)["method"]["reinforcement"]

    assert shown.keys() == {"grader", "hyperparameters", "response_format"}


@pytest.mark.parametrize("suffix", ["v1.2", "my desk", "ü/ß", "..", "a:b", "  ", "日本"])
def test_a_suffix_is_echoed_as_it_was_sent(create_job: Callable[..., dict[str, Any]], suffix: str) -> None:
    assert create_job(suffix=suffix)["user_provided_suffix"] == suffix


def test_a_file_of_another_purpose_is_refused(
    api: TestClient, house: House, job_request: Callable[..., dict[str, Any]]
) -> None:
    request = job_request()
    with house.database.write() as session:
        session.execute(
            update(File).where(File.id == request["training_file"]).values(purpose="fine-tune-results")
        )

    answer = api.post(JOBS, json=request)

    assert error(answer) == ("training_file", "invalid_value")
    assert "purpose 'fine-tune-results'" in answer.json()["error"]["message"]


def test_a_deleted_file_is_refused(api: TestClient, job_request: Callable[..., dict[str, Any]]) -> None:
    request = job_request()
    api.delete(f"/v1/files/{request['validation_file']}")

    assert error(api.post(JOBS, json=request)) == ("validation_file", "invalid_value")


def test_an_unknown_model_is_answered_with_those_there_are(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    answer = api.post(JOBS, json=job_request(model="gpt-9"))

    assert error(answer, 404) == ("model", "model_not_found")
    assert "org/large, tiny" in answer.json()["error"]["message"]


def test_a_mistake_in_a_field_is_told_before_a_missing_model(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    assert error(api.post(JOBS, json=job_request(model="gpt-9", seed=-1)))[0] == "seed"


# Watching and stopping.


def test_an_unknown_job_has_openais_error(api: TestClient) -> None:
    answer = api.get(f"{JOBS}/ftjob-x")

    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "Could not find fine tune: ftjob-x",
        "type": "invalid_request_error",
        "param": "fine_tune_id",
        "code": "fine_tune_not_found",
    }


@pytest.mark.both_databases
def test_a_finished_job_shows_what_came_of_it(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    change(
        house,
        status="succeeded",
        finished_at=9,
        fine_tuned_model="ft:tiny:default::abc",
        result_file="file-r",
        trained_tokens=50,
        usage={"training_seconds": 1.5},
    )

    shown = api.get(f"{JOBS}/{job['id']}").json()

    assert (shown["status"], shown["finished_at"], shown["trained_tokens"]) == ("succeeded", 9, 50)
    assert (shown["fine_tuned_model"], shown["result_files"]) == ("ft:tiny:default::abc", ["file-r"])
    assert (shown["usage_metrics"], shown["error"]) == ({"training_seconds": 1.5}, None)


def test_tokens_are_not_counted_out_before_the_end(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    change(house, status="running", trained_tokens=50)

    assert api.get(f"{JOBS}/{job['id']}").json()["trained_tokens"] is None


@pytest.mark.both_databases
def test_a_failed_job_says_why(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    why = {"code": "invalid_training_file", "message": "line 3: is not JSON", "param": "training_file"}
    change(house, status="failed", error=why)

    assert api.get(f"{JOBS}/{job['id']}").json()["error"] == why


def post(api: TestClient, job: dict[str, Any], action: str) -> "Response":
    """As OpenAI's client does it: no body, and a content type all the same."""
    return api.post(f"{JOBS}/{job['id']}/{action}", headers={"content-type": "application/json"})


@pytest.mark.both_databases
def test_a_job_can_be_cancelled_paused_and_resumed(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    change(house, status="queued")

    assert post(api, job, "pause").json()["status"] == "paused"
    assert post(api, job, "resume").json()["status"] == "queued"
    assert post(api, job, "cancel").json()["status"] == "cancelled"
    assert house.sent[-1] == (queue.RUN, queue.gpu_queue("cpu"))


def test_what_the_state_does_not_allow_is_a_400(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    job = create_job()
    post(api, job, "cancel")

    assert error(post(api, job, "resume")) == (None, "invalid_job_state")


# Lists.


@pytest.mark.both_databases
def test_jobs_are_listed_newest_first_page_by_page(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    ids = [create_job()["id"] for _ in range(3)]

    first = api.get(JOBS, params={"limit": 2}).json()
    last = api.get(JOBS, params={"limit": 2, "after": first["data"][-1]["id"]}).json()

    assert [job["id"] for page in (first, last) for job in page["data"]] == ids[::-1]
    assert (first["has_more"], last["has_more"]) == (True, False)
    assert first.keys() == {"object", "data", "has_more"}


@pytest.mark.parametrize(("limit", "count"), [(0, 1), (-5, 1), (1000, 2)])
def test_a_limit_out_of_range_is_brought_into_it(
    api: TestClient, create_job: Callable[..., dict[str, Any]], limit: int, count: int
) -> None:
    create_job(), create_job()

    assert len(api.get(JOBS, params={"limit": limit}).json()["data"]) == count


@pytest.mark.both_databases
def test_jobs_are_found_by_their_metadata(api: TestClient, create_job: Callable[..., dict[str, Any]]) -> None:
    wanted = create_job(metadata={"team": "a", "try": "1"})["id"]
    create_job(metadata={"team": "a", "try": "2"})
    without = create_job()["id"]

    def found(params: dict[str, str]) -> list[str]:
        return [job["id"] for job in api.get(JOBS, params=params).json()["data"]]

    assert found({"metadata[team]": "a", "metadata[try]": "1"}) == [wanted]
    assert found({"metadata": "null"}) == [without]
    assert found({"metadata[team]": "b"}) == []
    assert found({"metadata[try]": "1", "after": without}) == [wanted], "any job of the project is a cursor"


@pytest.mark.both_databases
def test_events_are_listed_newest_first_page_by_page(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        events.append(session, job_id, "Step 1/2", type="metrics", data={"step": 1})

    first = api.get(f"{JOBS}/{job_id}/events", params={"limit": 2}).json()
    last = api.get(f"{JOBS}/{job_id}/events", params={"after": first["data"][-1]["id"]}).json()

    assert first["data"][0] | {"id": "", "created_at": 0} == {
        "object": "fine_tuning.job.event",
        "id": "",
        "created_at": 0,
        "level": "info",
        "message": "Step 1/2",
        "type": "metrics",
        "data": {"step": 1},
    }
    assert [event["message"] for event in last["data"]] == [f"Created fine-tuning job: {job_id}"]
    assert (first["has_more"], last["has_more"]) == (True, False)


def add_checkpoint(
    house: House, job_id: str, step: int, reward: float | None, *names: str, **metrics: float
) -> str:
    with house.database.write() as session:
        checkpoint = Checkpoint(job_id=job_id, step=step, epoch=1, valid_reward=reward)
        checkpoint.blob_prefix = f"checkpoints/{step}"
        checkpoint.metrics = {"train_mean_reward": 0.5, "completion_tokens_mean": 12.0, **metrics}
        session.add(checkpoint)
        session.flush()
        for name in names:
            tuned = TunedModel(name=name, project_id=house.project.id, job_id=job_id, base_model="tiny")
            tuned.checkpoint_id = checkpoint.id
            session.add(tuned)
        return checkpoint.id


def test_an_unknown_teacher_is_refused_with_the_two_ways_to_have_one(
    api: TestClient, job_request: Callable[..., dict[str, Any]]
) -> None:
    distillation = {"teacher": {"model": "none"}, "hyperparameters": {}}

    answer = api.post(JOBS, json=job_request(method={"type": "distillation", "distillation": distillation}))

    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "Available: " in message or "Base models: " in message
    assert "under [models] in REGRAFT_GRADERS_FILE" in message


@pytest.mark.both_databases
def test_kept_checkpoints_are_listed_newest_first_with_their_names(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    early = add_checkpoint(house, job_id, 2, 0.7, "ft:tiny:o::1:ckpt-step-2", "ft:tiny:o::1")
    add_checkpoint(house, job_id, 3, None)  # only there for resuming
    late = add_checkpoint(house, job_id, 4, 0.6, "ft:tiny:o::1:ckpt-step-4")
    change(house, fine_tuned_model="ft:tiny:o::1")

    listed = api.get(f"{JOBS}/{job_id}/checkpoints").json()

    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (late, early, False)
    assert listed["data"][1] | {"created_at": 0} == {
        "object": "fine_tuning.job.checkpoint",
        "id": early,
        "created_at": 0,
        "fine_tuned_model_checkpoint": "ft:tiny:o::1:ckpt-step-2",
        "fine_tuning_job_id": job_id,
        "step_number": 2,
        "metrics": {
            "step": 2,
            "train_mean_reward": 0.5,
            "train_reward_mean": 0.5,
            "full_valid_mean_reward": 0.7,
            "valid_reward_mean": 0.7,
            "completion_tokens_mean": 12.0,
        },
        "adapter": house.blobs.url("checkpoints/2"),
    }


def test_a_checkpoint_of_a_distillation_job_has_its_kl_to_the_teacher(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    measured = {"teacher_kl": 0.5, "full_valid_teacher_kl": 0.25}
    add_checkpoint(house, job_id, 2, -0.25, **measured)

    (listed,) = api.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]

    assert measured.items() <= listed["metrics"].items()


@pytest.mark.both_databases
def test_the_checkpoint_that_became_the_result_is_listed_even_without_a_reward(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    final = add_checkpoint(house, job_id, 5, None, "ft:tiny:o::1")
    change(house, fine_tuned_model="ft:tiny:o::1")

    listed = api.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]

    assert [(one["id"], one["fine_tuned_model_checkpoint"]) for one in listed] == [(final, "ft:tiny:o::1")]


@pytest.mark.both_databases
def test_checkpoints_are_listed_page_by_page(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    ids = [add_checkpoint(house, job_id, step, 0.1) for step in range(3)]

    first = api.get(f"{JOBS}/{job_id}/checkpoints", params={"limit": 2}).json()
    last = api.get(f"{JOBS}/{job_id}/checkpoints", params={"after": first["last_id"]}).json()

    assert [one["id"] for page in (first, last) for one in page["data"]] == ids[::-1]


# What OpenAI does not have.


@pytest.mark.both_databases
def test_the_metrics_of_all_steps_come_in_order(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        for step in (1, 0):
            session.add(StepMetric(job_id=job_id, step=step, epoch=1, data={"train_mean_reward": step / 2}))

    listed = api.get(f"/v1/regraft/jobs/{job_id}/metrics").json()

    assert listed["data"] == [{"step": 0, "train_mean_reward": 0.0}, {"step": 1, "train_mean_reward": 0.5}]


def test_only_the_metrics_that_were_asked_for_are_listed(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        timing = {"step": {"sampling": 1.0}, "graders": []}
        data = {"kl": 0.5, "entropy": 1.0, "scores": {"graders": []}, "timing": timing}
        session.add(StepMetric(job_id=job_id, step=1, epoch=1, data=data))
        session.add(StepMetric(job_id=job_id, step=2, epoch=1, data={"entropy": 2.0}))
    path = f"/v1/regraft/jobs/{job_id}/metrics"

    listed = api.get(path, params={"names": "kl, scores,timing.step"}).json()
    refused = api.get(path, params={"names": "kl,gradnorm"})

    only = {"kl": 0.5, "scores": {"graders": []}, "timing": {"step": {"sampling": 1.0}}}
    assert listed == {"object": "list", "data": [{"step": 1} | only, {"step": 2}], "has_more": False}
    assert api.get(path, params={"names": "kl.mean"}).status_code == 400
    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "message": "There is no metric 'gradnorm'.",
        "type": "invalid_request_error",
        "param": "names",
        "code": "invalid_value",
    }


def test_events_are_listed_by_type(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        for step in range(3):
            events.append(session, job_id, f"Step {step}", type="metrics", data={"step": step}, step=step)
    path = f"{JOBS}/{job_id}/events"

    messages = api.get(path, params={"type": "message"}).json()
    first = api.get(path, params={"type": "metrics", "limit": 2}).json()
    second = api.get(path, params={"type": "metrics", "after": first["data"][1]["id"]}).json()

    assert {one["type"] for one in messages["data"]} == {"message"}
    assert [one["message"] for one in first["data"] + second["data"]] == ["Step 2", "Step 1", "Step 0"]
    assert (first["has_more"], second["has_more"]) == (True, False)


def test_sampling_a_step_ahead_needs_a_sampler_of_its_own(
    api: TestClient, house: House, job_request: Callable[..., dict[str, Any]]
) -> None:
    service = house.app.state.service
    file = hardware_file(house.folder, {"cpu": GpuClass(gpu_memory_gib=0)})
    without_gpu = service.settings.model_copy(update={"hardware_file": file})
    house.app.state.service = replace(service, settings=without_gpu)  # this machine may have a GPU
    ahead = {"hyperparameters": {"advanced": {"schedule": {"type": "off_policy", "steps": 1}}}}

    answer = api.post("/v1/fine_tuning/jobs", json=job_request(reinforcement=ahead))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "method.reinforcement.hyperparameters.advanced.schedule.steps"
    assert "as vLLM" in answer.json()["error"]["message"]


def test_a_model_that_a_gpu_samples_with_vllm_by_default_may_be_sampled_a_step_ahead(
    api: TestClient, house: House, job_request: Callable[..., dict[str, Any]]
) -> None:
    """The API need not have the GPU: it is told what the workers' class has."""
    service = house.app.state.service
    file = hardware_file(house.folder, {"cpu": GpuClass(gpu_memory_gib=78)})
    house.app.state.service = replace(
        service, settings=service.settings.model_copy(update={"hardware_file": file})
    )
    ahead = {"hyperparameters": {"advanced": {"schedule": {"type": "off_policy", "steps": 1}}}}

    assert api.post("/v1/fine_tuning/jobs", json=job_request(reinforcement=ahead)).status_code == 200

    other = hardware_file(house.folder, {"cpu": GpuClass(gpu_memory_gib=78, sampler="transformers")})
    house.app.state.service = replace(
        service, settings=service.settings.model_copy(update={"hardware_file": other})
    )
    assert api.post("/v1/fine_tuning/jobs", json=job_request(reinforcement=ahead)).status_code == 400


def test_answers_of_a_fleet_do_not_continue_with_another_adapter(
    api: TestClient,
    house: House,
    job_request: Callable[..., dict[str, Any]],
) -> None:
    service = house.app.state.service
    advanced = {"schedule": {"type": "off_policy", "continue_in_flight": True}}
    request = job_request(reinforcement={"hyperparameters": {"advanced": advanced}})
    fleet = service.settings.model_copy(update={"samplers": {request["model"]: ("http://sampler:8300",)}})
    house.app.state.service = replace(service, settings=fleet)

    error = api.post("/v1/fine_tuning/jobs", json=request).json()["error"]

    assert error["param"] == "method.reinforcement.hyperparameters.advanced.schedule.continue_in_flight"
    assert "sampled by a fleet" in error["message"]


@pytest.mark.both_databases
def test_the_secrets_of_an_endpoint_are_kept_and_not_shown(
    api: TestClient, house: House, job_request: Callable[..., dict[str, Any]]
) -> None:
    """The run needs them, and nobody who can read the job does."""
    house.app.state.service = replace(
        house.app.state.service, all_backends=Backends({}, Endpoints(("graders.example.com",)))
    )
    mine = {
        "type": "endpoint",
        "name": "e",
        "url": "https://graders.example.com/g",
        "headers": {"X-Key": "hush"},
    }

    job = api.post("/v1/fine_tuning/jobs", json=job_request(reinforcement={"grader": mine}))

    assert job.status_code == 200, job.text
    assert "hush" not in job.text + api.get(f"/v1/fine_tuning/jobs/{job.json()['id']}").text
    with house.database.read() as session:
        assert session.query(Job).one().body["grader"]["headers"] == {"X-Key": "hush"}


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "sent",
    [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
    ],
)
@pytest.mark.both_databases
def test_a_response_format_is_kept_as_openai_shows_it(
    create_job: Callable[..., dict[str, Any]], sent: dict[str, Any]
) -> None:
    job = create_job(reinforcement={"response_format": sent})

    kept = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    assert job["method"]["reinforcement"]["response_format"] == kept


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"type": "json_object"}, ".type"),
        ({"type": "json_schema"}, ".json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, ".json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "vibes"}}},
            ".json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "lax": 1}},
            ".json_schema.lax",
        ),
    ],
)
def test_a_response_format_that_cannot_be_held_to_is_a_400(
    api: TestClient, job_request: Callable[..., dict[str, Any]], sent: dict[str, Any], param: str
) -> None:
    answer = api.post("/v1/fine_tuning/jobs", json=job_request(reinforcement={"response_format": sent}))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"method.reinforcement.response_format{param}"


def expensive_schema() -> dict[str, Any]:
    """Within every bound of ours, and beyond llguidance's own."""
    return {
        "anyOf": [{"type": "array", "maxItems": 10_000 - n, "items": {"type": "string"}} for n in range(300)]
    }


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "items": {"type": "object"}, "minItems": 10**9}, "'minItems' is 1000000000"),
        (expensive_schema(), "grammar size (number of symbols) too big"),
    ],
)
@pytest.mark.parametrize("url", ["/v1/fine_tuning/jobs", "/v1/regraft/jobs/validate"])
def test_a_schema_that_takes_too_long_or_too_much_memory_is_a_400(
    api: TestClient, job_request: Callable[..., dict[str, Any]], url: str, schema: dict[str, Any], says: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    job = job_request(reinforcement={"response_format": form})

    answer = api.post(url, json={"job": job} if "validate" in url else job)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"] == "method.reinforcement.response_format.json_schema.schema"


@pytest.fixture
def teachers(house: House) -> None:
    """A model on a server that the operator names."""
    backends = Backends({}, models={"large": JudgeModel("http://127.0.0.1:9/v1")})
    house.app.state.service = replace(house.app.state.service, all_backends=backends)


def distilled(upload: Callable[..., str], **asked: Any) -> dict[str, Any]:
    distillation = {"teacher": {"model": "large"}} | asked
    return {
        "model": "tiny",
        "training_file": upload(),
        "validation_file": upload(),
        "method": {"type": "distillation", "distillation": distillation},
    }


@pytest.mark.usefixtures("teachers")
def test_a_model_on_a_server_that_the_operator_names_may_teach(
    api: TestClient, upload: Callable[..., str]
) -> None:
    made = api.post(JOBS, json=distilled(upload))

    assert made.status_code == 200, made.text
    assert made.json()["method"]["distillation"]["teacher"] == {"model": "large"}


@pytest.mark.usefixtures("teachers")
def test_a_model_on_a_server_may_teach_its_likeliest_tokens(
    api: TestClient, upload: Callable[..., str]
) -> None:
    row = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    asked = {"mode": "logits", "hyperparameters": {"advanced": {"loss": {"top_k": 20}}}}

    made = api.post(
        JOBS, json=distilled(upload, **asked) | {"training_file": upload(10 * row), "validation_file": None}
    )

    assert made.status_code == 200, made.text


@pytest.mark.parametrize("method", ["supervised", "dpo", "reinforcement"])
def test_a_learning_rate_that_ruins_every_model_is_refused(
    api: TestClient, job_request: Callable[..., dict[str, Any]], method: str
) -> None:
    body = job_request()
    inside = {"hyperparameters": {"learning_rate_multiplier": 1e30}}
    if method == "reinforcement":
        inside = body["method"]["reinforcement"] | inside
    body["method"] = {"type": method, method: inside}

    error = api.post(JOBS, json=body).json()["error"]

    assert error["param"] == f"method.{method}.hyperparameters.learning_rate_multiplier"
    assert "1e+30 is above 100000" in error["message"]


@pytest.mark.usefixtures("teachers")
def test_answers_that_leave_no_room_for_a_prompt_are_refused(
    api: TestClient, upload: Callable[..., str]
) -> None:
    asked = {"hyperparameters": {"advanced": {"sampling": {"max_completion_tokens": 4096}}}}

    error = api.post(JOBS, json=distilled(upload, **asked)).json()["error"]

    assert "max_completion_tokens 4096 leaves no room for a prompt in the model's context" in error["message"]
    assert error["param"] == "method.distillation.hyperparameters.advanced.sampling.max_completion_tokens"


@pytest.mark.usefixtures("teachers")
def test_a_job_that_a_teacher_scores_has_no_eval(api: TestClient, upload: Callable[..., str]) -> None:
    """Clients that follow an eval_id find the eval."""
    job = api.post(JOBS, json=distilled(upload)).json()

    assert job["eval_id"] is None
    assert api.get("/v1/evals").json()["data"] == []


@pytest.mark.usefixtures("teachers")
@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        (
            {"mode": "logits"},
            "hyperparameters.advanced.loss.top_k",
            "set top_k, to at most 1000. vLLM gives 20",
        ),
        (
            {"mode": "logits", "hyperparameters": {"advanced": {"loss": {"top_k": 1001}}}},
            "hyperparameters.advanced.loss.top_k",
            "set top_k, to at most 1000",
        ),
        (
            {"mode": "logits", "hyperparameters": {"advanced": {"loss": {"top_k": 20, "temperature": 2.0}}}},
            "hyperparameters.advanced.loss.temperature",
            "gives log-probabilities at temperature 1, not 2",
        ),
        (
            {"hyperparameters": {"advanced": {"sampling": {"temperature": 0.7}}}},
            "hyperparameters.advanced.sampling.temperature",
            "gives log-probabilities at temperature 1, not 0.7",
        ),
    ],
)
def test_what_a_teacher_on_a_server_does_not_give_is_refused(
    api: TestClient, upload: Callable[..., str], asked: Any, param: str, says: str
) -> None:
    refused = api.post(JOBS, json=distilled(upload, **asked))

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"method.distillation.{param}"
    assert says in refused.json()["error"]["message"]
