"""From what the user wrote to something that grades, and what it will need from every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from graders.formula import Formula
from graders.multi import Multi
from graders.python import PythonGrader
from graders.spec import GraderSpec, MultiSpec, PythonSpec, StringCheckSpec, TextSimilaritySpec
from graders.string_check import StringCheck
from graders.template import MissingPath, Path, Template, dotted, resolve
from graders.text_similarity import TextSimilarity
from graders.types import Grader, Item


def build(spec: GraderSpec) -> Grader:
    """The grader a spec describes. A spec has been checked, so this does not fail."""
    match spec:
        case StringCheckSpec():
            return StringCheck(
                spec.name, Template.parse(spec.input), Template.parse(spec.reference), spec.operation
            )
        case TextSimilaritySpec():
            return TextSimilarity(
                spec.name, Template.parse(spec.input), Template.parse(spec.reference), spec.evaluation_metric
            )
        case PythonSpec():
            return PythonGrader(spec.name, spec.source)
        case MultiSpec():
            graders = {key: build(sub) for key, sub in spec.graders.items()}
            return Multi(
                spec.name, graders, Formula.parse(spec.calculate_output, spec.graders), spec.invalid_grade
            )
        case _:
            assert_never(spec)


def item_paths(spec: GraderSpec) -> list[Path]:
    """Every path the spec reads from a row, each once."""
    return list(dict.fromkeys(path for template in _templates(spec) for path in template.item_paths))


def missing_item_paths(spec: GraderSpec, row: Item) -> list[str]:
    """What the spec needs and this row lacks, spelled as in the template: "item.answer". A null is there."""
    return [dotted("item", path) for path in item_paths(spec) if not _present(row, path)]


def _templates(spec: GraderSpec) -> Iterator[Template]:
    if isinstance(spec, MultiSpec):
        for sub in spec.graders.values():
            yield from _templates(sub)
    elif not isinstance(spec, PythonSpec):  # what a function reads shows only when it runs
        yield Template.parse(spec.input)
        yield Template.parse(spec.reference)


def _present(row: Item, path: Path) -> bool:
    try:
        resolve(row, path)
    except MissingPath:
        return False
    return True
