"""Guide "Graders", templating: what stands between the braces."""

from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning.alpha.grader_run_response import GraderRunResponse

from tests.conformance.helpers import flags

ITEM = {
    "word": "tree",
    "number": 7,
    "nested": {"list": ["first", {"deep": "second"}]},
    "messages": [{"role": "user", "content": "Hi"}],
}
SAMPLE = '{"label": "tree", "tags": ["a", "b"]}'


def run(text: str, reference: str) -> GraderRunResponse:
    grader: Any = {
        "type": "string_check",
        "name": "t",
        "operation": "eq",
        "input": text,
        "reference": reference,
    }
    return OpenAI().fine_tuning.alpha.graders.run(grader=grader, item=ITEM, model_sample=SAMPLE)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{item.word}}", "tree"),
        ("{{ item.word }}", "tree"),
        ("a {{item.word}} and a {{item.word}}", "a tree and a tree"),
        ("{{item.number}}", "7"),
        ("{{item.nested.list[0]}}", "first"),
        ("{{item.nested.list[1].deep}}", "second"),
        ("{{item.messages[0].content}}", "Hi"),
        ("{{sample.output_text}}", SAMPLE),
        ("{{sample.output_json.label}}", "tree"),
        ("{{sample.output_json.tags[1]}}", "b"),
        ("{{sample.choices[0].message.content}}", SAMPLE),
        ("{{sample.choices[0].message.role}}", "assistant"),
    ],
)
def test_a_template_is_replaced_by_its_value(template: str, text: str) -> None:
    graded = run(template, text)

    assert (graded.reward, flags(graded.to_dict())) == (1.0, set())


def test_a_variable_that_is_not_there_is_reported() -> None:
    graded = run("{{item.absent}}", "x")

    assert (graded.reward, flags(graded.to_dict())) == (0.0, {"invalid_variable_error"})


@pytest.mark.parametrize("template", ["{{word}}", "{{row.word}}"])
def test_there_are_two_namespaces(template: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        run(template, "x")

    assert refused.value.param == "grader.input"
