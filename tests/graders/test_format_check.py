import asyncio
from typing import Any

import pytest

from graders.backends import Backends
from graders.build import build
from graders.spec import InvalidGrader, parse_grader
from graders.types import ErrorKind, Grade, Sample

BASE = {"type": "format", "name": "form", "input": "{{sample.output_text}}"}


def grade(text: str, **how: str) -> Grade:
    return asyncio.run(build(parse_grader({**BASE, **how})).grade(Sample(text), {}))


def refused(**how: object) -> InvalidGrader:
    with pytest.raises(InvalidGrader) as caught:
        Backends.none().check(parse_grader({**BASE, **how}))
    return caught.value


@pytest.mark.parametrize(("text", "score"), [("2026-11-21", 1), ("on 2026-11-21", 0), ("", 0)])
def test_a_pattern_has_to_match_all_of_the_text(text: str, score: int) -> None:
    assert grade(text, pattern=r"\d{4}-\d{2}-\d{2}").score == score


@pytest.mark.slow
def test_a_pattern_that_goes_on_forever_is_stopped() -> None:
    ungraded = grade("a" * 60, pattern="(a|aa)+b")

    assert (ungraded.score, ungraded.error) == (None, ErrorKind.other_error)
    assert ungraded.reason == "cannot match '(a|aa)+b': it takes more than 2 s"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "not a regular expression"),
        ("a" * 1001, "maximum length 1000"),
        ("((a{1000}){1000}){1000}", "too expensive"),
        ("(" * 490 + ")" * 490, "not a regular expression"),
    ],
)
@pytest.mark.slow
def test_a_pattern_we_cannot_run_is_refused(pattern: str, why: str) -> None:
    error = refused(pattern=pattern)

    assert error.param == "grader.pattern"
    assert why in str(error)


def test_the_pattern_of_a_part_of_a_multi_is_named() -> None:
    multi = {
        "type": "multi",
        "name": "m",
        "graders": {"a": {**BASE, "pattern": "("}},
        "calculate_output": "a",
    }

    with pytest.raises(InvalidGrader) as caught:
        Backends.none().check(parse_grader(multi))

    assert caught.value.param == "grader.graders.a.pattern"


GOOD = "<think>hm</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "full", "partial"),
    [
        (GOOD, 1, 1),
        (f"\n{GOOD}\n", 1, 1),
        (f"well, {GOOD}", 0, 0.8),
        ("<answer>4</answer><think>hm</think>", 0, 0.8),
        ("hm</think><answer>4</answer>", 0, 0.6),
        (GOOD + GOOD, 0, 0),
        ("4", 0, 0),
    ],
)
def test_think_answer_is_all_or_nothing_unless_asked(text: str, full: int, partial: float) -> None:
    assert grade(text, template="think_answer").score == full
    assert grade(text, template="think_answer", credit="partial").score == partial


def test_the_reason_names_what_is_off() -> None:
    assert grade("hm</think>", template="think_answer").reason == (
        "not exactly once: <think>, <answer>, </answer>"
    )


@pytest.mark.parametrize(
    "how", [{}, {"pattern": "a", "template": "think_answer"}, {"pattern": "a", "credit": "partial"}]
)
def test_it_is_either_a_pattern_or_a_template(how: dict[str, Any]) -> None:
    assert refused(**how).code == "invalid_value"
