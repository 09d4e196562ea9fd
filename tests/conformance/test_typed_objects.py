"""Client types: every grader of `openai.types.graders` as an object, and its answer as the same object."""

import warnings

import pytest
from openai import OpenAI
from openai.types.graders import (
    LabelModelGrader,
    PythonGrader,
    ScoreModelGrader,
    StringCheckGrader,
    TextSimilarityGrader,
)

from tests.present import untyped

MESSAGES = [{"role": "user", "content": "How good is {{sample.output_text}}?"}]
GRADERS = [
    StringCheckGrader(
        type="string_check", name="s", operation="like", input="{{sample.output_text}}", reference="a"
    ),
    TextSimilarityGrader(
        type="text_similarity",
        name="t",
        evaluation_metric="bleu",
        input="{{sample.output_text}}",
        reference="a",
    ),
    PythonGrader(type="python", name="p", source="def grade(sample, item):\n    return 1.0\n"),
    ScoreModelGrader(type="score_model", name="m", model="o3-mini-2025-01-31", input=MESSAGES, range=[0, 2]),
]


@pytest.mark.parametrize("grader", GRADERS, ids=lambda grader: grader.type)
def test_a_grader_comes_back_as_it_went(
    grader: StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the client warns of an answer that is not of the type it claims
        answer = OpenAI().fine_tuning.alpha.graders.validate(grader=untyped(grader))
        assert answer.grader is not None
        shown = answer.grader.to_dict()

    assert type(answer.grader) is type(grader)
    assert shown == grader.to_dict()


def test_a_label_grader_comes_back_as_it_went() -> None:
    """The client's union of graders lacks it, so the answer has its data under another class."""
    grader = LabelModelGrader(
        type="label_model",
        name="l",
        model="o3-mini-2025-01-31",
        input=MESSAGES,
        labels=["good", "bad"],
        passing_labels=["good"],
    )

    answer = OpenAI().fine_tuning.alpha.graders.validate(grader=untyped(grader))

    assert answer.to_dict(warnings=False) == {"grader": grader.to_dict()}
