"""Profile of a dataset file: lengths, duplicates, overlap with another file, and the fields of its rows.

A file is read once, a line at a time. Of each row only two hashes, a line number and a length are kept: 32 MB of a
million rows. Rows whose tokens are counted wait for a batch, of BATCH rows or BATCH_CHARACTERS.
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from core.conversations import text_of
from core.prompt_tokens import CannotCount, ChatTokens, TokenCounter
from core.storage.datasets import PROMPTS, Example, LineError, Problems, RowForm, read_objects, read_rows
from core.storage.offline_rows import FORMS, is_labeled, method_of, reward_kind

Method = Literal["reinforcement", "supervised", "dpo", "reward_model"]
Numbers = NDArray[Any]

MAX_ROWS = 1_000_000
# Rows whose tokens are counted: all of a training file of a reinforcement job, which has at most 50,000, else a sample.
MAX_COUNTED = 50_000
MAX_FIELDS = 100
MAX_SHOWN = 20  # lines and pairs of lines
MAX_DISTINCT = 1000
EXAMPLE_CHARACTERS = 120
# Longer keys are left out: 100 of them could be as large as the file.
MAX_NAME = 256
BINS = 20
BATCH = 256
BATCH_CHARACTERS = 4 << 20  # of JSON; a row may have as many alone


@dataclass(frozen=True)
class LengthBin:
    """Rows of at least `low` and less than `high`."""

    low: int
    high: int
    rows: int


@dataclass(frozen=True)
class Lengths:
    """The distribution of a length over rows."""

    rows: int
    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int
    bins: list[LengthBin]


@dataclass(frozen=True)
class SomeLines:
    """A number of rows, and the first lines of them."""

    rows: int
    lines: list[int]


@dataclass(frozen=True)
class TokenLengths(Lengths):
    """Tokens as the chat template of the model renders a row: of its prompt, or with its answers for other methods.

    `rows` is smaller than the rows of the file if it has more than 50,000: then a uniform sample is counted.
    """

    room: Annotated[int, Field(description="The most that a row may have.")]
    too_long: Annotated[
        SomeLines, Field(description="Of the counted rows: those with more tokens than `room`.")
    ]
    not_rendered: Annotated[
        SomeLines, Field(description="Of the counted rows: those that the chat template rejects.")
    ]
    special_texts: Annotated[
        SomeLines,
        Field(
            description="Of the counted rows: those whose content has the text of a special token, which is read and "
            "learned as text."
        ),
    ]


@dataclass(frozen=True)
class ProfiledField:
    """A key of the rows, which graders read as `item.<name>`."""

    name: str
    rows: int
    missing: int
    types: dict[str, int]
    distinct: Annotated[int | None, Field(description="Different values; null: more than 1000.")]
    example: Annotated[str, Field(description="The first value, at most 120 characters of its JSON.")]


@dataclass(frozen=True)
class GraderPath:
    """A path that the grader reads, and the rows that lack it."""

    path: str
    missing: SomeLines


@dataclass(frozen=True)
class RowDoubt:
    """A reason why the grader cannot tell the answers to some rows apart, as the end of a sentence "This row ..."."""

    message: str
    found: SomeLines


@dataclass(frozen=True)
class GraderReads:
    """The fields that the templates of a grader read, and the rows that it can learn nothing from."""

    paths: list[GraderPath]
    not_listed: Annotated[
        bool, Field(description="A python grader or an endpoint may read other fields as well.")
    ]
    no_grader: Annotated[
        SomeLines | None,
        Field(description="Rows for which a select grader has no grader; null: it is not one."),
    ]
    no_word: Annotated[
        SomeLines,
        Field(description="Rows in whose reference a text_similarity finds no word, which a job rejects."),
    ]
    doubts: Annotated[list[RowDoubt], Field(description="A job accepts these rows, and warns of them.")]


@dataclass(frozen=True)
class Duplicates:
    """Rows whose prompt occurs in an earlier row."""

    rows: int
    identical: Annotated[int, Field(description="Of these, rows that equal an earlier row in every field.")]
    prompts: Annotated[int, Field(description="Different prompts that occur more than once.")]
    lines: Annotated[list[list[int]], Field(description="The first lines of the first such prompts.")]


@dataclass(frozen=True)
class Overlap:
    """Rows of the validation file whose prompt is also in this file."""

    file: str
    rows: Annotated[int, Field(description="Valid rows of the validation file.")]
    shared: int
    lines: Annotated[
        list[list[int]], Field(description="Pairs: a line of the validation file, and one of this file.")
    ]


@dataclass(frozen=True)
class RowProblem:
    """A problem of a row, and the number of other lines that have it."""

    line: Annotated[int, Field(description="The first one.")]
    path: str
    message: str
    more_lines: Annotated[int, Field(description="Further lines with the same problem.")]


@dataclass(frozen=True)
class Profile:
    """The profile of a file. Rows with problems count in `invalid` only."""

    method: Method
    rows: int
    is_whole: bool  # false: only the first million rows were read
    invalid: int
    problems: list[RowProblem]
    characters: Lengths | None  # of the text of the prompt; None without a valid row
    tokens: TokenLengths | None
    tokens_reason: str | None  # the reason if the tokens were not counted
    duplicates: Duplicates
    overlap: Overlap | None
    fields: list[ProfiledField]
    grader: GraderReads | None


@dataclass(frozen=True)
class Reader:
    """The fields that a grader reads. `missing` returns the paths that a row lacks, `chooses` whether a grader is
    chosen for it, `lacks_word` whether a reference of it has no word, `doubts` what is doubtful about it.
    """

    paths: Sequence[str]
    missing: Callable[[dict[str, Any]], Sequence[str]]
    lacks_word: Callable[[dict[str, Any]], bool]
    doubts: Callable[[dict[str, Any]], Sequence[str]]
    not_listed: bool
    chooses: Callable[[dict[str, Any]], bool] | None = None


@dataclass(frozen=True)
class TokenRoom:
    """How to count tokens, and how many a row may have."""

    counter: TokenCounter
    tokens: int


def profile(
    chunks: Iterable[bytes],
    *,
    method: Method,
    room: TokenRoom | None,
    tokens_reason: str | None = None,
    reader: Reader | None = None,
    validation: tuple[str, Iterable[bytes]] | None = None,
    max_rows: int = MAX_ROWS,
    max_counted: int = MAX_COUNTED,
) -> Profile:
    """Read the file once, and the validation file once.

    Args:
        room: None: tokens are not counted, because of `tokens_reason`.
        validation: the id and the content of the validation file.
    """
    form = form_of(method)
    seen = _Seen()
    problems = Problems()
    bad_lines: set[int] = set()
    fields = _Fields()
    read = None if reader is None else _ReadCount(reader)
    counts = None if room is None else _TokenCount(room, method, max_counted)
    is_whole = True
    for row in read_rows(chunks, form=form):
        if isinstance(row, LineError):
            bad_lines.add(row.line)
            problems.add(row)
            continue
        if len(seen.lines) == max_rows:
            is_whole = False
            break
        seen.add(row)
        fields.add(row.item)
        if read is not None:
            read.add(row)
        if counts is not None:
            counts.add(row)
    rows = len(seen.lines)
    tokens = None if counts is None else counts.end()
    return Profile(
        method=method,
        rows=rows,
        is_whole=is_whole,
        invalid=len(bad_lines),
        problems=[
            RowProblem(error.line, _short(error.path), error.message, error.more_lines)
            for error in problems.errors
        ],
        characters=lengths(seen.characters) if rows else None,
        tokens=tokens,
        tokens_reason=tokens_reason if counts is None else counts.reason,
        duplicates=seen.duplicates(),
        overlap=None if validation is None else seen.overlap(*validation, form=form, max_rows=max_rows),
        fields=fields.end(rows),
        grader=None if read is None else read.end(),
    )


def _short(path: str) -> str:
    """A path may have a key of megabytes."""
    return path if len(path) <= MAX_NAME else f"{path[:MAX_NAME]}…"


def detect(chunks: Iterable[bytes]) -> Method:
    """The method that the first row is made for; reinforcement if it is unknown."""
    first = next((row for row in read_objects(chunks) if isinstance(row, tuple)), None)
    found = None if first is None else method_of(first[1])
    return cast(Method, found or "reinforcement")


def form_of(method: Method) -> RowForm:
    return PROMPTS if method == "reinforcement" else FORMS[method]


def lengths(values: Sequence[int]) -> Lengths:
    """Return the distribution of these lengths, of which there must be at least one."""
    found = np.asarray(values, dtype=np.int64)
    low, high = int(found.min()), int(found.max())
    width = -(-(high - low + 1) // BINS)
    edges = np.arange(low, high + width + 1, width)
    p50, p90, p99 = (float(value) for value in np.percentile(found, [50, 90, 99]))
    bins = [
        LengthBin(int(start), int(start) + width, int(rows))
        for start, rows in zip(edges, np.histogram(found, edges)[0], strict=False)
    ]
    return Lengths(len(found), float(found.mean()), low, p50, p90, p99, high, bins)


def _hash(value: Any) -> int:
    """64 bits: two of a million different rows collide with a probability of 3e-8."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _prompt(row: Example) -> Any:
    """The part of a row that is equal in rows with the same prompt."""
    messages = list(row.messages)
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()  # the answers of a supervised row, or of one for a reward model
    given = row.item.get("input")
    tools = row.item.get("tools") or (given.get("tools") if isinstance(given, Mapping) else None)
    return [_plain(message) for message in messages], tools or None


def _plain(message: Mapping[str, Any]) -> list[Any]:
    return [message.get("role"), text_of(message.get("content")), message.get("tool_calls") or None]


def _type(value: Any) -> str:
    """The type in JSON."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


class _Seen:
    """The hashes, lines and lengths of the rows so far, in arrays of 64 bits."""

    def __init__(self) -> None:
        self.prompts, self.items = array("Q"), array("Q")
        self.lines, self.characters = array("q"), array("q")

    def add(self, row: Example) -> None:
        prompt = _prompt(row)
        self.prompts.append(_hash(prompt))
        self.items.append(_hash(row.item))
        self.lines.append(row.line)
        self.characters.append(sum(len(message[1]) for message in prompt[0]))

    def duplicates(self) -> Duplicates:
        found, first, counts = np.unique(_array(self.prompts), return_index=True, return_counts=True)
        different = len(np.unique(_array(self.items)))
        several = np.flatnonzero(counts > 1)
        several = several[np.argsort(first[several])][:MAX_SHOWN]
        lines, prompts = np.asarray(self.lines), _array(self.prompts)
        return Duplicates(
            rows=len(self.lines) - len(found),
            identical=len(self.lines) - different,
            prompts=int((counts > 1).sum()),
            lines=[lines[np.flatnonzero(prompts == found[index])[:5]].tolist() for index in several],
        )

    def overlap(self, file: str, chunks: Iterable[bytes], *, form: RowForm, max_rows: int) -> Overlap:
        others = _Seen()
        for row in read_rows(chunks, form=form):
            if isinstance(row, Example):
                if len(others.lines) == max_rows:
                    break
                others.add(row)
        found, first = np.unique(_array(self.prompts), return_index=True)
        theirs = _array(others.prompts)
        shared = np.flatnonzero(np.isin(theirs, found))
        mine = first[np.searchsorted(found, theirs[shared[:MAX_SHOWN]])]
        pairs = zip(shared[:MAX_SHOWN].tolist(), mine.tolist(), strict=True)
        return Overlap(
            file=file,
            rows=len(others.lines),
            shared=len(shared),
            lines=[[others.lines[other], self.lines[own]] for other, own in pairs],
        )


def _array(values: Any) -> Numbers:
    return np.asarray(values, dtype=np.uint64)


class _FieldCount:
    def __init__(self) -> None:
        self.rows, self.types, self.example = 0, Counter[str](), ""
        self._values: set[int] | None = set()

    def add(self, value: Any) -> None:
        if not self.rows:
            self.example = json.dumps(value, ensure_ascii=False)[:EXAMPLE_CHARACTERS]
        self.rows += 1
        self.types[_type(value)] += 1
        if self._values is not None:
            self._values.add(_hash(value))
            if len(self._values) > MAX_DISTINCT:
                self._values = None

    def end(self, name: str, rows: int) -> ProfiledField:
        distinct = None if self._values is None else len(self._values)
        return ProfiledField(
            name, self.rows, rows - self.rows, dict(self.types.most_common()), distinct, self.example
        )


class _Fields:
    """The first MAX_FIELDS keys of the rows. Names above MAX_NAME are not counted."""

    def __init__(self) -> None:
        self._counts: dict[str, _FieldCount] = {}

    def add(self, item: dict[str, Any]) -> None:
        for name, value in item.items():
            if name not in self._counts and len(self._counts) < MAX_FIELDS and len(name) <= MAX_NAME:
                self._counts[name] = _FieldCount()
            if name in self._counts:
                self._counts[name].add(value)

    def end(self, rows: int) -> list[ProfiledField]:
        return [count.end(name, rows) for name, count in self._counts.items()]


class _Lines:
    def __init__(self) -> None:
        self.rows, self.first = 0, list[int]()

    def add(self, line: int) -> None:
        self.rows += 1
        if len(self.first) < MAX_SHOWN:
            self.first.append(line)

    def end(self) -> SomeLines:
        return SomeLines(self.rows, self.first)


class _ReadCount:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._missing = {path: _Lines() for path in reader.paths}
        self._unchosen = _Lines()
        self._no_word = _Lines()
        self._doubts: dict[str, _Lines] = {}

    def add(self, row: Example) -> None:
        missing = self._reader.missing(row.item)
        for path in missing:
            self._missing[path].add(row.line)
        if self._reader.chooses is not None and not missing and not self._reader.chooses(row.item):
            self._unchosen.add(row.line)
        if self._reader.lacks_word(row.item):
            self._no_word.add(row.line)
            return
        for doubt in self._reader.doubts(row.item):
            self._doubts.setdefault(doubt, _Lines()).add(row.line)

    def end(self) -> GraderReads:
        paths = [GraderPath(path, lines.end()) for path, lines in self._missing.items()]
        unchosen = None if self._reader.chooses is None else self._unchosen.end()
        doubts = [RowDoubt(message, lines.end()) for message, lines in self._doubts.items()]
        return GraderReads(paths, self._reader.not_listed, unchosen, self._no_word.end(), doubts)


@dataclass
class _TokenCount:
    """Counts the tokens of all rows, or of a uniform sample of `most` of them if there are more.

    The sample has the rows whose hashed line number is divisible by a power of two, which doubles when the sample is
    full, so neither the number of rows nor their texts need to be known before.
    """

    room: TokenRoom
    method: Method
    most: int
    reason: str | None = None
    _every: int = 1
    _waiting: list[tuple[int, list[Mapping[str, Any]]]] = field(default_factory=list)
    _characters: int = 0  # of those that wait
    _counted: dict[int, ChatTokens | None] = field(default_factory=dict)  # by line

    def add(self, row: Example) -> None:
        if self.reason is None and _mixed(row.line) % self._every == 0:
            several: list[Mapping[str, Any]] = list(conversations(self.method, row.item))
            self._waiting.append((row.line, several))
            self._characters += len(json.dumps(several))
            if len(self._waiting) == BATCH or self._characters >= BATCH_CHARACTERS:
                self._flush()

    def end(self) -> TokenLengths | None:
        self._flush()
        if self.reason is not None:
            return None
        long, broken, special, counts = _Lines(), _Lines(), _Lines(), []
        for line, counted in sorted(self._counted.items()):
            if counted is None:
                broken.add(line)
                continue
            counts.append(counted.tokens)
            if counted.tokens > self.room.tokens:
                long.add(line)
            if counted.special_texts:
                special.add(line)
        if not counts:
            self.reason = (
                "the chat template of the model rejects every row" if broken.rows else "there are no rows"
            )
            return None
        return TokenLengths(
            **vars(lengths(counts)),
            room=self.room.tokens,
            too_long=long.end(),
            not_rendered=broken.end(),
            special_texts=special.end(),
        )

    def _flush(self) -> None:
        chats = [chat for _, several in self._waiting for chat in several]
        try:
            counts = iter(self.room.counter.count(chats)) if chats else iter(())
        except CannotCount as cause:
            self.reason = str(cause)
            self._counted.clear()
            counts = iter([None] * len(chats))
        for line, several in self._waiting:
            of_row = [one for one in (next(counts) for _ in several) if one is not None]
            longest = max((one.tokens for one in of_row), default=0)
            has_special = any(one.special_texts for one in of_row)
            self._counted[line] = None if len(of_row) < len(several) else ChatTokens(longest, has_special)
        self._waiting.clear()
        self._characters = 0
        while len(self._counted) > self.most:
            self._every *= 2
            self._counted = {
                line: count for line, count in self._counted.items() if _mixed(line) % self._every == 0
            }


def _mixed(line: int) -> int:
    """Bits of the line number that do not follow a period of the file (the finalizer of MurmurHash3)."""
    mask = (1 << 64) - 1
    line = ((line ^ (line >> 33)) * 0xFF51AFD7ED558CCD) & mask
    line = ((line ^ (line >> 33)) * 0xC4CEB9FE1A85EC53) & mask
    return line ^ (line >> 33)


def conversations(method: Method, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The conversations of a valid row, whose longest one must fit: its prompt, or its prompt with each answer."""
    tools = row.get("tools")
    if method == "reinforcement":
        yield {"messages": row["messages"], "tools": tools, "prompt": True}
    elif method == "dpo" or (method == "reward_model" and reward_kind(row) == "pairs"):
        given = row["input"]
        names = ["output"] if is_labeled(row) else ["preferred_output", "non_preferred_output"]
        for name in names:
            messages = [*given["messages"], *row[name]]
            yield {"messages": messages, "tools": given.get("tools"), "prompt": False}
    else:
        yield {"messages": row["messages"], "tools": tools, "prompt": False}
