import asyncio
import threading

import pytest

from graders.build import build
from graders.math_answer import final_answer, judge
from graders.spec import parse_grader
from graders.types import ErrorKind, Sample

MATH = {"type": "math", "name": "m", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First 3, so \boxed{\frac{1}{2}}, that is 7", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        ("<think>3</think><answer> 4 </answer>", "4"),
        (r"<answer>\boxed{5}</answer>", "5"),
        ("2 + 2 = 4. Done", "4"),
        ("it costs $1,234.50", "1,234.50"),
        ("about -3/4 of it", "-3/4"),
        ("no idea", None),
    ],
)
def test_the_answer_is_boxed_else_tagged_else_the_last_number(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("output", "reference", "score"),
    [
        ("42", "42", 1),
        ("42.0", 42, 1),
        ("1,000", "1000", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", 1),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{2^{10}}", "1024", 1),
        ("50%", "0.5", 1),
        ("5", r"so \boxed{5}", 1),
        ("41", "42", 0),
        ("Paris", "42", 0),
        (r"\boxed{}", "42", 0),
        (r"\boxed{}}{", "42", 0),
    ],
)
def test_answers_are_compared_as_mathematics(output, reference, score):
    assert judge(output, str(reference)).score == score


@pytest.mark.parametrize("reference", ["", "  ", "9" * 500, "=", r"\int_0^1 x dx"])
def test_a_reference_that_is_no_mathematics_leaves_the_sample_ungraded(reference):
    grade = judge("42", reference)

    assert (grade.score, grade.error) == (None, ErrorKind.invalid_variable_error)
    assert "cannot be read as mathematics" in grade.reason


@pytest.mark.parametrize(
    "bomb",
    [
        "9^{9^{9}}",
        "9**9**9",
        "9^9^9",
        "{9^9}^{9}^{9}",
        "10^{99999999999}",
        "((9^{99})^{99})^{99}",
        "(x+y+z)^{99}",
        "100000!",
        r"\sum_{n=1}^{10} n",
        r"\binom{100000}{50000}",
        "(" * 40 + "1" + ")" * 40,
        "1+" * 5000 + "1",
    ],
)
def test_an_answer_that_might_take_long_to_work_out_is_wrong_at_once(bomb):
    assert judge(rf"\boxed{{{bomb}}}", "3").score == 0.0


def test_it_works_in_a_thread():
    """math-verify's own time limit does not: it needs signals."""
    grades = []
    threads = [threading.Thread(target=lambda: grades.append(judge("1/2", "0.5"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [grade.score for grade in grades] == [1.0] * 3


def test_the_grader_renders_both_sides_and_says_what_is_missing():
    grader = build(parse_grader(MATH))

    assert asyncio.run(grader.grade(Sample("so 42"), {"answer": 42})).reason == "expected '42', got '42'"
    assert asyncio.run(grader.grade(Sample("42"), {})).error is ErrorKind.invalid_variable_error
