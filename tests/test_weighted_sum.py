"""Which formulas of a multi grader are weighted sums of its parts."""

import pytest

from graders.formula import Formula
from graders.spec import parse_grader
from graders.weighted_sum import weighted_parts, weights_of

EXACT = {
    "type": "string_check",
    "name": "e",
    "input": "{{sample.output_text}}",
    "reference": "x",
    "operation": "eq",
}


@pytest.mark.parametrize(
    ("formula", "weights"),
    [
        ("a + b", {"a": 1.0, "b": 1.0}),
        ("0.7 * a + b * 0.3", {"a": 0.7, "b": 0.3}),
        ("(a + 3 * b) / 2 - 1", {"a": 0.5, "b": 1.5}),
        ("-a - (b - a) * 2 ^ 2", {"a": 3.0, "b": -4.0}),
        ("max(1, 2) * a", {"a": 2.0}),
    ],
)
def test_a_weighted_sum_has_a_weight_for_each_part(formula: str, weights: dict[str, float]) -> None:
    assert weights_of(Formula.parse(formula, ["a", "b"])) == pytest.approx(weights)


@pytest.mark.parametrize("formula", ["a * b", "max(a, b)", "a / b", "a ^ 2", "1 / a", "a / 0", "a + sqrt(b)"])
def test_another_formula_has_none(formula: str) -> None:
    assert weights_of(Formula.parse(formula, ["a", "b"])) is None


def test_a_multi_grader_has_the_weights_of_its_formula() -> None:
    multi = {"type": "multi", "name": "m", "graders": {"a": EXACT, "b": EXACT}, "invalid_grade": -1.0}

    assert weighted_parts(parse_grader(multi | {"calculate_output": "2 * a + b"})) == (
        {"a": 2.0, "b": 1.0},
        -1.0,
    )
    for grader, says in (
        (multi | {"calculate_output": "a * b"}, "must be a weighted sum"),
        (EXACT, "type 'multi'"),
    ):
        with pytest.raises(ValueError, match=says):
            weighted_parts(parse_grader(grader))
