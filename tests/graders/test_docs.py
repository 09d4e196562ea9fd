"""Every example in docs/howto/graders.md is accepted, and those that call no server get the score on the page."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from graders.build import NotConfigured, build
from graders.run import grade_all
from graders.spec import dump, parse_grader
from graders.types import Sample

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "graders.md").read_text()
EXAMPLES = re.findall(r"Score:\s+([^\n]+)\n\n```json\n(.*?)```", PAGE, re.DOTALL)
SAMPLE = Sample("<think>6 * 7</think><answer>42</answer>")
ITEM = {"answer": "42", "question": "6 * 7?"}


def test_every_example_says_its_score() -> None:
    assert len(EXAMPLES) == PAGE.count("```json") == 11


@pytest.mark.parametrize(("score", "example"), EXAMPLES)
def test_an_example_is_accepted_as_it_stands(score: Any, example: Any) -> None:
    raw = json.loads(example)

    assert dump(parse_grader(raw)) == raw


@pytest.mark.parametrize(("score", "example"), [e for e in EXAMPLES if not e[0].startswith("asks")])
def test_an_example_gets_the_score_it_says(score: Any, example: Any) -> None:
    [grade] = asyncio.run(grade_all(build(parse_grader(json.loads(example))), [(SAMPLE, ITEM)]))

    assert grade.score == pytest.approx(float(score)), grade.reason


@pytest.mark.parametrize(("score", "example"), [e for e in EXAMPLES if e[0].startswith("asks")])
def test_an_example_that_asks_someone_cannot_be_built_without_them(score: Any, example: Any) -> None:
    with pytest.raises(NotConfigured):
        build(parse_grader(json.loads(example)))
