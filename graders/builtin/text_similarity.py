"""text_similarity: how alike two rendered texts are, from 0 to 1.

OpenAI names its metrics and not their settings. These are ours: each is what the best known library does by
default, or says here why not. Two empty texts are alike, one empty text is like no other.

Words of bleu, gleu and meteor are runs of letters and digits, and single punctuation marks; case counts in the
first two. ROUGE's are runs of a-z and 0-9 in lower case. Nothing but meteor stems.
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

# Longer texts are measured in the hazard pool: rouge_l takes time in the product of the numbers of words, in Python.
MAX_CHARACTERS_HERE = 2_000
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class TextSimilarity:
    """The score is the metric itself; a pass threshold does not change it.

    Texts that take longer to measure than the hazard pool allows are not judged.
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
    """The metric of two texts. Those that may be long are measured in the hazard pool."""
    return METRICS[metric](got, want)


def fuzzy_match(a: str, b: str) -> float:
    """Share of characters two texts have in common, in order: 1 - edits / total length.

    An edit inserts or deletes one character. OpenAI says its fuzzy_match uses rapidfuzz but not which scorer.
    This is `fuzz.ratio`, because a reward must not be cheap to game: it is symmetric, falls with every edit,
    and gives no credit for burying the answer in a long text. `WRatio`, the library's own default, takes the
    best of several partial matches and does.
    """
    return fuzz.ratio(a, b) / 100


def bleu(got: str, want: str) -> float:
    """How many n-grams of `got` are in `want`, geometric mean over n = 1..4, less a penalty for being short.

    Smoothed, or one missing 4-gram would make any sentence worth 0 (method 1 of Chen and Cherry: 0.1 in place
    of a count of 0). Where the texts are shorter than four words, n stops at the length of the shorter.
    """
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu  # 1.5 s: paid by who uses it

    def judge(got_W: Sequence[str], want_W: Sequence[str]) -> float:
        n = min(4, len(got_W), len(want_W))
        smoothing = SmoothingFunction().method1
        return float(sentence_bleu([want_W], got_W, weights=[1 / n] * n, smoothing_function=smoothing))

    return _of_words(judge, got, want)


def gleu(got: str, want: str) -> float:
    """The n-grams in common, n = 1..4, as a share of the longer text's: BLEU made for single sentences."""
    from nltk.translate.gleu_score import sentence_gleu

    return _of_words(lambda got_W, want_W: sentence_gleu([want_W], got_W), got, want)


def meteor(got: str, want: str) -> float:
    """Words in common, recall counting nine times precision, less a penalty for being out of order.

    A word matches the same word or one of the same stem (Porter). The original also matches synonyms, from
    WordNet, whose data would have to be downloaded: here "big" does not match "large", so scores are never
    above those of the original. The same text scores just below 1 (0.996 for five words), as in the original.
    """
    from nltk.translate.meteor_score import single_meteor_score

    synonyms = _NoSynonyms()
    return _of_words(
        lambda got_W, want_W: single_meteor_score(want_W, got_W, wordnet=synonyms),
        got,
        want,
    )


def rouge(kind: str, got: str, want: str) -> float:
    """F-measure of the n-grams, or for "rougeL" of the longest common subsequence, of the two texts.

    ROUGE's words are of the letters a-z and digits, so a text in another script has none and scores 0, as do
    two texts without any n words in a row.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    if got == want == "":
        return 1.0
    # Without a tokenizer every scorer writes a line into the log that it takes this one.
    scorer = RougeScorer([kind], tokenizer=DefaultTokenizer())
    return float(scorer.score(want, got)[kind].fmeasure)


class _NoSynonyms:
    """Stands in for NLTK's WordNet reader, which would look for data that is not there."""

    def synsets(self, word: str) -> list[object]:
        return []


def _of_words(judge: Callable[[Sequence[str], Sequence[str]], float], got: str, want: str) -> float:
    got_W, want_W = _WORD.findall(got), _WORD.findall(want)
    if not got_W or not want_W:
        return float(got_W == want_W)
    return min(1.0, max(0.0, float(judge(got_W, want_W))))  # a geometric mean of ones may end a bit above 1


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
