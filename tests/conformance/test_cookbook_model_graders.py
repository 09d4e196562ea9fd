"""Cookbook "Exploring model graders for reinforcement fine-tuning": everything that it sends, by `requests`."""

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from openai import OpenAI

from tests.conformance.data import TEST, TRAIN
from tests.conformance.helpers import FILE, FINISHED_JOB, GRADER_RUN, JOB, assert_documented, flags, poll
from tests.present import present, untyped

MODEL_GRADER: dict[str, Any] = {
    "type": "score_model",
    "name": "judge_2",
    "input": [
        {"role": "system", "content": "Compare the answer with the reference."},
        {
            "role": "user",
            "content": "Reference Answer: {{item.reference_answer}}. Model's Answer: {{sample.output_text}}",
        },
    ],
    "pass_threshold": 0.75,
    "model": "gpt-4.1-2025-04-14",
    "range": [0, 1],
    "sampling_params": {"seed": 42, "temperature": 0},
}


def overlap(sample: "dict[str, Any]", item: "dict[str, Any]") -> float:
    from rapidfuzz import fuzz, utils

    score = fuzz.token_set_ratio(
        sample["output_text"], item["reference_answer"], processor=utils.default_process
    )
    return score / 100.0


def same(sample: "dict[str, Any]", item: "dict[str, Any]") -> float:
    return 1.0 if sample["output_text"] == item["reference_answer"] else 0.0


def payload(function: Callable[..., float]) -> dict[str, Any]:
    source = inspect.getsource(function).replace(function.__name__, "grade", 1)
    return {"type": "python", "source": source}


PYTHON_GRADERS = {
    "type": "multi",
    "graders": {
        "overlap": {"name": "overlap_grader", "image_tag": "2025-05-08", **payload(overlap)},
        "same": {"name": "same_grader", "image_tag": "2025-05-08", **payload(same)},
    },
    "calculate_output": "0.85 * overlap + 0.15 * same",
}


@pytest.fixture
def headers() -> dict[str, Any]:
    return {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


@pytest.fixture
def base() -> str:
    return os.environ["OPENAI_BASE_URL"]


def test_the_grader_of_two_python_functions_scores(base: str, headers: dict[str, Any]) -> None:
    item = {"messages": [{"role": "user", "content": "Color?"}], "reference_answer": "dark red"}
    run: Any = {"grader": PYTHON_GRADERS, "item": item, "model_sample": "red"}

    response = requests.post(f"{base}/fine_tuning/alpha/graders/run", json=run, headers=headers)

    assert response.status_code == 200, response.text
    assert_documented(response.json(), GRADER_RUN)
    assert not flags(response.json())
    assert response.json()["sub_rewards"] == {"overlap": 1.0, "same": 0.0}
    assert response.json()["reward"] == pytest.approx(0.85)


def test_the_model_grader_is_valid(base: str, headers: dict[str, Any]) -> None:
    response = requests.post(
        f"{base}/fine_tuning/alpha/graders/validate", json={"grader": MODEL_GRADER}, headers=headers
    )

    response.raise_for_status()
    assert response.json() == {"grader": MODEL_GRADER}


def upload(base: str, headers: dict[str, Any], path: Path) -> Any:
    with path.open("rb") as file:
        response = requests.post(
            f"{base}/files", headers=headers, files={"file": file}, data={"purpose": "fine-tune"}
        )
    response.raise_for_status()
    assert_documented(response.json(), FILE | {"filename": path.name, "purpose": "fine-tune"})
    return response.json()["id"]


@pytest.mark.slow
def test_files_job_and_model(base: str, headers: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(TRAIN)
    (tmp_path / "val.jsonl").write_bytes(TEST)
    job = {
        "training_file": upload(base, headers, tmp_path / "train.jsonl"),
        "validation_file": upload(base, headers, tmp_path / "val.jsonl"),
        "model": "o4-mini-2025-04-16",
        "suffix": "verifiable_01_gpt41_grader",
        "method": {
            "type": "reinforcement",
            "reinforcement": {
                "grader": MODEL_GRADER,
                "response_format": None,
                "hyperparameters": {
                    "compute_multiplier": 1.0,
                    "eval_samples": 3,
                    "eval_interval": 5,
                    "n_epochs": 5,
                    "reasoning_effort": "medium",
                },
            },
        },
        "seed": 42,
    }

    response = requests.post(f"{base}/fine_tuning/jobs", json=job, headers=headers)
    assert response.status_code == 200, response.text
    assert_documented(response.json(), JOB)
    job_id = response.json().get("id")
    data = poll(
        lambda: requests.get(f"{base}/fine_tuning/jobs/{job_id}", headers=headers).json(),
        lambda job: job["status"] in ("succeeded", "failed", "cancelled"),
    )

    assert_documented(data, FINISHED_JOB | {"seed": 42, "user_provided_suffix": job["suffix"]})
    asked = data["method"]["reinforcement"]["hyperparameters"]
    assert asked.items() >= job["method"]["reinforcement"]["hyperparameters"].items()
    assert f":{job['suffix']}:" in data["fine_tuned_model"]
    events = OpenAI().fine_tuning.jobs.list_events(job_id)
    assert {
        untyped(event.data)["step"] for event in events if "full_valid_mean_reward" in untyped(event.data)
    } >= {0, 5}


@pytest.mark.slow
def test_the_model_is_asked_to_grade_by_chat(inference: None) -> None:
    """The page's own check of a grader: chat with a schema, `seed` and `temperature` of the grader."""
    step = {
        "type": "object",
        "properties": {
            "description": {"type": "string", "description": "What is looked at."},
            "conclusion": {"type": "string", "description": "What follows."},
        },
        "required": ["description", "conclusion"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "description": "One after the other.", "items": step},
            "result": {"type": "number", "description": "From RANGE_MIN to RANGE_MAX."},
        },
        "required": ["steps", "result"],
        "additionalProperties": False,
    }
    response_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "float_score_classification", "strict": True, "schema": schema},
    }

    response = OpenAI(timeout=120).chat.completions.create(
        model="o4-mini-2025-04-16",
        messages=[
            {"role": "system", "content": "Grade."},
            {"role": "user", "content": "Reference Answer: a. Model's Answer: b"},
        ],
        seed=42,
        temperature=1,
        response_format=response_format,
    )

    message = response.choices[0]
    assert message.finish_reason == "length" or json.loads(present(message.message.content)).keys() == {
        "steps",
        "result",
    }
