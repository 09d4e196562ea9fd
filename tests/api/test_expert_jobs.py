"""Jobs whose adapter is on the experts of a mixture, where they cannot be computed."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from core.settings import Settings
from tests.api.conftest import House
from tests.api.test_full import ADAPTER, JobRequest, of, opened, refusal, tuned
from tests.api.test_jobs import JOBS

LORA = "method.reinforcement.hyperparameters.advanced.lora"


def lora(**shape: Any) -> dict[str, Any]:
    return {"hyperparameters": {"advanced": {"lora": shape}}}


def with_fleet(house: House) -> Settings:
    return Settings(data_dir=house.folder, samplers={"tiny": ("http://sampler:8300",)}, samplers_key="secret")


@pytest.mark.parametrize("targets", ["experts", ["attention", "experts"], ["mlp.experts"]])
def test_a_fleet_has_no_slots_for_experts(house: House, job_request: JobRequest, targets: Any) -> None:
    with opened(house, with_fleet(house)) as api:
        param, message = refusal(api, job_request(lora(targets=targets)))
        supervised = job_request(method=of("supervised", {"lora": {"targets": targets}}))
        attention = job_request(lora(targets="attention"))

        assert (param, "sampled by a fleet" in message) == (f"{LORA}.targets", True)
        assert api.post(JOBS, json=supervised).status_code == 200  # it samples nothing
        assert api.post(JOBS, json=attention).status_code == 200


def test_nor_does_it_sample_a_job_that_trains_such_an_adapter_further(
    house: House, job_request: JobRequest
) -> None:
    tuned(house, ADAPTER, {"lora_targets": ["attention", "experts"]})

    with opened(house, with_fleet(house)) as api:
        assert refusal(api, job_request(model=ADAPTER))[0] == f"{LORA}.targets"


def test_a_larger_rank_on_top_of_an_adapter_on_experts_is_refused_at_creation(
    api: TestClient, house: House, job_request: JobRequest
) -> None:
    tuned(house, ADAPTER, {"lora_targets": "experts"})

    param, message = refusal(api, job_request(lora(rank=64), model=ADAPTER))

    assert param == f"{LORA}.rank"
    assert message == (
        f"'{ADAPTER}' has an adapter on experts, which is not trained further with a larger rank: leave lora.rank out."
    )
    assert api.post(JOBS, json=job_request(model=ADAPTER)).status_code == 200
