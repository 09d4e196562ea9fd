"""string_check: compare two rendered texts; 1 if the comparison holds, else 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from graders.template import RenderError, Template, quoted
from graders.types import Grade, Item, Sample

Operation = Literal["eq", "ne", "like", "ilike"]


@dataclass(frozen=True)
class StringCheck:
    """Compare the texts without stripping or normalizing them. Wildcards are not supported."""

    name: str
    input: Template
    reference: Template
    operation: Operation
    type: ClassVar[str] = "string_check"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            got, want = self.input.render(sample, item), self.reference.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        holds, wanted = _CHECKS[self.operation]
        reason = f"expected {wanted.format(quoted(want))}, got {quoted(got)}"
        if not want and self.operation in ("like", "ilike"):
            reason = f"{reason}; every answer contains an empty reference"
        return Grade(float(holds(got, want)), reason)


_CHECKS: dict[Operation, tuple[Callable[[str, str], bool], str]] = {
    "eq": (lambda got, want: got == want, "{}"),
    "ne": (lambda got, want: got != want, "anything but {}"),
    "like": (lambda got, want: want in got, "something with {} in it"),
    "ilike": (lambda got, want: want.casefold() in got.casefold(), "something with {} in it, in any case"),
}
