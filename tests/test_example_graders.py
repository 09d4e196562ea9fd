"""The graders in examples/graders do in the sandbox what they say."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from graders.build import build
from graders.spec import parse_grader
from graders.types import ErrorKind, Grade, Sample

FOLDER = Path(__file__).parents[1] / "examples" / "graders"
TESTS = {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}


def grade(name: str, text: str, item: dict[str, Any]) -> Grade:
    source = (FOLDER / f"{name}.py").read_text()
    grader = build(parse_grader({"type": "python", "name": name, "source": source}))
    return asyncio.run(grader.grade(Sample(text), item))


def fenced(code: str) -> str:
    return f"Here you are:\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("text", "language", "score"),
    [
        ("It is a cat.", "en", 1.0),
        ("It is 一只猫", "en", 0.4),
        ("It is 一只猫", "zh", 0.6),
        ("это кот, a cat", "ru", 0.5),
        ("ねこです", "ja", 1.0),
        ("`x = 5` and $y$ 42", "en", 1.0),
        ("42 + 1", "en", 0.0),
        ("", "en", 0.0),
    ],
)
def test_language_consistency_is_the_share_of_words_in_the_language(
    text: str, language: str, score: float
) -> None:
    assert grade("language_consistency", text, {"language": language}).score == pytest.approx(score)


def test_a_language_that_is_not_listed_is_an_error_and_no_score() -> None:
    assert (
        grade("language_consistency", "hi", {"language": "xx"}).error is ErrorKind.python_grader_runtime_error
    )


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (fenced("def add(a, b):\n    return a + b"), 1.0),
        ("def add(a, b):\n    return a + b", 1.0),
        (fenced("def add(a, b):\n    return 3"), 0.5),
        (fenced("def add(a, b):\n    return c"), 0.0),
        (fenced("def add(a, b)"), 0.0),
        (fenced("raise SystemExit(0)"), 0.0),
        (fenced("while True: pass"), 0.0),
        (fenced("def add(a, b):\n    while a > 0: pass\n    return a + b"), 0.5),
        (fenced("import os\nos.fork()\ndef add(a, b):\n    return a + b"), 0.0),
        ("I do not know.", 0.0),
    ],
)
def test_unit_tests_score_the_share_that_passes(text: str, score: float) -> None:
    assert grade("unit_tests", text, TESTS).score == score


def test_what_failed_is_in_the_output() -> None:
    assert (
        "failed: assert add(-1, 1) == 0"
        in grade("unit_tests", fenced("def add(a, b):\n    return 3"), TESTS).output
    )


def test_every_example_grader_is_tested_here() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == {"language_consistency", "unit_tests"}
