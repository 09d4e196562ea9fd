"""Guide "Graders", score model graders: the runnable sample."""

import os
from typing import Any

import requests

from tests.conformance.conftest import Judge
from tests.conformance.helpers import GRADER_RUN, TOKENS, assert_documented, flags

GRADER = {
    "type": "score_model",
    "name": "my_score_model",
    "input": [
        {"role": "system", "content": "Score how well the answer fits the reference."},
        {
            "role": "user",
            "content": "Reference: {{ item.reference_answer }}. Model answer: {{ sample.output_text }}",
        },
    ],
    "pass_threshold": 0.5,
    "model": "o4-mini-2025-04-16",
    "range": [0, 1],
    "sampling_params": {"max_completions_tokens": 32768, "top_p": 1, "reasoning_effort": "medium"},
}


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/fine_tuning/alpha/graders/{path}"
    response = requests.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_printed_grader_is_valid() -> None:
    assert post("validate", {"grader": GRADER}) == {"grader": GRADER}


def test_the_printed_run_is_scored_by_the_model(judge: Judge) -> None:
    run = post("run", {"grader": GRADER, "item": {"reference_answer": 1.0}, "model_sample": "0.9"})

    assert_documented(run, GRADER_RUN)
    assert not flags(run)
    asked = judge.requests[-1]
    said = asked["messages"][-1]["content"]
    assert said == "Reference: 1.0. Model answer: 0.9"
    assert run["reward"] == len(said) % 5 / 4
    assert run["metadata"]["sampled_model_name"] == "o4-mini-2025-04-16"
    assert_documented(run["model_grader_token_usage_per_model"], {"o4-mini-2025-04-16": TOKENS})
    assert asked["model"] == "o4-mini-2025-04-16"
    assert (asked["max_completion_tokens"], asked["top_p"], asked["reasoning_effort"]) == (32768, 1, "medium")


def test_the_model_is_asked_for_a_result_and_its_steps(judge: Judge) -> None:
    post("run", {"grader": GRADER, "item": {"reference_answer": "x"}, "model_sample": "y"})

    schema = judge.requests[-1]["response_format"]["json_schema"]["schema"]
    assert set(schema["required"]) == {"result", "steps"}
    assert schema["properties"]["result"]["type"] == "number"
    assert set(schema["properties"]["steps"]["items"]["required"]) == {"description", "conclusion"}
