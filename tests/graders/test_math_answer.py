import asyncio
import random
from concurrent.futures import Future
from dataclasses import replace

import math_verify
import math_verify.parser
import pytest
import sympy

from graders.build import build
from graders.builtin import math_answer
from graders.final_answers import final_answer
from graders.hazards import table
from graders.hazards.pool import HazardPool, LimitExceeded, shared
from graders.run import grade_all
from graders.spec import parse_grader
from graders.types import ErrorKind, Grade, Sample

MATH = {"type": "math", "name": "m", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}


def judge(output: str, reference: str) -> Grade:
    return asyncio.run(math_answer.judge(output, reference, shared()))


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
        ("<answer><answer>1</answer>2</ANSWER>", "<answer>1"),
        ("</answer><Answer>6</answer>", "6"),
        ("<answer>6", "6"),
    ],
)
def test_the_answer_is_boxed_else_tagged_else_the_last_number(text: str, answer: str | None) -> None:
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
def test_answers_are_compared_as_mathematics(output: str, reference: str | int, score: int) -> None:
    assert judge(output, str(reference)).score == score


@pytest.mark.parametrize("reference", ["", "  ", "9" * 2000, "="])
def test_a_reference_that_is_no_mathematics_leaves_the_sample_ungraded(reference: str) -> None:
    grade = judge("42", reference)

    assert (grade.score, grade.error) == (None, ErrorKind.invalid_variable_error)
    assert "cannot be read as mathematics" in grade.reason


# Each takes from seconds to for ever, or gigabytes, and holds the interpreter's lock meanwhile.
BOMBS = (
    r"\sqrt[10^{-9}]{7}",
    "10E99999999",
    r"\begin{pmatrix}a&b&c\\d&e&f\\g&h&i\end{pmatrix}^{12}",
    "".join(f"({'+'.join('abcdefghijk'[n % 3 :])})" for n in range(13)),
    "9^{9^{9}}",
    "(x+y+z)^{99}",
    "100000!",
)


@pytest.mark.slow
def test_an_answer_or_a_reference_that_takes_for_ever_costs_its_own_grade_alone() -> None:
    limited = replace(table.MATH, cpu_s=0.25, batch=64)
    pool = HazardPool(size=2)
    pairs = [pair for bomb in BOMBS for pair in (("1", bomb), (bomb, "1"), ("7", "7"))]
    try:
        calls: list[Future[bool | None]] = [pool.submit(limited, *pair) for pair in pairs]
        outcomes = [call.exception() or call.result() for call in calls]
    finally:
        pool.close()

    assert outcomes[2::3] == [True] * len(BOMBS)
    bombs = [outcome for number, outcome in enumerate(outcomes) if number % 3 != 2]
    # The matrix power is worked out in time on a quick machine, and is no match.
    assert all(isinstance(outcome, LimitExceeded) or not outcome for outcome in bombs)
    assert sum(isinstance(outcome, LimitExceeded) for outcome in bombs) >= len(BOMBS)


@pytest.mark.slow
def test_an_answer_that_runs_into_the_limit_is_not_graded_and_the_reason_has_its_text() -> None:
    grade = judge(r"so \boxed{\sqrt[10^{-9}]{7}}", "1")

    assert (grade.score, grade.error) == (None, ErrorKind.other_error)
    assert grade.reason == (
        r"cannot compare '\\sqrt[10^{-9}]{7}' with the reference '1': it takes more than 2 s"
    )


@pytest.mark.slow
def test_grading_leaves_the_event_loop_free() -> None:
    """A run samples and writes its heartbeat in the same loop."""
    grader = build(parse_grader(MATH))

    async def grade() -> tuple[bool, Grade]:
        task = asyncio.create_task(grader.grade(Sample(r"\boxed{10E99999999}"), {"answer": "1"}))
        for _ in range(100):
            await asyncio.sleep(0)
        return task.done(), await task

    done_at_once, result = asyncio.run(grade())

    assert not done_at_once
    assert result.score is None


@pytest.mark.slow
def test_sums_integrals_and_factorials_are_mathematics() -> None:
    assert judge(r"\boxed{55}", r"\sum_{n=1}^{10} n").score == 1.0
    assert judge(r"\boxed{5!}", "120").score == 1.0
    assert judge(r"\boxed{0.5}", r"\int_0^1 x dx").score == 1.0


def plain_texts() -> list[str]:
    draw = random.Random(7)
    texts = ["0", "-0", "007", "1/1", "0/3", "4/0", "0.5", "-0.5", "0.50", "00.5", "0.0", "-0.0", "100.0"]
    for _ in range(40):
        a, b = (draw.randrange(10 ** draw.randrange(1, 13)) for _ in range(2))
        sign, digits = draw.choice(("", "-")), draw.randrange(1, 7)
        texts += [f"{sign}{a}", f"{sign}{a}/{b}", rf"{sign}\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a}}}{{{b}}}"]
        texts += [f"{sign}{a % 10**9}.{draw.randrange(10**digits):0{digits}}"]
    return texts


@pytest.mark.slow
def test_a_plain_number_is_read_without_math_verify_and_as_it_does() -> None:
    math_verify.parser.TIMEOUT_WARNING_SHOWN = True
    kinds = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    read = [(text, math_answer.plain_number(text)) for text in plain_texts()]
    plain = [(text, number) for text, number in read if number is not None]

    assert len(plain) > 150
    for text, number in plain:
        [theirs] = math_verify.parse(f"${text}$", kinds, fallback_mode="no_fallback", parsing_timeout=None)
        assert sympy.srepr(theirs) == sympy.srepr(number), text


def test_grades_belong_to_their_samples() -> None:
    grader = build(parse_grader(MATH))
    pairs = [(Sample(rf"\boxed{{{number}}}"), {"answer": number - number % 3}) for number in range(300)]

    grades = asyncio.run(grade_all(grader, pairs))

    assert [grade.score for grade in grades] == [float(number % 3 == 0) for number in range(300)]


def test_the_grader_renders_both_sides_and_says_what_is_missing() -> None:
    grader = build(parse_grader(MATH))

    assert asyncio.run(grader.grade(Sample("so 42"), {"answer": 42})).reason == "expected '42', got '42'"
    assert asyncio.run(grader.grade(Sample("42"), {})).error is ErrorKind.invalid_variable_error
