"""Guide "Graders", details on grading tool calls: the printed grader over `sample.output_tools`."""

from typing import Any

from openai import OpenAI

from tests.conformance.helpers import GRADER_RUN, assert_documented, flags

GRADER: Any = {
    "type": "multi",
    "graders": {
        "function_name": {
            "name": "function_name",
            "type": "string_check",
            "input": "find_rooms",
            "reference": "{{sample.output_tools[0].function.name}}",
            "operation": "eq",
        },
        "arguments": {
            "name": "arguments",
            "type": "string_check",
            "input": '{"floor": "{{item.floor}}"}',
            "reference": "{{sample.output_tools[0].function.arguments}}",
            "operation": "eq",
        },
    },
    "calculate_output": "0.5 * function_name + 0.5 * arguments",
}


def test_the_printed_grader_is_valid() -> None:
    validated: Any = (
        OpenAI().fine_tuning.alpha.graders.validate(grader=GRADER).to_dict(warnings=False)["grader"]
    )

    assert validated.pop("name")
    assert validated == GRADER


def test_a_sample_without_a_call_is_reported_and_scores_zero() -> None:
    """`model_sample` is text, so there is no call to look at; the run says so in its flags."""
    run = OpenAI().fine_tuning.alpha.graders.run(grader=GRADER, item={"floor": "2"}, model_sample="Room 7.")

    assert_documented(run, GRADER_RUN)
    assert run.reward == 0.0
    assert flags(run.to_dict()) == {"invalid_variable_error"}
