"""Every example in docs/howto/graders.md is accepted, and those that call no server get the score on the page.

The audited graders are those of grader-audits.md.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from api.resources.graded_probes import probe_grade
from core.results.grader_audit_report import report
from graders.build import NotConfigured, build
from graders.exploits.corpus import AuditedRow, probes
from graders.exploits.right_answers import right_answer
from graders.run import grade_all
from graders.spec import dump, parse_grader
from graders.types import Sample

HOWTO = Path(__file__).parents[2] / "docs/howto"
PAGE = (HOWTO / "graders.md").read_text()
AUDITS = (HOWTO / "grader-audits.md").read_text()
EXAMPLES = re.findall(r"Score:\s+([^\n]+)\n\n```json\n(.*?)```", PAGE, re.DOTALL)
SAMPLE = Sample("<think>6 * 7</think><answer>42</answer>")
ITEM = {"answer": "42", "question": "6 * 7?"}
AUDITED = re.findall(r"^- (stop|go): `(.*?)`$", AUDITS, re.MULTILINE)
TOPICS = ("sports", "music", "law")


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


def test_three_audited_graders_are_bad_and_three_are_good() -> None:
    assert [verdict for verdict, _ in AUDITED] == ["stop"] * 3 + ["go"] * 3


@pytest.mark.parametrize(("verdict", "example"), AUDITED)
def test_an_audited_grader_gets_the_verdict_on_the_page(verdict: str, example: str) -> None:
    spec = parse_grader(json.loads(example))
    rows = [
        {"messages": [{"role": "user", "content": f"Text {n}?"}], "answer": TOPICS[n % 3], "kind": "topic"}
        for n in range(12)
    ]
    some = list(probes([AuditedRow(line, row, right_answer(spec, row)) for line, row in enumerate(rows)]))
    grades = asyncio.run(
        grade_all(build(spec), [(Sample.from_text(one.text, parse_json=True), one.item) for one in some])
    )

    found = report(
        [probe_grade(*pair) for pair in zip(some, grades, strict=True)], pass_threshold=0.5, of_rows=len(rows)
    )

    assert found.verdict == verdict, found.sentence
