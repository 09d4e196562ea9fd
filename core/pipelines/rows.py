"""The rows of the files that stages make: sampled answers, a selection of them, and a mixture of files.

A row of a `sample` stage is the row of the prompt with these fields:

    {"messages": [...the prompt], "sample": {"answer": "4", "score": 1.0, "finish_reason": "stop", "prompt": 17}, ...}

`prompt` is the line of the prompt in its file, from 1; `score` is null without a grader, or where the answer could not
be graded.
"""

import hashlib
import heapq
import json
import os
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Literal

from core.rewards import equal

Row = dict[str, Any]
# Of answers to one prompt that a selection compares with each other: as many as a sample stage makes.
MAX_ANSWERS = 256
# Of those, as JSON. They are compared in memory, where a megabyte of JSON can be 20 MB of objects.
MAX_BYTES_OF_A_PROMPT = 64 << 20
# The sum of MAX_ANSWERS scores is a float.
MAX_SCORE = 1e300
# Of a mixture, of each file of it, and of a selection's file.
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
    is_number = isinstance(score, int | float) and not isinstance(score, bool) and abs(score) <= MAX_SCORE
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


@dataclass(frozen=True)
class _Candidate:
    """A row of a sample stage while the other answers to its prompt are read."""

    prompt: int
    score: float | None
    line: bytes | None  # the row as JSON, far smaller than its objects; None: it does not meet the conditions
    digest: bytes

    def row(self) -> Row:
        assert self.line is not None, "only rows that meet the conditions are kept"
        row: Row = json.loads(self.line)
        return row


def selected(samples: Iterable[Row], wanted: Selection) -> Iterator[Row]:
    """The rows that a selection keeps, in order. `samples` has the answers to a prompt next to each other.

    Raises:
        ValueError: a prompt has more than MAX_ANSWERS answers or MAX_BYTES_OF_A_PROMPT, or there are more than
            MAX_LINES rows.
    """
    seen: set[bytes] = set()
    candidates = (_candidate(row, wanted) for row in _at_most(samples, MAX_LINES))
    for _, group in groupby(candidates, key=lambda candidate: candidate.prompt):
        answers = _compared(group)
        rate = pass_rate([answer.score for answer in answers])
        if not _has_pass_rate(rate, wanted):
            continue
        kept = [answer for answer in answers if answer.line is not None]
        if wanted.deduplicate:
            kept = [answer for answer in kept if _is_new(answer, seen)]
        if wanted.max_similarity is not None:
            kept = _diverse(kept, wanted.max_similarity)
        if wanted.best is not None:
            kept = _best(kept, wanted.best)
        yield from _shaped(kept, rate, wanted.form)


def _at_most(samples: Iterable[Row], most: int) -> Iterator[Row]:
    for number, row in enumerate(samples, 1):
        if number > most:
            raise ValueError(f"the file has more than {most:,} rows")
        yield row


def _candidate(row: Row, wanted: Selection) -> _Candidate:
    sample = row["sample"]
    text = json.dumps([row["messages"], " ".join(sample["answer"].split())], sort_keys=True)
    return _Candidate(
        prompt=sample["prompt"],
        score=sample["score"],
        line=json.dumps(row).encode() if _fits(row, wanted) else None,
        digest=hashlib.sha256(text.encode()).digest()[:16],
    )


def _compared(group: Iterable[_Candidate]) -> list[_Candidate]:
    """The answers to one prompt. Raises ValueError if they are too many or too large to compare."""
    answers: list[_Candidate] = []
    size = 0
    for answer in group:
        answers.append(answer)
        size += len(answer.line or b"")
        if len(answers) > MAX_ANSWERS:
            raise ValueError(f"a prompt has more than {MAX_ANSWERS} answers next to each other")
        if size > MAX_BYTES_OF_A_PROMPT:
            raise ValueError(
                f"the answers to a prompt have more than {MAX_BYTES_OF_A_PROMPT:,} bytes of JSON"
            )
    return answers


def pass_rate(scores: Sequence[float | None]) -> float | None:
    """The mean score of the answers to a prompt; None: none was graded."""
    graded = [score for score in scores if score is not None]
    return sum(graded) / len(graded) if graded else None


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


def _is_new(answer: _Candidate, seen: set[bytes]) -> bool:
    """Whether no kept answer to the same messages has the same text, apart from white space."""
    if answer.digest in seen:
        return False
    seen.add(answer.digest)
    return True


def _diverse(answers: Sequence[_Candidate], most: float) -> list[_Candidate]:
    """Answers of the highest scores first, each unless it is too similar to one before; in the order of the rows."""
    kept: list[tuple[int, frozenset[tuple[str, ...]]]] = []
    for index in sorted(range(len(answers)), key=lambda one: -_score(answers[one])):
        grams = trigrams(answers[index].row()["sample"]["answer"])
        if all(similarity(grams, other) <= most for _, other in kept):
            kept.append((index, grams))
    return [answers[index] for index in sorted(index for index, _ in kept)]


def trigrams(text: str) -> frozenset[tuple[str, ...]]:
    """The runs of three words, of the first COMPARED_WORDS; of a shorter text, all of its words as one."""
    words = text.lower().split(maxsplit=COMPARED_WORDS)[:COMPARED_WORDS]
    return frozenset(tuple(words[start : start + 3]) for start in range(max(1, len(words) - 2)))


def similarity(a: frozenset[Any], b: frozenset[Any]) -> float:
    """Jaccard's index, from 0 to 1."""
    return len(a & b) / len(a | b)


def _best(answers: Sequence[_Candidate], number: int) -> list[_Candidate]:
    order = sorted(range(len(answers)), key=lambda one: -_score(answers[one]))[:number]
    return [answers[index] for index in sorted(order)]


def _score(answer: _Candidate) -> float:
    return float("-inf") if answer.score is None else float(answer.score)


def _shaped(answers: Sequence[_Candidate], rate: float | None, form: Form) -> Iterator[Row]:
    if not answers:
        return
    if form == "samples":
        yield from (answer.row() for answer in answers)
    elif form == "supervised":
        for answer in answers:
            row = answer.row()
            yield {"messages": [*row["messages"], _answer(row)]}
    elif form == "prompts":
        prompt = {name: value for name, value in answers[0].row().items() if name != "sample"}
        yield prompt if rate is None else prompt | {"pass_rate": rate}
    else:
        best, worst = max(answers, key=_score), min(answers, key=_score)
        if not equal(_score(best), _score(worst)):
            better, worse = best.row(), worst.row()
            yield {
                "input": {"messages": better["messages"]},
                "preferred_output": [_answer(better)],
                "non_preferred_output": [_answer(worse)],
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

    Reads each file twice, and holds the lines in a temporary file, where they need up to `most_bytes`.

    Raises:
        ValueError: there are more lines, or more than `most_bytes` in the mixture.
    """
    chosen: list[bytes] = []
    size = 0
    with tempfile.TemporaryFile() as spool:
        for number, part in enumerate(parts):
            count = _count(part, most)
            whole, rest = divmod(part.weight, 1)
            if len(chosen) + round(part.weight * count) > most:
                raise ValueError(f"the mixture has more than {most:,} lines")
            places = _Places(seed, number)
            has_another = places.first(round(rest * count), count, copy=int(whole), at_once=sorted_at_once)
            for index, line in enumerate(_filled(part)):
                copies = int(whole) + has_another[index]
                size += copies * len(line)
                if most_bytes is not None and size > most_bytes:
                    raise ValueError(
                        f"the mixture is larger than {most_bytes:,} bytes, the limit of an upload"
                    )
                offset = spool.tell()
                if copies:
                    spool.write(line)
                for copy in range(copies):
                    chosen.append(places.of(copy, index) + _span(offset, len(line)))
        spool.flush()
        for entry in _ordered(chosen, sorted_at_once):
            offset, length = _of_span(entry[_PLACE_BYTES:])
            yield os.pread(spool.fileno(), length, offset).rstrip(b"\r\n") + b"\n"


def _filled(part: Part) -> Iterator[bytes]:
    return (line for line in part.lines() if line.strip())


def _count(part: Part, most: int) -> int:
    count = sum(1 for _ in islice(_filled(part), most + 1))
    if count > most:
        raise ValueError(f"a file of the mixture has more than {most:,} lines")
    return count


_PLACE_BYTES = 16


@dataclass(frozen=True)
class _Places:
    """The places of a file's lines in the order of a mixture: hashes, so that they need no memory."""

    seed: int
    number: int  # of the file

    def of(self, copy: int, index: int) -> bytes:
        where = repr((self.seed, self.number, copy, index))
        return hashlib.sha256(where.encode()).digest()[:_PLACE_BYTES]

    def first(self, wanted: int, count: int, *, copy: int, at_once: int) -> bytearray:
        """1 for each of the `wanted` lines that come first in a copy of the file, 0 for the others."""
        flags = bytearray(count)
        if wanted:
            places = [self.of(copy, index) + index.to_bytes(4, "big") for index in range(count)]
            for entry in islice(_ordered(places, at_once), wanted):
                flags[int.from_bytes(entry[_PLACE_BYTES:], "big")] = 1
        return flags


def _span(offset: int, length: int) -> bytes:
    return offset.to_bytes(8, "big") + length.to_bytes(4, "big")


def _of_span(span: bytes) -> tuple[int, int]:
    return int.from_bytes(span[:8], "big"), int.from_bytes(span[8:], "big")


def _ordered(entries: Sequence[bytes], at_once: int) -> Iterator[bytes]:
    """Sorted, without one long call."""
    starts = range(0, len(entries), at_once)
    return heapq.merge(*(sorted(entries[start : start + at_once]) for start in starts))


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
