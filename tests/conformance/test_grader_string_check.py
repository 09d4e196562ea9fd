"""Guide "Graders", string check graders: every operation."""

from typing import Any

import pytest
from openai import OpenAI

from tests.conformance.helpers import GRADER_RUN, assert_documented, flags


@pytest.mark.parametrize(
    ("operation", "sample", "reward"),
    [
        ("eq", "Oslo", 1),
        ("eq", "oslo", 0),
        ("ne", "oslo", 1),
        ("ne", "Oslo", 0),
        ("like", "It is Oslo.", 1),
        ("like", "It is oslo.", 0),
        ("ilike", "It is oslo.", 1),
        ("ilike", "It is Bergen.", 0),
    ],
)
def test_an_operation_scores_one_or_zero(operation: str, sample: str, reward: int) -> None:
    client = OpenAI()
    grader: Any = {
        "type": "string_check",
        "name": "city",
        "operation": operation,
        "input": "{{sample.output_text}}",
        "reference": "{{item.city}}",
    }

    validated = client.fine_tuning.alpha.graders.validate(grader=grader)
    run = client.fine_tuning.alpha.graders.run(grader=grader, item={"city": "Oslo"}, model_sample=sample)

    assert validated.to_dict() == {"grader": grader}
    assert_documented(run, GRADER_RUN)
    assert (run.reward, run.metadata.name, run.metadata.type) == (reward, "city", "string_check")
    assert not flags(run.to_dict())
