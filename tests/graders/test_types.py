from typing import Any

import pytest

from graders.prompts import PromptTemplate, PromptTooLarge, sample_of
from graders.template import MAX_RENDERED
from graders.types import ErrorKind, Grade, Sample


def test_a_json_object_is_parsed_when_asked_for() -> None:
    assert Sample.from_text(' {"a": 1} ', parse_json=True).output_json == {"a": 1}


def test_json_is_left_alone_unless_asked_for() -> None:
    assert Sample.from_text('{"a": 1}').output_json is None


@pytest.mark.parametrize("text", ["42", "[1]", '"a"', "null", "{", "", '{"a": NaN}', '{"a": 1e999}'])
def test_what_is_not_a_json_object_has_no_output_json(text: str) -> None:
    assert Sample.from_text(text, parse_json=True).output_json is None


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a":' + "9" * 10_000 + "}"])
def test_hostile_json_is_only_not_json(text: str) -> None:
    assert Sample.from_text(text, parse_json=True).output_json is None


def test_the_namespace_has_the_fields_and_shapes_of_the_api_and_a_reason_for_missing_calls() -> None:
    assert Sample("hi", finish_reason="length").as_namespace() == {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "tool_calls": None},
                "finish_reason": "length",
            }
        ],
        "output_text": "hi",
        "output_json": None,
        "output_tools": [],
        "messages": None,
        "turns": None,
        "stop": None,
        "trace_id": None,
        "output_tools_error": None,
        "output_reasoning": "",
        "output_reasoning_summary": None,
        "output_audio": None,
    }


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_is_a_programming_error(score: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Grade(score)


@pytest.mark.parametrize("why", [{}, {"reason": "because"}, {"error": ErrorKind.other_error}])
def test_a_grade_without_a_score_must_say_why(why: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must say why"):
        Grade(None, **why)


def test_an_error_kind_is_the_flag_it_raises_in_the_response() -> None:
    assert f"{ErrorKind.model_grader_parse_error}" == "model_grader_parse_error"


def test_the_sample_of_a_row_has_its_calls_and_its_finish_reason() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    sample = sample_of({"output_text": '{"a": 1}', "output_tools": [call], "finish_reason": "length"})

    assert sample == Sample('{"a": 1}', output_json={"a": 1}, output_tools=(call,), finish_reason="length")
    assert sample.as_namespace()["output_tools_error"] is None


def test_calls_count_towards_the_size_of_messages_of_a_row() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "a" * MAX_RENDERED}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "hi"}]

    with pytest.raises(PromptTooLarge):
        PromptTemplate(reference=("messages",)).render({"messages": messages})
