"""Reference, run a grader: failures of a grader are answers with status 200, reward 0 and a flag."""

import os
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.conformance.data import EXACT
from tests.conformance.helpers import ERROR, GRADER_RUN, assert_documented, flags


def python(source: str) -> Any:
    return {"type": "python", "name": "p", "source": source}


@pytest.mark.parametrize(
    ("grader", "sample", "flag"),
    [
        (EXACT | {"input": "{{sample.output_json.a}}"}, "no json", "sample_parse_error"),
        (EXACT | {"input": "{{sample.output_json.b}}"}, '{"a": 1}', "invalid_variable_error"),
        (EXACT | {"reference": "{{item.b}}"}, "x", "invalid_variable_error"),
        (
            python("def grade(sample, item):\n    raise ValueError('odd')\n"),
            "x",
            "python_grader_runtime_error",
        ),
        (
            {"type": "multi", "graders": {"a": EXACT}, "calculate_output": "1 / (a - a)"},
            "x",
            "other_error",
        ),
    ],
)
def test_a_grader_that_fails_is_an_answer(grader: Any, sample: str, flag: str) -> None:
    run = OpenAI().fine_tuning.alpha.graders.run(
        grader=grader, item={"reference_answer": "x"}, model_sample=sample
    )

    assert_documented(run, GRADER_RUN)
    assert (run.reward, flags(run.to_dict())) == (0.0, {flag})


def test_the_clients_names_for_the_errors_are_filled() -> None:
    run = OpenAI().fine_tuning.alpha.graders.run(
        grader=python("def grade(sample, item):\n    raise ValueError('odd')\n"), model_sample="x"
    )

    errors = run.metadata.errors
    assert errors.python_grader_runtime_error is True
    assert errors.python_grader_runtime_error_details is not None
    assert "odd" in errors.python_grader_runtime_error_details
    assert errors.api_model_grader_server_error is False
    assert errors.api_model_grader_refusal_error is False
    assert errors.api_model_grader_parse_error is False
    assert run.api_model_grader_token_usage_per_model == {}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"type": "shell"}, "grader.type", "invalid_value"),
        ({"operation": "matches"}, "grader.operation", "invalid_value"),
        ({"input": 5}, "grader.input", "invalid_type"),
        ({"speed": 5}, "grader.speed", "unknown_parameter"),
    ],
)
def test_a_malformed_grader_is_a_bad_request(change: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        OpenAI().fine_tuning.alpha.graders.validate(grader=EXACT | change)

    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.type == "invalid_request_error"


def test_a_grader_that_is_no_object_is_a_bad_request() -> None:
    response = httpx.post(
        f"{os.environ['OPENAI_BASE_URL']}/fine_tuning/alpha/graders/run",
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        json={"grader": "exact", "model_sample": "x"},
    )

    assert response.status_code == 400
    assert_documented(response.json(), ERROR)
    assert response.json()["error"]["param"] == "grader"
