"""multi: several graders and a formula over their scores."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graders.formula import Formula, FormulaDomainError
from graders.run import grade_one
from graders.types import ErrorKind, Grade, Grader, Item, Sample, summed


@dataclass(frozen=True)
class Multi:
    """Runs all sub-graders concurrently, then the formula. The keys of `graders` are its variables.

    A failed sub-grader leaves the sample ungraded, because a made-up score would bias the reward. `invalid_grade`
    sets a substitute score.
    """

    name: str
    graders: Mapping[str, Grader]
    formula: Formula
    invalid_grade: float | None = None
    type: ClassVar[str] = "multi"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        grades = await asyncio.gather(*(grade_one(sub, sample, item) for sub in self.graders.values()))
        sub_grades = dict(zip(self.graders, grades, strict=True))
        usage = summed(grade.usage for grade in grades)
        scores, unjudged = _scores(sub_grades, self.invalid_grade)
        if unjudged:
            why = "; ".join(f"{key} could not be judged: {sub.reason}" for key, sub in unjudged.items())
            return Grade(None, why, next(iter(unjudged.values())).error, sub_grades, usage=usage)
        try:
            score = self.formula.evaluate(scores)
        except FormulaDomainError as undefined:
            return Grade(
                None, f"calculate_output: {undefined}", ErrorKind.other_error, sub_grades, usage=usage
            )
        shown = ", ".join(f"{key}={value:g}" for key, value in scores.items())
        return Grade(score, f"{self.formula.text} with {shown}", sub_grades=sub_grades, usage=usage)


def _scores(
    sub_grades: Mapping[str, Grade], stand_in: float | None
) -> tuple[dict[str, float], dict[str, Grade]]:
    """Split grades into scores, including substitute scores, and failed grades without a substitute."""
    scores: dict[str, float] = {}
    unjudged: dict[str, Grade] = {}
    for key, sub in sub_grades.items():
        score = stand_in if sub.score is None else sub.score
        if score is None:
            unjudged[key] = sub
        else:
            scores[key] = score
    return scores, unjudged
