"""Jobs that train all weights (`train: "full"`): where the setting is, and what is refused when they are created."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.app import create_app
from api.http.rate_limits import LocalRates
from core.database.tables import Job
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from graders.backends import Backends
from tests.api.conftest import GRADER, MODELS, House
from tests.api.test_jobs import JOBS, add_checkpoint
from tests.hyperparameters import in_groups

WHOLE, ADAPTER = "ft:tiny:o::full", "ft:tiny:o::lora"
JobRequest = Callable[..., dict[str, Any]]
REINFORCEMENT = "method.reinforcement.hyperparameters.advanced"


def full(**advanced: Any) -> dict[str, Any]:
    return {"hyperparameters": {"advanced": in_groups({"train": "full"} | advanced)}}


def of(kind: str, advanced: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": kind, kind: {"hyperparameters": {"advanced": in_groups(advanced)}} | more}


def refusal(api: TestClient, request: dict[str, Any]) -> tuple[str, str]:
    answer = api.post(JOBS, json=request)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def tuned(house: House, name: str, resolved: dict[str, Any]) -> None:
    """A finished job and its model."""
    with house.database.write() as session:
        job = Job(
            project_id=house.project.id, organization_id=house.project.organization_id, model="tiny",
            training_file="file-a", seed=1, gpu_class="cpu", status="succeeded", method="supervised",
            body={"hyperparameters": {}}, resolved=resolved | {"lora_rank": 16, "lora_alpha": 32},
        )  # fmt: skip
        session.add(job)
        session.flush()
        job_id = job.id
    add_checkpoint(house, job_id, 4, 0.6, name)


@pytest.mark.parametrize("kind", ["supervised", "dpo", "reinforcement"])
def test_it_is_a_setting_of_the_methods_that_train_a_model(
    api: TestClient, job_request: JobRequest, kind: str
) -> None:
    more = {"grader": GRADER} if kind == "reinforcement" else {}
    request = job_request(method=of(kind, {"train": "full"}, **more))

    shown = api.post(JOBS, json=request).json()["method"][kind]["hyperparameters"]

    assert shown["advanced"]["train"] == "full"


def test_a_job_as_it_is_shown_can_be_sent_again(api: TestClient, job_request: JobRequest) -> None:
    for request in (job_request(full()), job_request(full(sampling={"group_size": 4}))):
        method = api.post(JOBS, json=request).json()["method"]
        again = api.post(JOBS, json=request | {"method": method})

        assert again.json()["method"] == method


@pytest.mark.parametrize("kind", ["reward_model", "distillation"])
def test_methods_that_need_an_adapter_refuse_it(api: TestClient, job_request: JobRequest, kind: str) -> None:
    more = {"teacher": {"model": "org/large"}} if kind == "distillation" else {}
    param, message = refusal(api, job_request(method=of(kind, {"train": "full"}, **more)))

    assert param == f"method.{kind}.hyperparameters.advanced.train"
    assert "for the methods 'supervised', 'dpo' and 'reinforcement'" in message


@pytest.mark.parametrize(
    ("advanced", "said"),
    [
        ({"lora_rank": 32}, "lora has no effect with train 'full'"),
        ({"lora": {"targets": ["q_proj"]}}, "lora has no effect with train 'full'"),
        ({"off_policy_steps": 1}, "schedule.steps cannot be combined with train 'full'"),
    ],
)
def test_hyperparameters_without_effect_are_refused(
    api: TestClient, job_request: JobRequest, advanced: dict[str, Any], said: str
) -> None:
    assert said in refusal(api, job_request(full(**advanced)))[1]


def test_an_adapter_is_no_start_for_all_weights_nor_a_whole_model_for_an_adapter(
    api: TestClient, house: House, job_request: JobRequest
) -> None:
    tuned(house, WHOLE, {"train": "full"})
    tuned(house, ADAPTER, {})

    assert refusal(api, job_request(full(), model=ADAPTER)) == (
        f"{REINFORCEMENT}.train",
        f"'{ADAPTER}' is a LoRA adapter, and train 'full' trains the weights of a base model or of a model that was "
        "trained with it. Leave train out, or have the operator add the merged model to the registry (`regraft-server "
        "export --format merged`).",
    )
    assert refusal(api, job_request(model=WHOLE)) == (
        f"{REINFORCEMENT}.train",
        f"'{WHOLE}' is a whole model, trained with train 'full'. Only jobs with train 'full' train it further in this "
        "version.",
    )
    assert api.post(JOBS, json=job_request(full(), model=WHOLE)).json()["lineage"]["model"] == WHOLE


def test_a_whole_model_is_no_teacher_in_the_trainers_memory(
    api: TestClient, house: House, job_request: JobRequest
) -> None:
    tuned(house, WHOLE, {"train": "full"})

    param, message = refusal(api, job_request(method=of("distillation", {}, teacher={"model": WHOLE})))

    assert param == "method.distillation.teacher.model"
    assert message.startswith(f"The teacher '{WHOLE}' is a whole model")


def test_a_reward_model_is_no_grader_of_changing_weights(
    api: TestClient, house: House, job_request: JobRequest
) -> None:
    tuned(house, "ft:tiny:o::reward", {"reward_kind": "pairs"})
    with house.database.write() as session:
        session.query(Job).update({"method": "reward_model"})
    grader = {"type": "reward_model", "name": "judge", "model": "ft:tiny:o::reward"}

    param, message = refusal(api, job_request(full() | {"grader": grader}))

    assert param == "method.reinforcement.grader.model"
    assert "is an adapter on the base model, whose weights change" in message


def opened(house: House, settings: Settings, models: Mapping[str, BaseModelEntry] = MODELS) -> TestClient:
    """The same service with other settings."""
    parts = (house.database, house.blobs, Registry(models=dict(models)), Backends.none(), lambda *wake: True)
    app = create_app(settings, *parts, LocalRates())
    return TestClient(app, headers={"Authorization": f"Bearer {house.key}"})


def test_a_fleet_samples_adapters_only_and_refuses_it(house: House, job_request: JobRequest) -> None:
    settings: Any = {"samplers": {"tiny": ["http://sampler:8300"]}, "samplers_key": "secret"}
    with opened(house, Settings(data_dir=house.folder, **settings)) as api:
        param, message = refusal(api, job_request(full()))
        supervised = api.post(JOBS, json=job_request(method=of("supervised", {"train": "full"})))

    assert param == f"{REINFORCEMENT}.train"
    assert "the operator has samplers for it (REGRAFT_SAMPLERS), which take adapters only" in message
    assert supervised.status_code == 200  # it samples nothing


def test_a_jobs_own_vllm_engines_sample_it(house: House, job_request: JobRequest) -> None:
    with opened(house, Settings(data_dir=house.folder, sampler="vllm")) as api:
        assert api.post(JOBS, json=job_request(full())).status_code == 200


@pytest.mark.parametrize("kind", ["supervised", "dpo", "reinforcement"])
def test_runs_of_several_machines_refuse_it(house: House, job_request: JobRequest, kind: str) -> None:
    configured = Settings(data_dir=house.folder, nodes=2, rendezvous="gpu-0:29400")
    more = {"grader": GRADER} if kind == "reinforcement" else {}

    with opened(house, configured) as api:
        param, message = refusal(api, job_request(method=of(kind, {"train": "full"}, **more)))

    assert param == f"method.{kind}.hyperparameters.advanced.train"
    assert message.startswith("train 'full' is not supported for jobs of several machines, and these have 2")
