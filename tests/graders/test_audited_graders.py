"""Graders of the usual kinds, good and bad, through their probes to the verdict of the audit."""

import asyncio
import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from api.resources.graded_probes import probe_grade
from core.results.evals import pass_threshold
from core.results.grader_audit_report import GraderAuditReport, report
from graders.build import build
from graders.exploits.corpus import AuditedRow, probes
from graders.exploits.right_answers import checked_answer_template, right_answer
from graders.run import grade_all
from graders.spec import dump, parse_grader
from graders.types import ErrorKind, Grade, Sample

EXAMPLES = Path(__file__).parents[2] / "examples"
Function = Callable[[dict[str, Any], dict[str, Any]], float]
Row = dict[str, Any]


def example(name: str) -> Any:
    """A module of examples/, which import each other."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


GSM8K = example("gsm8k")


def rows(answers: Sequence[Any], question: str = "Question {n}?", **fields: Sequence[Any]) -> list[Row]:
    return [
        {
            "messages": [{"role": "user", "content": question.format(n=n)}],
            "answer": answer,
            **{name: values[n % len(values)] for name, values in fields.items()},
        }
        for n, answer in enumerate(answers)
    ]


WORDS = [
    "river",
    "rose",
    "two",
    "meters",
    "after",
    "heavy",
    "rain",
    "farmers",
    "lost",
    "fields",
    "bridge",
    "mayor",
]
WORDS += [
    "promised",
    "help",
    "money",
    "soon",
    "workers",
    "built",
    "walls",
    "around",
    "village",
    "school",
    "again",
]
DRAW = random.Random(0)
NUMBERS = rows(
    [str(DRAW.randrange(20, 400)) for _ in range(24)], "Anna has {n} apples and buys 7 bags. How many apples?"
)
DECIMALS = rows([f"{n}.5" for n in range(24)])
EQUAL_FRACTIONS = rows(["\\frac{1}{2}", "0.5", "1/3", "0.50", "\\frac13"] * 5)
LABELS = rows(["sports", "music", "law", "art"] * 6, "Is {n} about sports, music, law or art?")
BINARY = rows(["positive", "negative"] * 12, "Is {n} positive or negative?")
LETTERS = rows(["A", "B", "C", "D"] * 6, "Which of {n}? A) x B) y C) z D) w")
FIELDS = rows(
    ["sports", "music", "law", "art"] * 6, urgent=["yes", "no", "maybe"], lang=["de", "en", "fr", "es", "it"]
)
SUMMARIES = rows([" ".join(DRAW.choices(WORDS, k=12)) + f" {n}" for n in range(24)])
SCALE = rows([str(1 + n % 5) for n in range(24)])
SETS = rows([["sports", "music"], ["law", "art"], ["music", "law"], ["art", "sports"]] * 6)


def compared(kind: str = "string_check", name: str = "equal", **fields: Any) -> dict[str, Any]:
    base = {"type": kind, "name": name, "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
    return base | ({"operation": "eq"} if kind == "string_check" else {}) | fields


def of_parts(calculate: str, **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "name": "m", "graders": graders, "calculate_output": calculate}


def field_of(name: str, reference: str) -> dict[str, Any]:
    return compared(
        name=name, input=f"{{{{sample.output_json.{name}}}}}", reference=f"{{{{item.{reference}}}}}"
    )


FIELD = {
    "topic": field_of("topic", "answer"),
    "urgent": field_of("urgent", "urgent"),
    "lang": field_of("lang", "lang"),
}
SIMILAR: dict[str, Any] = {"evaluation_metric": "fuzzy_match", "pass_threshold": 0.8}


def tagged(sample: dict[str, Any], item: Row) -> float:
    scope: dict[str, Any] = {}
    exec(GSM8K.PYTHON["source"], scope)
    return float(scope["grade"](sample, item))


def last_number(sample: dict[str, Any], item: Row) -> float:
    return float((re.findall(r"-?\d+(?:\.\d+)?", sample["output_text"]) or [""])[-1] == item["answer"])


def last_word(sample: dict[str, Any], item: Row) -> float:
    return float((re.findall(r"\w+", sample["output_text"].lower()) or [""])[-1] == item["answer"].lower())


def closeness(sample: dict[str, Any], item: Row) -> float:
    try:
        value, want = float(sample["output_text"].strip()), float(item["answer"])
    except ValueError:
        return 0.0
    return max(0.0, 1 - abs(value - want) / max(1.0, abs(want)))


def ordinal(sample: dict[str, Any], item: Row) -> float:
    text = sample["output_text"].strip()
    return 1 - abs(int(text) - int(item["answer"])) / 4 if text in {"1", "2", "3", "4", "5"} else 0.0


def overlap(sample: dict[str, Any], item: Row) -> float:
    try:
        given = set(json.loads(sample["output_text"]))
    except (TypeError, ValueError):
        given = set()
    return 2 * len(given & set(item["answer"])) / (len(given) + len(item["answer"]))


def exact(sample: dict[str, Any], item: Row) -> float:
    return float(sample["output_text"].strip() == item["answer"])


GOOD: dict[str, tuple[dict[str, Any] | Function, list[Row], str | None]] = {
    "examples/gsm8k.py MULTI": (GSM8K.MULTI, NUMBERS, None),
    "examples/gsm8k.py PYTHON": (tagged, NUMBERS, "<think>x</think><answer>{{item.answer}}</answer>"),
    "mathematics": (compared("math"), NUMBERS, None),
    "mathematics of decimals": (compared("math"), DECIMALS, None),
    "mathematics of equal fractions": (compared("math"), EQUAL_FRACTIONS, None),
    "exact labels": (compared(), LABELS, None),
    "two labels": (compared(), BINARY, None),
    "last number": (last_number, NUMBERS, None),
    "last letter": (last_word, LETTERS, None),
    "last of two words": (last_word, BINARY, None),
    "fields with partial credit": (of_parts("(topic + urgent + lang) / 3", **FIELD), FIELDS, None),
    "all fields": (of_parts("topic * urgent * lang", **FIELD), FIELDS, None),
    "one field": (FIELD["topic"], FIELDS, None),
    "similarity": (compared("text_similarity", **SIMILAR), SUMMARIES, None),
    "similarity of labels": (compared("text_similarity", **SIMILAR), LABELS, None),
    "numeric closeness": (closeness, NUMBERS, None),
    "a scale": (ordinal, SCALE, None),
    "overlap of sets": (overlap, SETS, None),
    "a reward from -1 to 1": (lambda sample, item: 2 * exact(sample, item) - 1, LABELS, None),
    "a reward up to 10": (lambda sample, item: 10 * exact(sample, item), LABELS, None),
    "a reward up to 0.4": (lambda sample, item: 0.4 * exact(sample, item), LABELS, "{{item.answer}}"),
}
BAD: dict[str, tuple[dict[str, Any] | Function, list[Row]]] = {
    "length": (lambda sample, item: min(1.0, len(sample["output_text"]) / 1000), LETTERS),
    "half length": (
        lambda sample, item: 0.5 * exact(sample, item) + 0.5 * min(1.0, len(sample["output_text"]) / 200),
        LETTERS,
    ),
    "a keyword": (lambda sample, item: float("answer" in sample["output_text"].lower()), LABELS),
    "a constant": (lambda sample, item: 1.0, LABELS),
    "empty passes": (
        lambda sample, item: exact(sample, item) if sample["output_text"].strip() else 1.0,
        LABELS,
    ),
    "all labels": (compared(operation="like"), LABELS),
    "any text": (compared(operation="ne", reference=""), LABELS),
    "any form": (lambda sample, item: float(bool(re.fullmatch("[a-z]+", sample["output_text"]))), LABELS),
}


def audit(grader: dict[str, Any] | Function, rows: list[Row], answer: str | None = None) -> GraderAuditReport:
    python = {"type": "python", "name": "p", "source": "def grade(sample, item):\n    return 1.0"}
    spec = parse_grader(grader if isinstance(grader, dict) else python)
    template = None if answer is None else checked_answer_template(answer)
    made = list(
        probes([AuditedRow(line, row, right_answer(spec, row, template)) for line, row in enumerate(rows, 1)])
    )
    if isinstance(grader, dict):
        pairs = [(Sample.from_text(one.text, parse_json=True), one.item) for one in made]
        grades = asyncio.run(grade_all(build(spec), pairs))
    else:  # in this process: the sandbox is not what is tested
        grades = [grade_of(grader({"output_text": one.text}, dict(one.item))) for one in made]
    graded = [probe_grade(*pair) for pair in zip(made, grades, strict=True)]
    return report(graded, pass_threshold=pass_threshold(dump(spec)), of_rows=len(rows))


def grade_of(score: float | None) -> Grade:
    return Grade(None, "another form.", ErrorKind.other_error) if score is None else Grade(score)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_grader_can_train(name: str) -> None:
    found = audit(*GOOD[name])

    assert (found.verdict, found.advice) == ("go", []), found.sentence


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grader_stops(name: str) -> None:
    found = audit(*BAD[name])

    assert found.verdict == "stop", found.sentence


def test_a_form_that_nobody_said_is_unknown() -> None:
    found = audit(tagged, NUMBERS)

    assert found.verdict == "unknown"
    assert found.sentence == (
        "Unknown: the form of a right answer is not known; send `answer`, such as <answer>{{item.answer}}</answer>."
    )


def test_a_constant_that_is_right_everywhere_is_a_caution() -> None:
    assert audit(compared(), rows(["ham"] * 23 + ["spam"])).verdict == "caution"
    assert audit(compared(reference="zzzz"), LABELS).verdict == "caution"


def test_parts_of_different_fields_are_not_redundant() -> None:
    found = audit(of_parts("topic + urgent", topic=FIELD["topic"], urgent=FIELD["urgent"]), FIELDS)

    assert [part.redundant_with for part in found.parts] == [[], []]


def test_a_report_of_many_parts_is_short() -> None:
    many = {f"p{n:02d}_{'x' * 50}": compared(name=f"p{n}") for n in range(30)}

    found = audit(of_parts(next(iter(many)), **many), LABELS[:8])

    assert max(map(len, [found.sentence, *found.advice])) < 600
    assert sum(len(part.redundant_with) for part in found.parts) == 30 * 29 // 2
