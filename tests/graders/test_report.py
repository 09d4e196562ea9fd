import asyncio
import json
from typing import Any

import pytest

from graders.build import build
from graders.report import run_report
from graders.run import grade_all
from graders.spec import parse_grader
from graders.types import ErrorKind, Grade, Sample

# The live response of the API, field by field.
NO_ERRORS = {
    "formula_parse_error": False,
    "sample_parse_error": False,
    "sample_parse_error_details": None,
    "truncated_observation_error": False,
    "unresponsive_reward_error": False,
    "invalid_variable_error": False,
    "invalid_variable_error_details": None,
    "other_error": False,
    "python_grader_server_error": False,
    "python_grader_server_error_type": None,
    "python_grader_runtime_error": False,
    "python_grader_runtime_error_details": None,
    "model_grader_server_error": False,
    "model_grader_server_error_details": None,
    "model_grader_refusal_error": False,
    "model_grader_refusal_error_details": None,
    "model_grader_parse_error": False,
    "model_grader_parse_error_details": None,
    "model_grader_exceeded_max_tokens_error": False,
    "endpoint_grader_internal_error": False,
    "endpoint_grader_internal_error_details": None,
    "endpoint_grader_server_error": False,
    "endpoint_grader_server_error_details": None,
    "endpoint_grader_safety_check_error": False,
}


def check(reference: str) -> dict[str, Any]:
    return {
        "type": "string_check",
        "name": "check",
        "input": "{{sample.output_text}}",
        "reference": reference,
        "operation": "eq",
    }


EXACT = parse_grader(check("{{item.answer}}"))


def multi(**extra: object) -> Any:
    graders = {"acc": check("{{item.answer}}"), "fmt": check("{{sample.output_json.x}}")}
    return parse_grader(
        {"type": "multi", "name": "both", "graders": graders, "calculate_output": "acc + fmt", **extra}
    )


def report(spec: Any, text: str, item: dict[str, Any]) -> dict[str, Any]:
    [grade] = asyncio.run(grade_all(build(spec), [(Sample(text), item)]))
    return run_report(spec, grade)


def test_a_single_grader_is_reported_in_the_shape_of_the_api() -> None:
    grade = Grade(1.0, "expected '42', got '42'", seconds=0.25)

    assert run_report(EXACT, grade) == {
        "reward": 1.0,
        "metadata": {
            "name": "check",
            "type": "string_check",
            "errors": NO_ERRORS,
            "execution_time": 0.25,
            "scores": {},
            "token_usage": None,
            "sampled_model_name": None,
            "reason": "expected '42', got '42'",
            "output": "",
            "environment": None,
        },
        "sub_rewards": {},
        "model_grader_token_usage_per_model": {},
    }


def test_all_error_keys_are_there_in_the_order_of_the_api() -> None:
    assert list(run_report(EXACT, Grade(1.0))["metadata"]["errors"]) == list(NO_ERRORS)
    assert len(NO_ERRORS) == 24


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_an_ungraded_sample_earns_nothing_and_raises_one_flag(kind: Any) -> None:
    body = run_report(EXACT, Grade(None, "because", kind))

    errors = body["metadata"]["errors"]
    assert body["reward"] == 0.0
    assert [key for key, value in errors.items() if value is True] == [kind]
    assert errors.get(f"{kind}_details", "because") == "because"


def test_the_details_say_what_was_missing() -> None:
    body = report(EXACT, "42", {})

    assert body["metadata"]["errors"]["invalid_variable_error_details"] == "item.answer is missing"
    assert body["metadata"]["reason"] == "item.answer is missing"


def test_a_multi_reports_each_sub_grader_twice_as_clients_look_in_both_places() -> None:
    spec = parse_grader(
        {
            "type": "multi",
            "name": "both",
            "graders": {"a": check("{{item.a}}"), "b": check("{{item.b}}")},
            "calculate_output": "a + b",
        }
    )

    body = report(spec, "42", {"a": "42", "b": "43"})

    assert body["reward"] == 1.0
    assert body["metadata"]["scores"] == body["sub_rewards"] == {"a": 1.0, "b": 0.0}


def test_a_multi_raises_the_flags_of_all_its_sub_graders() -> None:
    """Neither sub-grader could judge, each for its own reason."""
    body = report(multi(), "not json", {})

    errors = body["metadata"]["errors"]
    assert {key for key, value in errors.items() if value is True} == {
        "invalid_variable_error",
        "sample_parse_error",
    }
    assert errors["sample_parse_error_details"].startswith("fmt: ")


def test_where_the_whole_and_a_part_failed_alike_the_details_are_those_of_the_whole() -> None:
    part = Grade(None, "item.x is missing", ErrorKind.invalid_variable_error)
    whole = Grade(None, "acc could not be judged", ErrorKind.invalid_variable_error, {"acc": part})

    errors = run_report(multi(), whole)["metadata"]["errors"]
    assert errors["invalid_variable_error_details"] == "acc could not be judged"


def test_a_sub_grader_that_could_not_judge_claims_no_score() -> None:
    body = report(multi(), "42", {"answer": "42"})

    assert body["reward"] == 0.0
    assert body["metadata"]["scores"] == {"acc": 1.0, "fmt": None}
    assert body["sub_rewards"] == {"acc": 1.0}


def test_an_invalid_grade_counts_as_the_reward_and_the_flag_stays_up() -> None:
    body = report(multi(invalid_grade=-0.5), "42", {"answer": "42"})

    assert body["reward"] == 0.5
    assert body["sub_rewards"] == {"acc": 1.0, "fmt": -0.5}
    assert body["metadata"]["errors"]["sample_parse_error"] is True


def test_the_report_is_json() -> None:
    body = report(multi(), "not json", {})

    assert json.loads(json.dumps(body, allow_nan=False)) == body
