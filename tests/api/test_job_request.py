from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database.tables import Job
from tests.api.conftest import GRADER, House

ENDPOINT = {"type": "endpoint", "name": "e", "url": "https://graders.example/", "headers": {"key": "secret"}}


@pytest.mark.both_databases
def test_what_is_shown_creates_the_same_job_again(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    asked = {"hyperparameters": {"n_epochs": 2, "advanced": {"sampling": {"group_size": 4}}}}
    job = create_job(reinforcement=asked, suffix="desk", metadata={"team": "a"}, seed=5)

    request = api.get(f"/v1/regraft/jobs/{job['id']}/request").json()
    again = api.post("/v1/fine_tuning/jobs", json=request).json()

    assert request["method"]["reinforcement"]["grader"] == GRADER
    different = {"id", "created_at", "eval_id", "queue"}
    assert {k: v for k, v in again.items() if k not in different} == {
        k: v for k, v in job.items() if k not in different
    }


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_a_job_without_a_grader_is_shown_and_created_again(
    api: TestClient, upload: Callable[..., str], method: str
) -> None:
    asked = {"model": "tiny", "training_file": upload(), "method": {"type": method}, "seed": 5}
    job = api.post("/v1/fine_tuning/jobs", json=asked).json()

    request = api.get(f"/v1/regraft/jobs/{job['id']}/request").json()
    again = api.post("/v1/fine_tuning/jobs", json=request).json()

    assert "validation_file" not in request
    assert (again["method"], again["hyperparameters"]) == (job["method"], job["hyperparameters"])


@pytest.mark.both_databases
def test_auto_stays_auto_when_the_run_has_resolved_it(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        session.query(Job).where(Job.id == job_id).one().resolved = {"n_epochs": 3, "total_steps": 9}

    shown = api.get(f"/v1/regraft/jobs/{job_id}/request").json()["method"]["reinforcement"]

    assert shown["hyperparameters"]["n_epochs"] == "auto"
    assert "total_steps" not in shown["hyperparameters"]["advanced"]


def test_secrets_are_masked_and_a_budget_is_kept(
    api: TestClient, house: House, create_job: Callable[..., dict[str, Any]]
) -> None:
    job_id = create_job()["id"]
    with house.database.write() as session:
        job = session.query(Job).where(Job.id == job_id).one()
        job.body = {"grader": ENDPOINT, "hyperparameters": {}}
        job.budget = {"gpu_seconds": 3600.0}

    request = api.get(f"/v1/regraft/jobs/{job_id}/request")

    assert "secret" not in request.text
    assert request.json()["budget"] == {"gpu_seconds": 3600.0}
