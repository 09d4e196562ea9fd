"""Measure grades per second, and the cost of process isolation for python graders.

`math_grades_per_second` is of integers, fractions and decimals, `math_expressions_per_second` of what SymPy parses.
`fresh_process_ratio` compares with the other way to the same isolation: a fresh interpreter for each grade, locked down
as ours are. `bare_process_ratio` compares with a fresh interpreter that nothing is kept from.
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.report import report
from bench.sizes import sized
from graders.build import build
from graders.builtin.python import PythonGrader
from graders.environments.catalog import default_folder, find
from graders.run import grade_all
from graders.sandbox.pool import Pool, SandboxLimits, ZygoteProcess
from graders.spec import parse_grader
from graders.types import Grader, Item, Sample

EXACT = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}
SIMILAR = {
    "type": "text_similarity",
    "name": "similar",
    "evaluation_metric": "fuzzy_match",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}
MULTI = {
    "type": "multi",
    "name": "both",
    "graders": {"exact": EXACT, "similar": SIMILAR},
    "calculate_output": "0.8*exact + 0.2*similar",
}
MATH = {
    "type": "math",
    "name": "math",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}
SOURCE = "def grade(sample, item):\n    return float(sample['output_text'] == item['answer'])\n"
# The same work in a fresh interpreter, without any protection.
FRESH = SOURCE + "import json, sys\nprint(grade(*json.load(sys.stdin)))"
ROUNDS = sized(5, 1)


def main() -> None:
    pool = Pool(size=2)
    python = PythonGrader("python", SOURCE, pool)
    try:
        one, bare = in_turn(lambda: grade(python, 1), fresh_and_bare, sized(60, 1))
        again, isolated = in_turn(lambda: grade(python, 1), fresh_and_isolated, sized(30, 1))
        figures = {
            "string_checks_per_second": per_second(build(parse_grader(EXACT)), sized(20_000, 20)),
            "multi_per_second": per_second(build(parse_grader(MULTI)), sized(5_000, 20)),
            # Each pair another one: groups of eight answers to a question, as a step of a job has them.
            "math_grades_per_second": math_per_second(plain_answers, sized(4_000, 24)),
            "math_expressions_per_second": math_per_second(expressions, sized(800, 24)),
            "python_overhead_ms": one * 1000,
            "python_grades_per_second": per_second(python, sized(200, 4)),
            "fresh_process_ratio": isolated / again,
            "bare_process_ratio": bare / one,
        }
    finally:
        pool.close()
    report("graders", figures)


def grade(grader: Grader, count: int) -> None:
    pairs: list[tuple[Sample, Item]] = [(Sample("42"), {"answer": "42"})] * count
    grades = asyncio.run(grade_all(grader, pairs))
    assert all(grade.score == 1.0 for grade in grades)


def per_second(grader: Grader, count: int) -> float:
    return count / median_seconds(lambda: grade(grader, count), ROUNDS)


def math_per_second(pairs: Callable[[int], list[tuple[Sample, Item]]], count: int) -> float:
    grader, asked = build(parse_grader(MATH)), pairs(count)
    return count / median_seconds(lambda: asyncio.run(grade_all(grader, asked)), ROUNDS)


def plain_answers(count: int) -> list[tuple[Sample, Item]]:
    """Integers, fractions and decimals, about half of them right."""
    draw = random.Random(0)
    pairs: list[tuple[Sample, Item]] = []
    for number in range(count):
        want = number // 8 + 2
        got = want + draw.choice((0, 0, 1, number % 8))
        shape = ("{}", r"\frac{{{}}}{{7}}", "{}.25")[number // 8 % 3]
        pairs.append((Sample(rf"so \boxed{{{shape.format(got)}}}"), {"answer": shape.format(want)}))
    return pairs


def expressions(count: int) -> list[tuple[Sample, Item]]:
    """The same with a root, which SymPy has to read and compare."""
    return [
        (Sample(sample.output_text.replace("}", r"\sqrt{3}}", 1)), {"answer": rf"{item['answer']}\sqrt{{3}}"})
        for sample, item in plain_answers(3 * count)
        if "." not in item["answer"] and "frac" not in item["answer"]
    ][:count]


def median_seconds(work: Callable[[], Any], rounds: int) -> float:
    return in_turn(work, lambda: None, rounds)[0]


def in_turn(work: Callable[[], Any], other: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds of both, side by side, so that a busy machine slows both alike. The first round is a warm-up."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        between = time.perf_counter()
        other()
        seconds.append((between - start, time.perf_counter() - between))
    mine, others = zip(*seconds[1:], strict=True)
    return statistics.median(mine), statistics.median(others)


def fresh_and_isolated() -> None:
    zygote = ZygoteProcess(SOURCE, SandboxLimits(), find(default_folder()))
    assert zygote.grade(Sample("42").as_namespace(), {"answer": "42"}).score == 1.0
    zygote.close()


def fresh_and_bare() -> None:
    pair = json.dumps([Sample("42").as_namespace(), {"answer": "42"}])
    program = [sys.executable, "-I", "-S", "-c", FRESH]
    done = subprocess.run(program, input=pair, capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"


if __name__ == "__main__":
    main()
