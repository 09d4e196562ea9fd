"""pass@k and maj@k against counted subsets and answers read by hand."""

from itertools import combinations, product

import pytest

from graders.types import ErrorKind, Grade
from worker.recording.passes import final_answer, majority, of_validation, pass_at
from worker.types import Group, Prompt, Rollout


@pytest.mark.parametrize(("n", "k"), [(n, k) for n, k in product(range(1, 7), range(1, 7)) if k <= n])
def test_pass_at_k_is_the_share_of_subsets_with_an_answer_that_passes(n: int, k: int) -> None:
    for passing in range(n + 1):
        subsets = list(combinations(range(n), k))
        solved = sum(any(number < passing for number in subset) for subset in subsets)

        assert pass_at(n, passing, k) == pytest.approx(solved / len(subsets))


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("Paris", "paris"),
        ("  The\n answer ", "the answer"),
        (r"first \boxed{3}, then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("<answer>a</answer> no, <answer>\nB </answer>.", "b"),
        ("5 + 5 = 10\n#### 10", "10"),
        (r"#### 4 and \boxed{5}", "5"),
        ("", ""),
    ],
)
def test_the_final_answer_is_the_marked_one_or_all(text: str, final: str) -> None:
    assert final_answer(text) == final


def test_braces_may_be_nested_and_boxes_framed() -> None:
    assert final_answer(r"so \boxed{\frac{\sqrt{2}}{3}}.") == r"\frac{\sqrt{2}}{3}"
    assert final_answer(r"so \fbox{x^{2^{3}}}") == "x^{2^{3}}"


def test_where_numbers_are_compared_the_last_one_is_the_answer() -> None:
    prose = ["So 2 + 2 is 4.", "The answer: 4", "5"]

    assert majority(prose, [True, True, False], numeric=True) == 1
    assert majority(prose, [True, True, False]) == pytest.approx(2 / 3)
    assert final_answer("no number", numeric=True) == "no number"


def test_the_commonest_final_answer_decides_and_ties_count_in_parts() -> None:
    assert majority(["so #### 3", "#### 3", "#### 4"], [True, True, False]) == 1
    assert majority(["3", "4", "4"], [True, False, False]) == 0
    assert majority(["3", "4"], [True, False]) == 0.5
    assert majority(["3", "3", "4"], [True, False, False]) == 0.5


def group(*answers: tuple[str, float | None]) -> Group:
    rollouts = tuple(Rollout((1,), (0.0,), text, "stop") for text, _ in answers)
    grades = (
        Grade(None, "?", ErrorKind.other_error) if score is None else Grade(score) for _, score in answers
    )
    return Group(Prompt(1, (1,), {}), rollouts, tuple(grades))


ROWS = [
    group(("3", 1.0), ("3", 1.0), ("4", 0.0), ("5", 0.0)),
    group(("4", 0.0), ("4", 0.0), ("4", 0.0), ("3", 1.0)),
    group(("4", 0.0), ("4", 0.2), ("5", 0.0), ("6", 0.0)),
    group(("3", 1.0), ("3", None), ("3", 1.0), ("3", 1.0)),
]


def test_a_validation_with_several_answers_reports_how_often_rows_are_solved() -> None:
    """The last row has an answer without a grade, so nobody knows whether it is solved."""
    assert of_validation(ROWS, 1.0) == pytest.approx(
        {
            "full_valid_pass_at_1": (2 / 4 + 1 / 4 + 0) / 3,
            "full_valid_pass_at_k": 2 / 3,
            "full_valid_maj_at_k": 1 / 3,
        }
    )


def test_the_score_that_passes_can_be_lower() -> None:
    assert of_validation(ROWS, 0.2)["full_valid_pass_at_k"] == 1


def test_one_answer_to_a_row_has_no_such_metrics() -> None:
    assert of_validation([group(("3", 1.0)), group(("4", 0.0))], 1.0) == {}
    assert of_validation([], 1.0) == {}
    assert of_validation([group(("3", None), ("3", None))], 1.0) == {}
