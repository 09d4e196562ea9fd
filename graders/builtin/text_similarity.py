"""text_similarity: the similarity of two rendered texts, from 0 to 1.

OpenAI documents the names of its metrics but not their settings. Each metric here uses the default settings of the
best known library unless its docstring says otherwise. The similarity of two empty texts is 1; that of an empty text
and any other is 0.

bleu, gleu and meteor split a text into runs of letters and digits, and single punctuation marks; bleu and gleu are
case-sensitive. ROUGE splits it into runs of a-z and 0-9 in lower case. Only meteor applies stemming.

OpenAI does not document its tokenizer. These are the defaults of NLTK's examples and of rouge-score 0.1.2, the version
in OpenAI's image for graders. `tokenizer` "unicode", an extension of OpenAI's API, replaces them for texts in other
scripts (`_unicode_words`); it gives the same score for ASCII texts.
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import ClassVar, Literal

import regex
from rapidfuzz import fuzz

from graders.deadline import standing_still
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
Tokenizer = Literal["unicode"]

# The hazard pool measures longer texts: rouge_l, in Python, takes time proportional to the product of the word counts.
MAX_CHARACTERS_HERE = 2_000
_WORD = re.compile(r"\w+|[^\w\s]")
_ROUGE_WORD = re.compile("[a-z0-9]+")  # of a text in lower case, as rouge_score.tokenize
# Scripts that put no spaces between words: each letter is a word, as in sacreBLEU's tokenizer of Chinese.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"


def _unicode_pattern(also: str) -> str:
    """Return the pattern of a word: a run of letters, digits, marks and `also`, or one letter of an unspaced script."""
    spaced = rf"[\p{{L}}\p{{N}}{also}]--[{_UNSPACED}]"
    return rf"[[\p{{L}}\p{{N}}]&&[{_UNSPACED}]]\p{{M}}*|[{spaced}][[{spaced}]\p{{M}}]*"


_UNICODE_TOKEN = regex.compile(_unicode_pattern("_") + r"|\S", regex.V1)
_UNICODE_ROUGE_WORD = regex.compile(_unicode_pattern(""), regex.V1)
_MARKS = regex.compile(r"[^\p{ccc=0}]{2,}")  # that follow a letter, in any order


@dataclass(frozen=True)
class TextSimilarity:
    """The score is the metric itself; a pass threshold does not change it.

    Texts that exceed the time limit of the hazard pool leave the sample ungraded.
    """

    name: str
    input: Template
    reference: Template
    evaluation_metric: Metric
    tokenizer: Tokenizer | None = None
    pool: HazardPool = field(default_factory=shared, repr=False, compare=False)
    type: ClassVar[str] = "text_similarity"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        try:
            got, want = self.input.render(sample, item), self.reference.render(sample, item)
        except RenderError as absent:
            return Grade(None, str(absent), absent.kind)
        longest = max(len(got), len(want))
        if longest <= MAX_CHARACTERS_HERE:
            score = measure(self.evaluation_metric, got, want, self.tokenizer)
        else:
            try:
                call = self.pool.submit(table.SIMILARITY, self.evaluation_metric, got, want, self.tokenizer)
                with standing_still():  # each call has its own limit, from its start
                    score = await asyncio.wrap_future(call)
            except LimitExceeded as exceeded:
                reason = f"cannot measure {self.evaluation_metric} of {longest} characters: {exceeded}"
                return Grade(None, reason, ErrorKind.other_error)
            except HazardFailed as broken:
                return Grade(None, str(broken), ErrorKind.other_error)
        reason = f"{score:.3f} similar to {quoted(want)}, got {quoted(got)}"
        if (why := too_short(self.evaluation_metric, want, self.tokenizer)) is not None:
            reason = f"{reason}; every answer scores 0, because the reference {why}"
        elif ignores_words(self.evaluation_metric, want[:MAX_CHARACTERS_HERE], self.tokenizer):
            reason = f"{reason}; {_what_it_reads(self.evaluation_metric, want[:MAX_CHARACTERS_HERE])}"
        return Grade(score, reason)


def _what_it_reads(metric: Metric, want: str) -> str:
    """Return what the metric makes of a reference some of whose words it does not read."""
    words = words_of(metric, want, None)
    if "".join(words) == "".join(want.casefold().split()):  # all characters, of a script without spaces
        counted = "1 word" if len(words) == 1 else f"{len(words)} words"
        return f'{metric} reads the reference as {counted}; set "tokenizer": "unicode"'
    return f"{metric} reads only {quoted(' '.join(words))} of the reference"


def measure(metric: Metric, got: str, want: str, tokenizer: Tokenizer | None = None) -> float:
    """Compute the metric of two texts. For long texts, call it in the hazard pool."""
    return fuzzy_match(got, want) if metric == "fuzzy_match" else _OF_WORDS[metric](got, want, tokenizer)


def has_no_word(metric: Metric, text: str, tokenizer: Tokenizer | None) -> bool:
    """Return whether the metric reads no word in the text, so that no text with words is similar to it."""
    return metric in _ROUGE and not _count_rouge_words(text, tokenizer, 1)


def too_short(metric: Metric, text: str, tokenizer: Tokenizer | None) -> str | None:
    """Return why nothing is similar to the text by the metric; None if something is: to an empty text another one."""
    if text and has_no_word(metric, text, tokenizer):
        return "has no letter or digit" if tokenizer else "has no word of a-z and 0-9"
    least = _ROUGE.get(metric, 0)
    words = _count_rouge_words(text, tokenizer, least)
    if 0 < words < least:
        return f"has {words} of the {least} words that {metric} compares"
    return None


def ignores_words(metric: Metric, text: str, tokenizer: Tokenizer | None) -> bool:
    """Return whether the metric reads other words in the text than there are by Unicode, such as "rger" in "Ärger"."""
    if metric == "fuzzy_match" or tokenizer is not None:
        return False
    return words_of(metric, text.casefold(), None) != words_of(metric, text.casefold(), "unicode")


def words_of(metric: Metric, text: str, tokenizer: Tokenizer | None) -> list[str]:
    """Return the words that a metric of words compares."""
    return rouge_words(text, tokenizer) if metric in _ROUGE else tokens(text, tokenizer)


def fuzzy_match(a: str, b: str) -> float:
    """Return the share of characters that two texts have in common, in order: 1 - edits / total length.

    An edit inserts or deletes one character. OpenAI documents that fuzzy_match uses rapidfuzz, but not the scorer.
    This function uses `fuzz.ratio` because it is hard to game: it is symmetric, falls with every edit, and gives no
    credit for an answer hidden in a long text. `WRatio`, the library's default, does give that credit, because it
    takes the best of several partial matches.
    """
    return fuzz.ratio(a, b) / 100


def bleu(got: str, want: str, tokenizer: Tokenizer | None = None) -> float:
    """Return the share of n-grams of `got` that are in `want`: geometric mean over n = 1..4, with a brevity penalty.

    Source: Papineni et al. 2002, section 2.3. Smoothed with method 1 of Chen and Cherry 2014 (0.1 instead of a count of
    0), because otherwise a sentence without a matching 4-gram would score 0. If a text has fewer than four words, n is
    at most the length of the shorter text.
    """
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu  # takes 1.5 s, so only when needed

    def judge(got_W: Sequence[str], want_W: Sequence[str]) -> float:
        n = min(4, len(got_W), len(want_W))
        smoothing = SmoothingFunction().method1
        return float(sentence_bleu([want_W], got_W, weights=[1 / n] * n, smoothing_function=smoothing))

    return _of_words(judge, got, want, tokenizer)


def gleu(got: str, want: str, tokenizer: Tokenizer | None = None) -> float:
    """Return the n-grams in common, n = 1..4, as a share of those of the longer text: BLEU for single sentences.

    Source: Wu et al. 2016 (arXiv 1609.08144), section 4.3.
    """
    from nltk.translate.gleu_score import sentence_gleu

    return _of_words(lambda got_W, want_W: sentence_gleu([want_W], got_W), got, want, tokenizer)


def meteor(got: str, want: str, tokenizer: Tokenizer | None = None) -> float:
    """Return METEOR: words in common, with recall weighted nine times precision, less a penalty for word order.

    A word matches the same word or one of the same stem (Porter). The original also matches synonyms from WordNet,
    whose data would have to be downloaded: here "big" does not match "large", so scores are never above those of the
    original.

    Source: Banerjee and Lavie 2005, section 2.2, with a penalty of 0.5 (chunks / matches)^3. So equal texts of n words
    score 1 - 0.5 / n^3, as in the original: 0.5 for one word, 0.996 for five.
    """
    from nltk.translate.meteor_score import single_meteor_score

    synonyms = _NoSynonyms()
    return _of_words(
        lambda got_W, want_W: single_meteor_score(want_W, got_W, wordnet=synonyms),
        got,
        want,
        tokenizer,
    )


def rouge(kind: str, got: str, want: str, tokenizer: Tokenizer | None = None) -> float:
    """Return the F-measure of the n-grams of two texts, or for "rougeL" of their longest common subsequence.

    Source: Lin 2004, sections 2 and 3.1. Without a tokenizer, its words consist of the letters a-z and digits, as in
    rouge-score, so a text in another script has no words and scores 0. Texts with fewer than n words score 0 as well.
    """
    from rouge_score.rouge_scorer import RougeScorer

    if got == want == "":
        return 1.0
    scorer = RougeScorer([kind], tokenizer=_RougeTokenizer(tokenizer))
    return float(scorer.score(want, got)[kind].fmeasure)


class _NoSynonyms:
    """Replaces NLTK's WordNet reader, whose data is not installed."""

    def synsets(self, word: str) -> list[object]:
        return []


@dataclass(frozen=True)
class _RougeTokenizer:
    """Implements the tokenizer of rouge_score."""

    kind: Tokenizer | None

    def tokenize(self, text: str) -> list[str]:
        return rouge_words(text, self.kind)


def rouge_words(text: str, tokenizer: Tokenizer | None) -> list[str]:
    """Return the words that ROUGE compares, in lower case and without punctuation."""
    if tokenizer == "unicode":
        return _unicode_words(_UNICODE_ROUGE_WORD, text.casefold())
    return _ROUGE_WORD.findall(text.lower())


def _count_rouge_words(text: str, tokenizer: Tokenizer | None, most: int) -> int:
    """Return the number of the words that ROUGE compares, but at most `most`: a text may have a million."""
    if tokenizer == "unicode":
        words = _UNICODE_ROUGE_WORD.finditer(composed(text.casefold()))
    else:
        words = _ROUGE_WORD.finditer(text.lower())
    return sum(1 for _ in islice(words, most))


def tokens(text: str, tokenizer: Tokenizer | None) -> list[str]:
    """Return the words and punctuation marks that bleu, gleu and meteor compare."""
    return _WORD.findall(text) if tokenizer is None else _unicode_words(_UNICODE_TOKEN, text)


def _unicode_words(words: regex.Pattern[str], text: str) -> list[str]:
    """Split by the letters, digits and marks of Unicode; the spellings of an accent are equal (form NFC)."""
    return list(words.findall(composed(text)))


def composed(text: str) -> str:
    """Return the text in form NFC, in nearly linear time.

    CPython sorts the marks after a letter by insertion: 0.6 s for 20,000 marks, half an hour for a million, in which no
    other thread runs. Marks that are in their canonical order already are not moved.
    """
    ordered = _MARKS.sub(lambda marks: "".join(sorted(marks[0], key=unicodedata.combining)), text)
    return unicodedata.normalize("NFC", ordered)


def _of_words(
    judge: Callable[[Sequence[str], Sequence[str]], float], got: str, want: str, tokenizer: Tokenizer | None
) -> float:
    got_W, want_W = tokens(got, tokenizer), tokens(want, tokenizer)
    if not got_W or not want_W:
        return float(got_W == want_W)
    return min(1.0, max(0.0, float(judge(got_W, want_W))))  # rounding: a mean of ones may exceed 1


# The least number of words that a text needs for a score above 0.
_ROUGE: dict[Metric, int] = {
    "rouge_1": 1,
    "rouge_2": 2,
    "rouge_3": 3,
    "rouge_4": 4,
    "rouge_5": 5,
    "rouge_l": 1,
}
_OF_WORDS: dict[Metric, Callable[[str, str, Tokenizer | None], float]] = {
    "bleu": bleu,
    "gleu": gleu,
    "meteor": meteor,
    **{metric: partial(rouge, metric.replace("_", "").replace("l", "L")) for metric in _ROUGE},
}
