"""Statistics of the answers of a step that do not depend on the grader alone. Pure functions, linear in its tokens."""

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from statistics import fmean

from core.rewards import all_equal
from worker.types import Group, Rollout

REPEATED = 4  # tokens of a run that occurs again in an answer
COPIED = 6  # tokens of a run that an answer has from its prompt
MOSTLY = 0.5  # an answer is copied if this share of its runs is in the prompt
MIN_PROMPTS = (
    8  # with fewer, answers to different prompts are the same by chance where few answers are possible
)
MIXED = 0.1  # of the letters of an answer are of a script that is not expected
# The first words of the names of Japanese letters; the last two are of ー and 々.
_JAPANESE = ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC")
_WORDS = re.compile(r"[^\W\d_]{2,}")


def of_answers(train_P: Sequence[Group]) -> dict[str, float]:
    """The metrics of a step's answers, without those that there are no answers for."""
    data = _length_reward(train_P)
    copied = [
        share
        for group in train_P
        for share in copied_shares(
            group.prompt.ids, [one.output_ids_T for one in group.rollouts_G if not _is_field(one, group)]
        )
    ]
    repeated = [
        share
        for group in train_P
        for one in group.rollouts_G
        if (share := repeated_share(one.output_ids_T)) is not None
    ]
    if copied:
        data["copied_prompt_share"] = fmean(share >= MOSTLY for share in copied)
    if repeated:
        data["repeated_tokens_share"] = fmean(repeated)
    if (same := same_answers_share(train_P)) is not None:
        data["same_answers_share"] = same
    if mixed := mixed_scripts(train_P):
        data["foreign_script_share"] = fmean(mixed)
    return data


def same_answers_share(groups_P: Sequence[Group]) -> float | None:
    """The share of the pairs of answers to different prompts that are the same, apart from case and spaces.

    Answers without text, such as calls of tools, do not count. None: fewer than MIN_PROMPTS prompts have answers.
    """
    by_prompt: dict[tuple[int, ...], Counter[str]] = {}
    for group in groups_P:
        texts = (" ".join(one.content.casefold().split()) for one in group.rollouts_G)
        by_prompt.setdefault(tuple(group.prompt.ids), Counter()).update(filter(None, texts))
    counts_P = [counts for counts in by_prompt.values() if counts]
    if len(counts_P) < MIN_PROMPTS:
        return None
    everywhere = sum(counts_P, Counter[str]())
    same = _pairs(everywhere.values()) - sum(_pairs(counts.values()) for counts in counts_P)
    every = _pairs([everywhere.total()]) - sum(_pairs([counts.total()]) for counts in counts_P)
    return same / every


def _pairs(counts: Iterable[int]) -> int:
    """The pairs within classes of these sizes."""
    return sum(count * (count - 1) // 2 for count in counts)


def mixed_scripts(groups_P: Sequence[Group]) -> list[bool]:
    """Of each answer with words, whether a tenth of its letters is of scripts that are not expected.

    The thought counts as part of the answer. Expected are the scripts of the prompt's row and of the results of tools,
    and Latin letters everywhere: code, names and formulas have them in texts of any language.
    """
    mixed = []
    for group in groups_P:
        expected = {"LATIN"} | _scripts(json.dumps(group.prompt.item, ensure_ascii=False))
        for one in group.rollouts_G:
            if counts := script_counts(f"{one.reasoning}\n{one.content}"):
                known = expected | _scripts(_results_of_tools(one))
                foreign = sum(count for script, count in counts.items() if script not in known)
                mixed.append(foreign >= MIXED * counts.total())
    return mixed


def _results_of_tools(answer: Rollout) -> str:
    messages = answer.episode.messages if answer.episode else ()
    results = [one.get("content") for one in messages if one.get("role") == "tool"]
    return json.dumps(results, ensure_ascii=False)


def _scripts(text: str) -> set[str]:
    return {_script(letter) for letter in set(_plain(text)) if letter.isalpha()}


def script_counts(text: str) -> Counter[str]:
    """The letters of a text by script, without those that stand alone in theirs, such as symbols of a formula."""
    counts: Counter[str] = Counter()
    for word in _WORDS.findall(_plain(text)):
        for script, run in groupby(word, _script):
            letters = sum(1 for _ in run)
            counts[script] += letters if letters > 1 else 0
    return +counts


def _plain(text: str) -> str:
    """The text in Unicode's compatibility form NFKC, without marks on letters, and with spaces for numbers.

    So superscripts, circled digits and mathematical letters count for no script, and vowel signs do not divide
    words.
    """
    if text.isascii():
        return text
    kinds = ((letter, unicodedata.category(letter)[0]) for letter in unicodedata.normalize("NFKC", text))
    return "".join(" " if kind == "N" else letter for letter, kind in kinds if kind != "M")


@cache
def _script(letter: str) -> str:
    """The first word of the letter's name in Unicode, such as CYRILLIC; the scripts of Japanese are CJK."""
    script = unicodedata.name(letter, "?").partition(" ")[0]
    return "CJK" if script in _JAPANESE else script


def _is_field(answer: Rollout, group: Group) -> bool:
    """Whether the answer is a field of its row, such as its reference: then the prompt's text can be right."""
    text = answer.content.strip()
    return any(isinstance(value, str) and value.strip() == text for value in group.prompt.item.values())


def copied_shares(prompt_T: Sequence[int], answers_GT: Sequence[Sequence[int]]) -> list[float]:
    """Of each answer with at least COPIED tokens, the share of its runs of COPIED tokens that the prompt has."""
    known = set(_runs(prompt_T, COPIED))
    return [
        fmean(run in known for run in runs) for answer_T in answers_GT if (runs := _runs(answer_T, COPIED))
    ]


def repeated_share(answer_T: Sequence[int]) -> float | None:
    """The share of the answer's runs of REPEATED tokens that occurred before in it; None: it is shorter."""
    runs = _runs(answer_T, REPEATED)
    return 1 - len(set(runs)) / len(runs) if runs else None


def _runs(tokens_T: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens_T[start:] for start in range(size)), strict=False))


def _length_reward(train_P: Sequence[Group]) -> dict[str, float]:
    """Pearson's correlation of length and reward among the answers to one prompt, and its z value.

    Both are centered on their group, so a prompt with long answers and high rewards does not count. Without a relation
    the mean of r sqrt(n) is 0 and its variance 1, with n the answers less one for each group. Answers that reached the
    token limit do not count: they are long and wrong, and fewer of them are progress.
    """
    lengths: list[float] = []
    rewards: list[float] = []
    freedom = 0
    for group in train_P:
        pairs = [
            (float(len(one.output_ids_T)), grade.score)
            for one, grade in zip(group.rollouts_G, group.grades_G, strict=True)
            if grade.score is not None and not one.is_truncated
        ]
        scores = [score for _, score in pairs]
        if len(pairs) < 2 or all_equal(scores):
            continue
        freedom += len(pairs) - 1
        length, reward = fmean(tokens for tokens, _ in pairs), fmean(scores)
        lengths += [tokens - length for tokens, _ in pairs]
        rewards += [score - reward for score in scores]
    square = math.sqrt(math.fsum(x * x for x in lengths) * math.fsum(y * y for y in rewards))
    if not square:
        return {}
    correlation = math.fsum(x * y for x, y in zip(lengths, rewards, strict=True)) / square
    return {
        "length_reward_correlation": correlation,
        "length_reward_z": correlation * math.sqrt(freedom),
    }
