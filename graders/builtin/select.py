"""select: the row names the grader of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from graders.run import grade_one
from graders.template import RenderError, Template, unknown_choice
from graders.types import ErrorKind, Grade, Grader, Item, Sample


@dataclass(frozen=True)
class Select:
    """Runs the grader that the row's `key` names, and no other. Its grade is also the one of that part."""

    name: str
    key: Template
    graders: Mapping[str, Grader]
    type: ClassVar[str] = "select"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            chosen = self.key.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        if chosen not in self.graders:
            return Grade(None, unknown_choice(chosen, self.graders), ErrorKind.invalid_variable_error)
        grade = await grade_one(self.graders[chosen], sample, item)
        return replace(grade, sub_grades={chosen: replace(grade, sub_grades={})})
