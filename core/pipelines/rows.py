"""The rows of the files that stages make: sampled answers, a selection of them, and a mixture of files.

A row of a `sample` stage is the row of the prompt with these fields:

    {"messages": [...the prompt], "sample": {"answer": "4", "score": 1.0, "finish_reason": "stop", "prompt": 17}, ...}

`prompt` is the line of the prompt in its file, from 1; `score` is null without a grader, or where the answer could not
be graded.
"""

import hashlib
import heapq
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Literal, TypeVar

Row = dict[str, Any]
Placed = TypeVar("Placed", tuple[bytes, int], tuple[bytes, bytes])
# Of answers to one prompt that a selection compares with each other: as many as a sample stage makes.
MAX_ANSWERS = 256
# Of a mixture, and of each file of it.
MAX_LINES = 1_000_000
# Lines that are sorted at once: a sort holds the interpreter, and with it every request of the process.
SORTED_LINES = 50_000
# Of an answer whose similarity to others is computed.
COMPARED_WORDS = 1000
Form = Literal["supervised", "dpo", "prompts", "samples"]


@dataclass(frozen=True)
class Selection:
    """The conditions of a `select` stage; None: no such condition.

    Attributes:
        form: supervised (the prompt and the answer), dpo (the best and the worst answer to a prompt), prompts (the
            prompts of which an answer is kept, with their `pass_rate`, for a reinforcement job), or samples (the rows
            as they are).
        min_score, max_score: Inclusive. An answer without a score is dropped if either is given.
        min_pass_rate, max_pass_rate: Of the mean score of all answers to a prompt, inclusive.
        best: Of the answers to a prompt, keep this many with the highest scores; earlier ones first among equals.
        min_characters, max_characters: Of the answer, inclusive.
        script: Unicode script that at least `script_share` of the answer's letters must have, such as LATIN or CJK.
        max_similarity: Drop an answer whose words' 3-grams overlap more than this with a kept one to the same prompt.
    """

    form: Form = "supervised"
    min_score: float | None = None
    max_score: float | None = None
    min_pass_rate: float | None = None
    max_pass_rate: float | None = None
    best: int | None = None
    min_characters: int | None = None
    max_characters: int | None = None
    finished: bool = True
    deduplicate: bool = True
    script: str | None = None
    script_share: float = 0.9
    max_similarity: float | None = None


def checked(row: Row) -> Row:
    """The row, if it is one of a `sample` stage.

    Raises:
        ValueError: it is not.
    """
    sample = row.get("sample")
    messages = row.get("messages")
    if not isinstance(sample, dict) or not isinstance(messages, list):
        raise ValueError("a row has no 'sample' and 'messages', as those of a sample stage do")
    score = sample.get("score")
    # An integer may be beyond every float, which math.isfinite cannot say.
    is_number = (
        isinstance(score, int | float) and not isinstance(score, bool) and abs(score) <= sys.float_info.max
    )
    if (
        not isinstance(sample.get("answer"), str)
        or not isinstance(sample.get("finish_reason"), str)
        or not isinstance(sample.get("prompt"), int)
        or not (score is None or is_number)
    ):
        raise ValueError(
            "a 'sample' needs an answer, a score or null, a finish_reason and the number of its prompt"
        )
    return row


def selected(samples: Iterable[Row], wanted: Selection) -> Iterator[Row]:
    """The rows that a selection keeps, in order. `samples` has the answers to a prompt next to each other.

    Raises:
        ValueError: a prompt has more than MAX_ANSWERS answers.
    """
    seen: set[bytes] = set()
    for _, group in groupby(samples, key=lambda row: row["sample"]["prompt"]):
        rows = list(islice(group, MAX_ANSWERS + 1))
        if len(rows) > MAX_ANSWERS:
            raise ValueError(f"a prompt has more than {MAX_ANSWERS} answers next to each other")
        rate = pass_rate(rows)
        if not _has_pass_rate(rate, wanted):
            continue
        kept = [row for row in rows if _fits(row, wanted)]
        if wanted.deduplicate:
            kept = [row for row in kept if _is_new(row, seen)]
        if wanted.max_similarity is not None:
            kept = _diverse(kept, wanted.max_similarity)
        if wanted.best is not None:
            kept = _best(kept, wanted.best)
        yield from _shaped(kept, rate, wanted.form)


def pass_rate(rows: Sequence[Row]) -> float | None:
    """The mean score of the answers to a prompt; None: none was graded."""
    scores = [row["sample"]["score"] for row in rows if row["sample"]["score"] is not None]
    return sum(scores) / len(scores) if scores else None


def _has_pass_rate(rate: float | None, wanted: Selection) -> bool:
    if wanted.min_pass_rate is None and wanted.max_pass_rate is None:
        return True
    return rate is not None and _within(rate, wanted.min_pass_rate, wanted.max_pass_rate)


def _within(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _fits(row: Row, wanted: Selection) -> bool:
    answer, score = row["sample"]["answer"], row["sample"]["score"]
    is_scored = wanted.min_score is not None or wanted.max_score is not None
    if is_scored and (score is None or not _within(score, wanted.min_score, wanted.max_score)):
        return False
    if wanted.finished and row["sample"]["finish_reason"] != "stop":
        return False
    if not _within(len(answer), wanted.min_characters, wanted.max_characters):
        return False
    return wanted.script is None or script_share(answer, wanted.script) >= wanted.script_share


def script_share(text: str, script: str) -> float:
    """The share of the letters whose Unicode name begins with `script`, such as LATIN; 1 without any letter."""
    letters = [sign for sign in text if sign.isalpha()]
    if not letters:
        return 1.0
    return sum(unicodedata.name(sign, "").startswith(script) for sign in letters) / len(letters)


def _is_new(row: Row, seen: set[bytes]) -> bool:
    """Whether no kept answer to the same messages has the same text, apart from white space."""
    text = json.dumps([row["messages"], " ".join(row["sample"]["answer"].split())], sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def _diverse(rows: Sequence[Row], most: float) -> list[Row]:
    """Answers of the highest scores first, each unless it is too similar to one before; in the order of the rows."""
    kept: list[tuple[int, frozenset[tuple[str, ...]]]] = []
    for index in sorted(range(len(rows)), key=lambda one: -_score(rows[one])):
        grams = trigrams(rows[index]["sample"]["answer"])
        if all(similarity(grams, other) <= most for _, other in kept):
            kept.append((index, grams))
    return [rows[index] for index in sorted(index for index, _ in kept)]


def trigrams(text: str) -> frozenset[tuple[str, ...]]:
    """The runs of three words, of the first COMPARED_WORDS; of a shorter text, all of its words as one."""
    words = text.lower().split()[:COMPARED_WORDS]
    return frozenset(tuple(words[start : start + 3]) for start in range(max(1, len(words) - 2)))


def similarity(a: frozenset[Any], b: frozenset[Any]) -> float:
    """Jaccard's index, from 0 to 1."""
    return len(a & b) / len(a | b)


def _best(rows: Sequence[Row], number: int) -> list[Row]:
    order = sorted(range(len(rows)), key=lambda one: -_score(rows[one]))[:number]
    return [rows[index] for index in sorted(order)]


def _score(row: Row) -> float:
    score = row["sample"]["score"]
    return float("-inf") if score is None else float(score)


def _shaped(rows: Sequence[Row], rate: float | None, form: Form) -> Iterator[Row]:
    if not rows:
        return
    if form == "samples":
        yield from rows
    elif form == "supervised":
        yield from ({"messages": [*row["messages"], _answer(row)]} for row in rows)
    elif form == "prompts":
        prompt = {name: value for name, value in rows[0].items() if name != "sample"}
        yield prompt if rate is None else prompt | {"pass_rate": rate}
    else:
        best, worst = max(rows, key=_score), min(rows, key=_score)
        if _score(best) > _score(worst):
            yield {
                "input": {"messages": best["messages"]},
                "preferred_output": [_answer(best)],
                "non_preferred_output": [_answer(worst)],
            }


def _answer(row: Row) -> dict[str, str]:
    return {"role": "assistant", "content": row["sample"]["answer"]}


@dataclass(frozen=True)
class Part:
    """One file of a mixture: `lines` reads it from its beginning."""

    lines: Callable[[], Iterator[bytes]]
    weight: float


def mixed(
    parts: Sequence[Part],
    seed: int,
    *,
    most: int = MAX_LINES,
    most_bytes: int | None = None,
    sorted_at_once: int = SORTED_LINES,
) -> Iterator[bytes]:
    """At most `most` lines of a mixture, of files of at most as many, shuffled.

    A weight of 1 takes each line of the file once, 0.1 a tenth of the lines, 2.5 each twice and half of them a third
    time. The same files, weights and seed give the same bytes.

    Holds the lines in memory: those of the mixture and of one file.

    Raises:
        ValueError: there are more lines, or more than `most_bytes` in the mixture.
    """
    chosen: list[tuple[bytes, bytes]] = []
    size = 0
    for number, part in enumerate(parts):
        lines = list(islice((line for line in part.lines() if line.strip()), most + 1))
        if len(lines) > most:
            raise ValueError(f"a file of the mixture has more than {most:,} lines")
        whole, rest = divmod(part.weight, 1)
        if len(chosen) + round(part.weight * len(lines)) > most:
            raise ValueError(f"the mixture has more than {most:,} lines")
        for copy in range(int(whole) + 1):
            places = [(_place(seed, number, copy, index), index) for index in range(len(lines))]
            if copy == whole:
                places = list(islice(_ordered(places, sorted_at_once), round(rest * len(lines))))
            size += sum(len(lines[index]) for _, index in places)
            if most_bytes is not None and size > most_bytes:
                raise ValueError(f"the mixture is larger than {most_bytes:,} bytes, the limit of an upload")
            chosen += [(place, lines[index]) for place, index in places]
    for _, line in _ordered(chosen, sorted_at_once):
        yield line.rstrip(b"\r\n") + b"\n"


def _ordered(placed: Sequence[Placed], at_once: int) -> Iterator[Placed]:
    """Sorted, without one long call."""
    starts = range(0, len(placed), at_once)
    return heapq.merge(*(sorted(placed[start : start + at_once]) for start in starts))


def _place(*where: int) -> bytes:
    return hashlib.sha256(repr(where).encode()).digest()


def prompts(rows: Iterable[Row], samples: int) -> Iterator[Row]:
    """The rows of an eval run that answers each prompt `samples` times: its messages up to the last user's.

    Raises:
        ValueError: a row has no messages, or none that an assistant could answer.
    """
    for number, row in enumerate(rows, 1):
        messages = row.get("messages")
        if not isinstance(messages, list):
            raise ValueError(f"line {number} has no list of 'messages'")
        asked = list(messages)
        while asked and isinstance(asked[-1], dict) and asked[-1].get("role") == "assistant":
            asked.pop()
        if not asked:
            raise ValueError(f"line {number} has no message to answer")
        for _ in range(samples):
            yield {"item": row | {"messages": asked}}


def answered(item: Row, samples: int) -> Row | None:
    """The row of a `sample` stage for an item of its eval run; None: there is no answer."""
    output = item["sample"]["output"]
    if not output:
        return None
    prompt: Row = item["datasource_item"]
    return prompt | {
        "sample": {
            "answer": output[0]["content"],
            "score": item["results"][0]["score"] if item["results"] else None,
            "finish_reason": item["sample"]["finish_reason"],
            "prompt": (item["line"] - 1) // samples + 1,
        }
    }
