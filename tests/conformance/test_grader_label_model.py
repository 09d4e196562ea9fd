"""Guide "Graders", label model graders: the runnable sample, at top level, and as the grader of a job."""

import os
from typing import Any

import requests
from openai import OpenAI

from tests.conformance.conftest import Judge
from tests.conformance.data import TEST, TRAIN
from tests.conformance.helpers import GRADER_RUN, NEW_JOB, assert_documented, flags
from tests.present import untyped

GRADER = {
    "type": "label_model",
    "name": "my_label_model",
    "input": [
        {"role": "system", "content": "You sort answers."},
        {"role": "user", "content": "Is this good or bad: {{ sample.output_text }}"},
    ],
    "passing_labels": ["good"],
    "labels": ["good", "bad"],
    "model": "o3-mini-2024-01-31",
    "sampling_params": {"max_tokens": 32768, "top_p": 1, "seed": 42, "reasoning_effort": "medium"},
}


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"bearer {os.environ['OPENAI_API_KEY']}"}  # in lower case, as printed
    url = f"{os.environ['OPENAI_BASE_URL']}/fine_tuning/alpha/graders/{path}"
    response = requests.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_printed_grader_is_valid() -> None:
    grader = post("validate", {"grader": GRADER})["grader"]

    assert grader.items() >= {**GRADER, "sampling_params": grader["sampling_params"]}.items()


def test_the_printed_run_passes_or_fails_by_the_label(judge: Judge) -> None:
    runs = [post("run", {"grader": GRADER, "item": {}, "model_sample": text}) for text in ("0.9", "0.99")]

    for run in runs:
        assert_documented(run, GRADER_RUN)
        assert not flags(run)
        assert run["metadata"]["type"] == "label_model"
    assert {run["reward"] for run in runs} == {0.0, 1.0}
    asked = judge.requests[-1]
    assert (asked["seed"], asked["top_p"], asked["reasoning_effort"]) == (42, 1, "medium")
    assert asked["max_completion_tokens"] == 32768


def test_a_job_takes_it_as_its_grader() -> None:
    client = OpenAI()
    files = [client.files.create(file=("rows.jsonl", rows), purpose="fine-tune").id for rows in (TRAIN, TEST)]

    job = client.fine_tuning.jobs.create(
        model="o4-mini-2025-04-16",
        training_file=files[0],
        validation_file=files[1],
        method=untyped({"type": "reinforcement", "reinforcement": {"grader": GRADER}}),
    )
    client.fine_tuning.jobs.cancel(job.id)

    assert_documented(job, NEW_JOB)
    grader = untyped(job.to_dict(warnings=False)["method"])["reinforcement"]["grader"]
    assert grader.items() >= {**GRADER, "sampling_params": grader["sampling_params"]}.items()
