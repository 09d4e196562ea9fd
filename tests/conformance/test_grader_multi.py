"""Guide "Graders", multigraders: the example over two JSON fields, and the language of its formula."""

import math
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import OpenAI

from tests.conformance.data import EXACT
from tests.conformance.helpers import GRADER_RUN, assert_documented, flags
from tests.present import untyped

if TYPE_CHECKING:
    from _pytest.approx import Approx

NAME = {
    "name": "name_grader",
    "type": "text_similarity",
    "input": "{{sample.output_json.name}}",
    "reference": "{{item.name}}",
    "evaluation_metric": "fuzzy_match",
    "pass_threshold": 0.9,
}
EMAIL = {
    "name": "email_grader",
    "type": "string_check",
    "input": "{{sample.output_json.email}}",
    "reference": "{{item.email}}",
    "operation": "eq",
}
GRADER: Any = {
    "type": "multi",
    "graders": {"name": NAME, "email": EMAIL},
    "calculate_output": "(name + email) / 2",
}
ITEM = {"name": "Grace Hopper", "email": "grace@example.com"}


def test_the_printed_grader_is_valid() -> None:
    grader: Any = OpenAI().fine_tuning.alpha.graders.validate(grader=GRADER).to_dict(warnings=False)["grader"]

    assert grader.pop("name")
    assert grader == GRADER


@pytest.mark.parametrize(
    ("sample", "name", "email"),
    [
        ('{"name": "Grace Hopper", "email": "grace@example.com"}', 1.0, 1.0),
        ('{"name": "Grace Hoper", "email": "grace@example.com"}', pytest.approx(0.957, abs=0.02), 1.0),
        ('{"name": "Grace Hopper", "email": "g@example.com"}', 1.0, 0.0),
    ],
)
def test_a_sample_scores_the_mean_of_its_fields(
    sample: str, name: "float | Approx[float]", email: float
) -> None:
    run = OpenAI().fine_tuning.alpha.graders.run(grader=GRADER, item=ITEM, model_sample=sample)

    assert_documented(run, GRADER_RUN)
    assert not flags(run.to_dict())
    assert run.sub_rewards == {"name": name, "email": email}
    assert run.metadata.scores == run.sub_rewards
    rewards = untyped(run.sub_rewards)
    assert run.reward == pytest.approx((rewards["name"] + rewards["email"]) / 2)


def test_a_list_of_graders_goes_by_their_names() -> None:
    """The reference draws `graders` as a list; then the names are the variables."""
    grader: Any = GRADER | {"graders": [NAME, EMAIL], "calculate_output": "(name_grader + email_grader) / 2"}
    sample = '{"name": "Grace Hopper", "email": "nobody"}'

    run = OpenAI().fine_tuning.alpha.graders.run(grader=grader, item=ITEM, model_sample=sample)

    assert run.sub_rewards == {"name_grader": 1.0, "email_grader": 0.0}
    assert run.reward == 0.5


@pytest.mark.parametrize(
    ("formula", "reward"),
    [
        ("a + b", 1.0),
        ("a - b", 1.0),
        ("3 * a", 3.0),
        ("a / 4", 0.25),
        ("2 ^ (a + a)", 4.0),
        ("min(a, b)", 0.0),
        ("max(a, b)", 1.0),
        ("abs(b - a)", 1.0),
        ("floor(a / 2)", 0.0),
        ("ceil(a / 2)", 1.0),
        ("exp(b)", 1.0),
        ("sqrt(4 * a)", 2.0),
        ("log(exp(a))", 1.0),
        ("0.5 * a + 0.5 * b", 0.5),
        ("log(a + 1)", math.log(2)),
    ],
)
def test_a_formula_has_the_documented_operators_and_functions(formula: str, reward: float) -> None:
    """`a` is 1 and `b` is 0."""
    graders = {"a": EXACT | {"name": "a"}, "b": EXACT | {"name": "b", "operation": "ne"}}
    grader: Any = {"type": "multi", "graders": graders, "calculate_output": formula}

    run = OpenAI().fine_tuning.alpha.graders.run(
        grader=grader, item={"reference_answer": "yes"}, model_sample="yes"
    )

    assert run.reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"graders": {"inner": GRADER}, "calculate_output": "inner"}, "grader.graders.inner.type"),
        ({"calculate_output": "name + unknown"}, "grader.calculate_output"),
        ({"calculate_output": "name +"}, "grader.calculate_output"),
    ],
)
def test_what_the_guide_rules_out_is_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        OpenAI().fine_tuning.alpha.graders.validate(grader=GRADER | change)

    assert refused.value.param == param
