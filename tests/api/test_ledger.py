"""The ledger of a job, as JSON and CSV, and beside that of another job."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database.tables import Job
from tests import factories
from tests.api.conftest import House

pytestmark = pytest.mark.both_databases


@pytest.fixture
def job_id(house: House, create_job: Callable[..., dict[str, Any]]) -> str:
    """A job of two steps: a validation of 3 seconds, then 8 of sampling and 1 of the update."""
    created: str = create_job()["id"]
    with house.database.write() as session:
        row = session.query(Job).where(Job.id == created).one()
        row.usage = {"unused_tokens": 20}
        factories.step(session, row, 0, tokens=0, timing={"step": {"eval": 3.0, "full_iteration": 3.0}})
        step = {"sampling": 8.0, "training": 1.0, "waiting": 5.0, "full_iteration": 14.0}
        tokens = {"learned_tokens": 60, "zero_variance_tokens": 20}
        factories.step(session, row, 1, tokens=80, timing={"step": step}, **tokens)
    return created


def test_the_ledger_says_what_the_tokens_and_the_time_of_a_job_taught(api: TestClient, job_id: str) -> None:
    found = api.get(f"/v1/regraft/jobs/{job_id}/ledger").json()

    buckets = {one["bucket"]: one for one in found["buckets"]}
    assert (found["tokens"], found["gpu_seconds"], found["cost"]) == (100, 12.0, None)
    assert found["waiting_seconds"] == 5.0
    assert buckets["learned"] == {
        "bucket": "learned",
        "title": "Learned",
        "tokens": 60,
        "tokens_percent": 60.0,
        "gpu_seconds": 7.0,
        "time_percent": 58.3,
        "cost": None,
    }
    assert (buckets["validation"]["gpu_seconds"], buckets["unused"]["tokens"]) == (3.0, 20)
    assert found["steps"] == [
        {"step": 0, "tokens": {}, "gpu_seconds": {"validation": 3.0}},
        {
            "step": 1,
            "tokens": {"learned": 60, "zero_variance": 20},
            "gpu_seconds": {"learned": 7.0, "zero_variance": 2.0},
        },
    ]
    in_all = api.get(f"/v1/regraft/jobs/{job_id}/ledger", params={"steps": False}).json()
    assert in_all == found | {"steps": []}
    for part in ("tokens_percent", "time_percent"):
        assert sum(round(10 * one[part]) for one in found["buckets"]) == 1000


def test_the_ledger_has_costs_where_a_price_is_set(priced: TestClient, job_id: str) -> None:
    found = priced.get(f"/v1/regraft/jobs/{job_id}/ledger").json()

    assert found["cost"] == {"amount": 0.12, "currency": "EUR"}
    assert sum(one["cost"]["amount"] for one in found["buckets"]) == pytest.approx(0.12)


def test_the_ledger_is_downloaded_as_csv(api: TestClient, job_id: str) -> None:
    answer = api.get(f"/v1/regraft/jobs/{job_id}/ledger/download")

    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert f'filename="{job_id}-ledger.csv"' in answer.headers["content-disposition"]
    assert answer.text.splitlines() == [
        "step,bucket,tokens,gpu_seconds,cost,currency",
        "0,validation,0,3.0,,",
        "1,learned,60,7.0,,",
        "1,zero_variance,20,2.0,,",
        ",unused,20,0.0,,",
    ]


def test_a_job_without_a_step_has_an_empty_ledger(
    api: TestClient, create_job: Callable[..., dict[str, Any]]
) -> None:
    found = api.get(f"/v1/regraft/jobs/{create_job()['id']}/ledger").json()

    assert (found["tokens"], found["gpu_seconds"], found["steps"]) == (0, 0.0, [])
    assert {one["time_percent"] for one in found["buckets"]} == {0.0}


def test_a_comparison_of_jobs_has_their_ledgers(
    api: TestClient, job_id: str, create_job: Callable[..., dict[str, Any]]
) -> None:
    other = create_job()["id"]

    jobs = api.get(f"/v1/regraft/jobs/{job_id}/compare", params={"other": other}).json()["jobs"]

    taught = [next(one for one in job["ledger"] if one["bucket"] == "learned") for job in jobs]
    assert [one["tokens"] for one in taught] == [60, 0]


@pytest.mark.parametrize("path", ["ledger", "ledger/download"])
def test_the_ledger_of_anothers_job_is_not_found(house: House, job_id: str, path: str) -> None:
    refused = house.client(house.other_key).get(f"/v1/regraft/jobs/{job_id}/{path}")

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "fine_tune_not_found")
