"""Guide "Graders", text similarity graders: every metric that reinforcement fine-tuning has."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.conformance.helpers import GRADER_RUN, assert_documented, flags

METRICS = ["fuzzy_match", "bleu", "gleu", "meteor", "rouge_l", *(f"rouge_{n}" for n in range(1, 6))]
TEXT = "a small boat crossed the wide river at noon today"


def grader(metric: str) -> Any:
    return {
        "type": "text_similarity",
        "name": "close",
        "input": "{{sample.output_text}}",
        "reference": "{{item.reference}}",
        "pass_threshold": 0.8,
        "evaluation_metric": metric,
    }


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_is_near_one_for_the_same_text_and_less_for_another(metric: str) -> None:
    client = OpenAI()
    run = client.fine_tuning.alpha.graders.run

    validated = client.fine_tuning.alpha.graders.validate(grader=grader(metric))
    same = run(grader=grader(metric), item={"reference": TEXT}, model_sample=TEXT)
    near = run(grader=grader(metric), item={"reference": TEXT}, model_sample=TEXT.replace("wide", "deep"))
    other = run(grader=grader(metric), item={"reference": TEXT}, model_sample="no word in common")

    assert validated.to_dict() == {"grader": grader(metric)}
    assert_documented(same, GRADER_RUN)
    assert not flags(same.to_dict())
    assert same.reward == pytest.approx(1.0, abs=0.01)
    assert 0 <= other.reward < near.reward < same.reward


def test_cosine_is_for_evals_only() -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        OpenAI().fine_tuning.alpha.graders.validate(grader=grader("cosine"))

    assert refused.value.param == "grader.evaluation_metric"
