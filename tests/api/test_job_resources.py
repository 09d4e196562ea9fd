"""GPUs and nodes that a job chooses: up to what the operator allows, and what follows from them."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from core.database.tables import Job
from core.hardware import GpuClass, JobSizes
from core.settings import Settings
from tests import factories
from tests.api.conftest import GRADER, MODELS, House
from tests.api.test_budget import ROW
from tests.api.test_full import full, of, opened, refusal
from tests.api.test_jobs import JOBS
from tests.hardware import hardware_file

JobRequest = Callable[..., dict[str, Any]]
SIZES = JobSizes(gpus=2, max_gpus=8, max_nodes=4)


@pytest.fixture
def sized(house: House) -> Settings:
    """Jobs of the default class have 2 GPUs, of which 1 only samples, and may choose up to 8 on 4 nodes."""
    classes = {"cpu": GpuClass(ranks=1, sizes=SIZES)}
    file = hardware_file(house.folder, classes, price_per_gpu_second=0.5)
    return Settings(data_dir=house.folder, hardware_file=file)


def test_a_job_has_the_gpus_and_nodes_that_it_chose_and_shows_them(
    house: House, sized: Settings, job_request: JobRequest
) -> None:
    with opened(house, sized) as api:
        job = api.post(JOBS, json=job_request(resources={"gpus": 8, "nodes": 2})).json()
        plain = api.post(JOBS, json=job_request(resources=None)).json()
        read = api.get(f"{JOBS}/{job['id']}").json()

    assert read["resources"] == job["resources"] == {"gpus": 8, "nodes": 2}
    assert plain["resources"] == {"gpus": None, "nodes": None}
    with house.database.read() as session:
        assert {(one.gpus, one.nodes) for one in session.query(Job)} == {(8, 2), (None, None)}


def test_what_a_job_shows_can_be_sent_again(house: House, sized: Settings, job_request: JobRequest) -> None:
    with opened(house, sized) as api:
        shown = api.post(JOBS, json=job_request(resources={"gpus": 4})).json()["resources"]

        assert api.post(JOBS, json=job_request(resources=shown)).json()["resources"] == shown


@pytest.mark.parametrize(
    ("chosen", "param", "message"),
    [
        (
            {"gpus": 9},
            "resources.gpus",
            "'resources.gpus' is 9, and jobs of the class 'cpu' have 2 to 8 GPUs on each node, of which 1 only sample.",
        ),
        (
            {"gpus": 1},
            "resources.gpus",
            "'resources.gpus' is 1, and jobs of the class 'cpu' have 2 to 8 GPUs on each node, of which 1 only sample.",
        ),
        (
            {"nodes": 5},
            "resources.nodes",
            "'resources.nodes' is 5, and jobs of the class 'cpu' have at most 4.",
        ),
    ],
)
def test_more_than_the_operator_allows_is_refused(
    house: House, sized: Settings, job_request: JobRequest, chosen: dict[str, int], param: str, message: str
) -> None:
    with opened(house, sized) as api:
        assert refusal(api, job_request(resources=chosen)) == (param, message)


def test_jobs_of_a_class_without_a_choice_cannot_choose(api: TestClient, job_request: JobRequest) -> None:
    param, message = refusal(api, job_request(resources={"gpus": 1}))

    assert param == "resources"
    assert message.startswith("Jobs of the class 'cpu' have the GPUs of its workers")


@pytest.mark.parametrize("kind", ["supervised", "dpo", "reinforcement"])
def test_all_weights_are_trained_on_one_node(
    house: House, sized: Settings, job_request: JobRequest, kind: str
) -> None:
    more = {"grader": GRADER} if kind == "reinforcement" else {}
    request = job_request(method=of(kind, full()["hyperparameters"]["advanced"], **more))

    with opened(house, sized) as api:
        param, message = refusal(api, request | {"resources": {"nodes": 2}})
        alone = api.post(JOBS, json=request | {"resources": {"gpus": 8}})

    assert (param, alone.status_code) == ("resources.nodes", 200)
    assert message.startswith("train 'full' is for one node, and the job has 2")


def test_an_engine_of_the_model_needs_its_gpus(house: House, job_request: JobRequest) -> None:
    file = hardware_file(house.folder, {"cpu": GpuClass(ranks=2, sizes=SIZES)})
    settings = Settings(data_dir=house.folder, hardware_file=file)
    parallel = {"tiny": MODELS["tiny"].model_copy(update={"tensor_parallel": 4})}
    with opened(house, settings, parallel) as api:
        param, message = refusal(api, job_request(resources={"gpus": 2}))

        assert api.post(JOBS, json=job_request(resources={"gpus": 4})).status_code == 200
    assert (param, message) == (
        "resources.gpus",
        "'resources.gpus' is 2, and an engine of 'tiny' needs 4 GPUs (tensor_parallel).",
    )


def test_the_estimate_is_of_jobs_with_as_many_gpus_and_of_their_price(
    house: House, sized: Settings, upload: Callable[..., str], job_request: JobRequest
) -> None:
    files = {"training_file": upload(ROW * 10), "validation_file": upload(ROW * 5, name="valid.jsonl")}
    with house.database.write() as session:
        for gpus, seconds in ((None, 40.0), (8, 10.0)):
            job = factories.job(session, house.project, gpus=gpus, started_at=1)
            factories.step(session, job, 1, tokens=400, seconds=seconds, eval=0.0, gpus=gpus or 2)

    with opened(house, sized) as api:
        answers = [
            api.post("/v1/regraft/estimate", json=job_request(resources=chosen, **files)).json()
            for chosen in ({}, {"gpus": 2}, {"gpus": 8}, {"gpus": 8, "nodes": 2})
        ]

    plain, equal, large, unknown = answers
    assert plain["estimate"] == equal["estimate"]
    ratio = (
        plain["estimate"]["remaining_seconds"]["expected"]
        / large["estimate"]["remaining_seconds"]["expected"]
    )
    assert ratio == pytest.approx(4.0)
    assert large["estimate"]["cost"]["expected"] == pytest.approx(plain["estimate"]["cost"]["expected"])
    assert unknown["estimate"] is None
    assert unknown["reason"] == "no job of this model has run here yet with 8 GPUs on each of 2 nodes"
