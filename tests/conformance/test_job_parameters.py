"""Reference, create a job: every parameter of its own, and the refusals that name them."""

from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning import ReinforcementHyperparameters, ReinforcementMethod
from openai.types.fine_tuning.fine_tuning_job import FineTuningJob
from openai.types.graders import StringCheckGrader

from tests.conformance.data import EXACT, TEST, TRAIN
from tests.conformance.helpers import NEW_JOB, assert_documented
from tests.present import untyped


@pytest.fixture(scope="module")
def files(environment: None) -> list[Any]:
    client = OpenAI()
    return [client.files.create(file=("rows.jsonl", rows), purpose="fine-tune").id for rows in (TRAIN, TEST)]


def create(files: list[Any], **changes: Any) -> FineTuningJob:
    client = OpenAI()
    hyperparameters = changes.pop("hyperparameters", {})
    arguments = {
        "model": "o4-mini",
        "training_file": files[0],
        "validation_file": files[1],
        "method": {
            "type": "reinforcement",
            "reinforcement": {"grader": EXACT, "hyperparameters": hyperparameters},
        },
    }
    job = client.fine_tuning.jobs.create(**arguments | changes)
    client.fine_tuning.jobs.cancel(job.id)
    return job


def test_the_defaults_are_shown(files: list[Any]) -> None:
    job = create(files)

    assert_documented(job, NEW_JOB)
    shown = untyped(job.to_dict()["method"])["reinforcement"]["hyperparameters"]
    assert (
        shown.items()
        >= {
            "batch_size": "auto",
            "compute_multiplier": "auto",
            "eval_interval": "auto",
            "eval_samples": "auto",
            "learning_rate_multiplier": "auto",
            "n_epochs": "auto",
            "reasoning_effort": "default",
        }.items()
    )


def test_a_dumped_object_of_the_clients_types_may_be_sent(files: list[Any]) -> None:
    """model_dump() writes null for all that was not set."""
    grader = StringCheckGrader.model_validate(EXACT)
    hyperparameters = ReinforcementHyperparameters(n_epochs=1)
    method = ReinforcementMethod(grader=grader, hyperparameters=hyperparameters)
    bare = ReinforcementMethod(grader=grader)

    job = create(files, method={"type": "reinforcement", "reinforcement": method.model_dump()})
    assert job.method is not None
    assert job.method.reinforcement is not None
    assert job.method.reinforcement.hyperparameters is not None
    assert job.method.reinforcement is not None
    assert job.method.reinforcement.hyperparameters.n_epochs == 1
    assert job.method.reinforcement.hyperparameters.batch_size == "auto"
    job = create(files, method={"type": "reinforcement", "reinforcement": bare.model_dump()})
    assert job.method is not None
    assert job.method.reinforcement is not None
    assert job.method.reinforcement.hyperparameters is not None
    assert job.method.reinforcement.hyperparameters.n_epochs == "auto"


def test_everything_that_is_set_comes_back(files: list[Any]) -> None:
    metadata = {f"key{n}": "v" * 512 for n in range(16)}
    hyperparameters = {
        "batch_size": 2,
        "compute_multiplier": 1.5,
        "eval_interval": 3,
        "eval_samples": 2,
        "learning_rate_multiplier": 0.5,
        "n_epochs": 4,
        "reasoning_effort": "high",
    }

    job = create(files, hyperparameters=hyperparameters, suffix="my-model", seed=7, metadata=metadata)

    assert_documented(job, NEW_JOB | {"seed": 7, "user_provided_suffix": "my-model", "metadata": metadata})
    assert (
        untyped(job.to_dict()["method"])["reinforcement"]["hyperparameters"].items()
        >= hyperparameters.items()
    )


@pytest.mark.parametrize("effort", ["default", "low", "medium", "high"])
def test_every_effort_is_accepted(files: list[Any], effort: str) -> None:
    job = create(files, hyperparameters={"reasoning_effort": effort})

    assert untyped(job.to_dict()["method"])["reinforcement"]["hyperparameters"]["reasoning_effort"] == effort


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"suffix": "x" * 65}, "suffix"),
        ({"seed": -1}, "seed"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"hyperparameters": {"batch_size": 257}}, "method.reinforcement.hyperparameters.batch_size"),
        ({"hyperparameters": {"n_epochs": 0}}, "method.reinforcement.hyperparameters.n_epochs"),
        ({"hyperparameters": {"n_epoch": 1}}, "method.reinforcement.hyperparameters.n_epoch"),
        (
            {"hyperparameters": {"reasoning_effort": "huge"}},
            "method.reinforcement.hyperparameters.reasoning_effort",
        ),
        ({"method": {"type": "reinforcement"}}, "method.reinforcement"),
        ({"extra_body": {"test_file": "file-1"}}, "test_file"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_parameter(
    files: list[Any], changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(files, **changes)

    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_an_unknown_model_and_file_are_not_taken(files: list[Any]) -> None:
    with pytest.raises(openai.NotFoundError) as model:
        create(files, model="gpt-9")
    assert model.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as file:
        create(files, training_file="file-abc123")
    assert (file.value.status_code, file.value.param) == (400, "training_file")
