"""text_similarity: the similarity of two rendered texts, from 0 to 1.

OpenAI documents the names of its metrics but not their settings. Each metric here uses the default settings of the
best known library unless its docstring says otherwise. The similarity of two empty texts is 1; that of an empty text
and any other is 0.

bleu, gleu and meteor split a text into runs of letters and digits, and single punctuation marks; bleu and gleu are
case-sensitive. ROUGE splits it into runs of a-z and 0-9 in lower case. Only meteor applies stemming.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from rapidfuzz import fuzz

from graders.hazards import table
from graders.hazards.pool import HazardFailed, HazardPool, LimitExceeded, shared
from graders.template import RenderError, Template, quoted
from graders.types import ErrorKind, Grade, Item, Sample

Metric = Literal[
    "fuzzy_match",
    "bleu",
    "gleu",
    "meteor",
    "rouge_1",
    "rouge_2",
    "rouge_3",
    "rouge_4",
    "rouge_5",
    "rouge_l",
]

# The hazard pool measures longer texts: rouge_l, in Python, takes time proportional to the product of the word counts.
MAX_CHARACTERS_HERE = 2_000
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class TextSimilarity:
    """The score is the metric itself; a pass threshold does not change it.

    Texts that exceed the time limit of the hazard pool leave the sample ungraded.
    """

    name: str
    input: Template
    reference: Template
    evaluation_metric: Metric
    pool: HazardPool = field(default_factory=shared, repr=False, compare=False)
    type: ClassVar[str] = "text_similarity"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            got, want = self.input.render(sample, item), self.reference.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        longest = max(len(got), len(want))
        if longest <= MAX_CHARACTERS_HERE:
            score = measure(self.evaluation_metric, got, want)
        else:
            try:
                call = self.pool.submit(table.SIMILARITY, self.evaluation_metric, got, want)
                score = await asyncio.wrap_future(call)
            except LimitExceeded as exceeded:
                reason = f"cannot measure {self.evaluation_metric} of {longest} characters: {exceeded}"
                return Grade(None, reason, ErrorKind.other_error)
            except HazardFailed as broken:
                return Grade(None, str(broken), ErrorKind.other_error)
        return Grade(score, f"{score:.3f} similar to {quoted(want)}, got {quoted(got)}")


def measure(metric: Metric, got: str, want: str) -> float:
    """Compute the metric of two texts. For long texts, call it in the hazard pool."""
    return METRICS[metric](got, want)


def fuzzy_match(a: str, b: str) -> float:
    """Return the share of characters that two texts have in common, in order: 1 - edits / total length.

    An edit inserts or deletes one character. OpenAI documents that fuzzy_match uses rapidfuzz, but not the scorer.
    This function uses `fuzz.ratio` because it is hard to game: it is symmetric, falls with every edit, and gives no
    credit for an answer hidden in a long text. `WRatio`, the library's default, does give that credit, because it
    takes the best of several partial matches.
    """
    return fuzz.ratio(a, b) / 100


def bleu(got: str, want: str) -> float:
    """Return the share of n-grams of `got` that are in `want`: geometric mean over n = 1..4, with a brevity penalty.

    Smoothed with method 1 of Chen and Cherry (0.1 instead of a count of 0), because otherwise a sentence without a
    matching 4-gram would score 0. If a text has fewer than four words, n is at most the length of the shorter text.
    """
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu  # takes 1.5 s, so only when needed

    def judge(got_W: Sequence[str], want_W: Sequence[str]) -> float:
        n = min(4, len(got_W), len(want_W))
        smoothing = SmoothingFunction().method1
        return float(sentence_bleu([want_W], got_W, weights=[1 / n] * n, smoothing_function=smoothing))

    return _of_words(judge, got, want)


def gleu(got: str, want: str) -> float:
    """Return the n-grams in common, n = 1..4, as a share of those of the longer text: BLEU for single sentences."""
    from nltk.translate.gleu_score import sentence_gleu

    return _of_words(lambda got_W, want_W: sentence_gleu([want_W], got_W), got, want)


def meteor(got: str, want: str) -> float:
    """Return METEOR: words in common, with recall weighted nine times precision, less a penalty for word order.

    A word matches the same word or one of the same stem (Porter). The original also matches synonyms from WordNet,
    whose data would have to be downloaded: here "big" does not match "large", so scores are never above those of the
    original. Equal texts score just below 1 (0.996 for five words), as in the original.
    """
    from nltk.translate.meteor_score import single_meteor_score

    synonyms = _NoSynonyms()
    return _of_words(
        lambda got_W, want_W: single_meteor_score(want_W, got_W, wordnet=synonyms),
        got,
        want,
    )


def rouge(kind: str, got: str, want: str) -> float:
    """Return the F-measure of the n-grams of two texts, or for "rougeL" of their longest common subsequence.

    ROUGE's words consist of the letters a-z and digits, so a text in another script has no words and scores 0. Texts
    with fewer than n words score 0 as well.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    if got == want == "":
        return 1.0
    # Without an explicit tokenizer, each scorer logs that it uses this one.
    scorer = RougeScorer([kind], tokenizer=DefaultTokenizer())
    return float(scorer.score(want, got)[kind].fmeasure)


class _NoSynonyms:
    """Replaces NLTK's WordNet reader, whose data is not installed."""

    def synsets(self, word: str) -> list[object]:
        return []


def _of_words(judge: Callable[[Sequence[str], Sequence[str]], float], got: str, want: str) -> float:
    got_W, want_W = _WORD.findall(got), _WORD.findall(want)
    if not got_W or not want_W:
        return float(got_W == want_W)
    return min(1.0, max(0.0, float(judge(got_W, want_W))))  # rounding: a mean of ones may exceed 1


METRICS: dict[Metric, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    "meteor": meteor,
    "rouge_1": partial(rouge, "rouge1"),
    "rouge_2": partial(rouge, "rouge2"),
    "rouge_3": partial(rouge, "rouge3"),
    "rouge_4": partial(rouge, "rouge4"),
    "rouge_5": partial(rouge, "rouge5"),
    "rouge_l": partial(rouge, "rougeL"),
}
