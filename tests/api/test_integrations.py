from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from tests.api.conftest import House

JOBS = "/v1/fine_tuning/jobs"
WANDB = {"type": "wandb", "wandb": {"project": "colours", "tags": ["a", "b"]}}
MLFLOW = {"type": "mlflow", "mlflow": {"project": "colours", "name": "first"}}


@pytest.fixture
def enable(house: House) -> Callable[..., None]:
    """Enable some integrations, as REGRAFT_INTEGRATIONS does."""

    def enable(names: str) -> None:
        service = house.app.state.service
        settings = service.settings.model_copy(update={"integrations": names})
        house.app.state.service = replace(service, settings=settings)

    return enable


@pytest.mark.both_databases
def test_a_job_shows_its_integrations_as_openai_does(
    enable: Callable[..., None], create_job: Callable[..., dict[str, Any]]
) -> None:
    enable("wandb,mlflow")

    job = create_job(integrations=[WANDB, MLFLOW])

    ours = {"project": "colours", "name": None, "entity": None, "tags": ["a", "b"], "run_id": job["id"]}
    assert job["integrations"] == [
        {"type": "wandb", "wandb": ours},
        {"type": "mlflow", "mlflow": {"project": "colours", "name": "first", "tags": None}},
    ]
    assert "integrations" not in job["method"]["reinforcement"]


@pytest.mark.parametrize(("enabled", "known"), [("", "none is enabled"), ("wandb", "enabled: wandb")])
def test_what_the_operator_has_not_enabled_is_refused_by_name(
    api: TestClient,
    enable: Callable[..., None],
    job_request: Callable[..., dict[str, Any]],
    enabled: str,
    known: str,
) -> None:
    enable(enabled)
    asked = [WANDB, MLFLOW] if enabled else [MLFLOW]

    error = api.post(JOBS, json=job_request(integrations=asked)).json()["error"]

    assert error["param"] == f"integrations[{len(asked) - 1}].type"
    assert known in error["message"] and "REGRAFT_INTEGRATIONS" in error["message"]
    assert api.get(JOBS).json()["data"] == []


@pytest.mark.parametrize("none", [None, []])
def test_none_is_no_integration(create_job: Callable[..., dict[str, Any]], none: list[Any] | None) -> None:
    assert create_job(integrations=none)["integrations"] == []


@pytest.mark.both_databases
def test_the_request_of_a_job_creates_it_again(
    api: TestClient, enable: Callable[..., None], create_job: Callable[..., dict[str, Any]]
) -> None:
    enable("wandb,mlflow")
    job = create_job(integrations=[WANDB, MLFLOW])

    request = api.get(f"/v1/regraft/jobs/{job['id']}/request").json()
    again = api.post(JOBS, json=request).json()

    assert [one["type"] for one in again["integrations"]] == ["wandb", "mlflow"]
    assert again["integrations"][0]["wandb"]["run_id"] == again["id"] != job["id"]
    assert again["integrations"][1] == job["integrations"][1]


def test_openais_client_knows_them_again(
    house: House, enable: Callable[..., None], job_request: Callable[..., dict[str, Any]]
) -> None:
    """Its types name W&B alone; what they do not name goes there and back all the same."""
    enable("wandb,mlflow")
    client = OpenAI(
        api_key=house.key, base_url="http://testserver/v1", http_client=house.client(), max_retries=0
    )
    asked: Any = job_request(integrations=[WANDB, MLFLOW])

    job = client.fine_tuning.jobs.create(**asked)

    assert job.integrations is not None
    assert (job.integrations[0].wandb.project, job.integrations[0].wandb.tags) == ("colours", ["a", "b"])
    assert job.integrations[1].to_dict() == {
        "type": "mlflow",
        "mlflow": {"project": "colours", "name": "first", "tags": None},
    }
