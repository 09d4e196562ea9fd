"""text_similarity: how alike two rendered texts are, from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from rapidfuzz import fuzz

from graders.template import RenderError, Template, quoted
from graders.types import Grade, Item, Sample

Metric = Literal["fuzzy_match"]


@dataclass(frozen=True)
class TextSimilarity:
    """The score is the metric itself; a pass threshold does not change it."""

    name: str
    input: Template
    reference: Template
    evaluation_metric: Metric
    type: ClassVar[str] = "text_similarity"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            got, want = self.input.render(sample, item), self.reference.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        score = METRICS[self.evaluation_metric](got, want)
        return Grade(score, f"{score:.3f} similar to {quoted(want)}, got {quoted(got)}")


def fuzzy_match(a: str, b: str) -> float:
    """Share of characters two texts have in common, in order: 1 - edits / total length.

    An edit inserts or deletes one character. OpenAI says its fuzzy_match uses rapidfuzz but not which scorer.
    This is `fuzz.ratio`, because a reward must not be cheap to game: it is symmetric, falls with every edit,
    and gives no credit for burying the answer in a long text. `WRatio`, the library's own default, takes the
    best of several partial matches and does.
    """
    return fuzz.ratio(a, b) / 100


METRICS: dict[Metric, Callable[[str, str], float]] = {"fuzzy_match": fuzzy_match}
