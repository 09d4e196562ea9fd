"""JSONL -> Example: parses a stream of bytes into one value per row, and reports every error with its line number.

A row is one prompt and any fields for its graders:

    {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}

`messages`, `tools` and `parallel_tool_calls` are reserved; every other key is the user's. Graders read all of them as
`item.<key>`.
"""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .message_rows import ROLES, Problem, conversation_problems, kind, stated, tool_problems

# OpenAI's limits for reinforcement fine-tuning.
MAX_TRAINING_ROWS, MAX_VALIDATION_ROWS = 50_000, 1_000
MAX_REPORTED = 20
MAX_ALSO = 4  # further lines that are named with one error
BLANK = "is blank; remove it"  # a line between others
MAX_LINE_BYTES = 4 << 20  # a prompt is kilobytes; a longer "line" means a file without line ends
MAX_DEPTH = 100
MAX_DIGITS = 400  # more than any float has; Python's own limit is 4300


@dataclass(frozen=True)
class Example:
    """One row: the prompt, and the whole row as graders see it, `messages` included."""

    line: int
    messages: list[dict[str, Any]]
    item: dict[str, Any]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The functions that the answer may call, in OpenAI's format."""
        return self.item.get("tools") or []


@dataclass(frozen=True)
class LineError:
    """An error in a line, and its location. Line 0 is the file as a whole."""

    line: int
    message: str
    path: str = ""
    more_lines: int = 0  # further lines with the same error
    also: tuple[int, ...] = ()  # the first MAX_ALSO of them

    def also_in(self, line: int) -> "LineError":
        """The same error with one more line."""
        also = (*self.also, line)[:MAX_ALSO]
        return replace(self, more_lines=self.more_lines + 1, also=also)

    @property
    def text(self) -> str:
        """The error without its first line, but with the number of further lines that have it."""
        sentence = ": ".join(part for part in (self.path, self.message) if part)
        if not self.more_lines:
            return sentence
        noun = "line" if self.more_lines == 1 else "lines"
        named = [*map(str, self.also), *(["…"] if self.more_lines > len(self.also) else [])]
        which = f": {', '.join(named)}" if self.also else ""
        return f"{sentence} (and in {self.more_lines} more {noun}{which})"

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


class InvalidDataset(ValueError):
    """The first different errors of a file, at most MAX_REPORTED, and the number of further lines with errors."""

    file: str | None = None  # its path, where it is a local file of a job

    def __init__(self, errors: Sequence[LineError], more: int = 0) -> None:
        super().__init__(errors, more)
        self.errors = list(errors)
        self.more = more

    def __str__(self) -> str:
        further = [f"and {self.more} more line(s) with problems"] if self.more else []
        return "\n".join([*map(str, self.errors), *further])


def read_examples(
    chunks: Iterable[bytes],
    *,
    form: "RowForm | None" = None,
    check: Callable[[Example], Iterable[str]] | None = None,
    max_rows: int | None = None,
    min_rows: int = 1,
) -> list[Example]:
    """Read all rows of a valid file; otherwise raise InvalidDataset with the errors of all rows.

    `check` yields further errors of a row. Reading stops at the first row beyond `max_rows`, which is then the only
    error reported.

    Args:
        form: the format of a row; None: a prompt and the fields of its graders.
    """
    examples: list[Example] = []
    problems = Problems()
    for row in _good_rows(chunks, problems, check, max_rows, form):
        if problems.errors:
            examples.clear()  # an invalid file returns no rows
        else:
            examples.append(row)
    problems.refuse(len(examples), min_rows)
    return examples


def count_examples(
    chunks: Iterable[bytes],
    *,
    form: "RowForm | None" = None,
    check: Callable[[Example], Iterable[str]] | None = None,
    max_rows: int | None = None,
    min_rows: int = 1,
) -> int:
    """Count the rows that `read_examples` would return, or raise the same errors. Holds one row at a time."""
    problems = Problems()
    count = sum(1 for _ in _good_rows(chunks, problems, check, max_rows, form))
    problems.refuse(count, min_rows)
    return count


def _good_rows(
    chunks: Iterable[bytes],
    problems: "Problems",
    check: Callable[[Example], Iterable[str]] | None,
    max_rows: int | None,
    form: "RowForm | None" = None,
) -> Iterator[Example]:
    """Yield the valid rows; the errors of the others are added to `problems`."""
    rows, last_line = 0, 0
    for row in read_rows(chunks, form=form):
        if row.line != last_line:  # one line may have several errors
            rows, last_line = rows + 1, row.line
        if max_rows is not None and rows > max_rows:
            raise InvalidDataset([LineError(row.line, f"the file must have at most {max_rows} examples")])
        if isinstance(row, LineError):
            problems.add(row)
            continue
        wrong = [LineError(row.line, problem) for problem in (check(row) if check else ())]
        for problem in wrong:
            problems.add(problem)
        if not wrong:
            yield row


def read_rows(
    chunks: Iterable[bytes], max_line_bytes: int = MAX_LINE_BYTES, *, form: "RowForm | None" = None
) -> Iterator[Example | LineError]:
    """Yield, in file order, an Example for each valid line and one or more LineErrors for each invalid one.

    Holds one line at a time, and never one longer than `max_line_bytes`. The boundaries of the chunks do not matter.
    Blank
    lines are allowed at the end of the file only.
    """
    for row in read_objects(chunks, max_line_bytes):
        if isinstance(row, LineError):
            yield row
        else:
            yield from _example(*row, form or PROMPTS)


def read_objects(
    chunks: Iterable[bytes], max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, dict[str, Any]] | LineError]:
    """Yield the number and the object of each line, or its LineErrors. As `read_rows`, for rows of any keys."""
    blank = 0
    for number, line in numbered_lines(chunks, max_line_bytes):
        if line is not None and not line.strip():
            blank += 1
            continue
        for earlier in range(number - blank, number):
            yield LineError(earlier, BLANK)
        blank = 0
        if line is None:
            yield LineError(number, f"is longer than {max_line_bytes} bytes")
        else:
            yield _object(number, line)


class Problems:
    """Keeps the first MAX_REPORTED different errors, each with its number of lines, and counts the further lines."""

    def __init__(self) -> None:
        self.more = 0
        self._errors: dict[tuple[str, str], LineError] = {}
        self._last_line = -1

    @property
    def errors(self) -> list[LineError]:
        return list(self._errors.values())

    @property
    def full(self) -> bool:
        return len(self._errors) >= MAX_REPORTED

    def add(self, error: LineError) -> None:
        key = error.path, error.message
        if (earlier := self._errors.get(key)) is not None:
            self._errors[key] = earlier.also_in(error.line)
        elif not self.full:
            self._errors[key] = error
        elif error.line != self._last_line:
            self.more += 1
        self._last_line = error.line

    def refuse(self, rows: int, min_rows: int) -> None:
        """Raise InvalidDataset if there were errors or too few rows."""
        if self._errors:
            raise InvalidDataset(self.errors, self.more)
        if rows < min_rows:
            raise InvalidDataset([LineError(0, _too_few(rows, min_rows))])


def _too_few(rows: int, min_rows: int) -> str:
    if rows == 0:
        return "the file is empty"
    return f"the file has {rows} example(s), but must have at least {min_rows} examples"


def numbered_lines(
    chunks: Iterable[bytes], max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their newline, the first also without its byte order mark.

    A line that is too long is None; its bytes are discarded.
    """
    numbered = _numbered(chunks, max_line_bytes)
    number, first = next(numbered)
    yield number, None if first is None else first.removeprefix(codecs.BOM_UTF8)
    yield from numbered


def _numbered(chunks: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    number = 1
    line: bytearray | None = bytearray()
    for chunk in chunks:
        for index, piece in enumerate(chunk.split(b"\n")):
            if index > 0:  # a newline precedes this piece
                yield number, None if line is None else bytes(line)
                number, line = number + 1, bytearray()
            if line is not None and len(line) + len(piece) <= max_line_bytes:
                line += piece
            else:
                line = None
    yield number, None if line is None else bytes(line)


def _object(number: int, line: bytes) -> tuple[int, dict[str, Any]] | LineError:
    try:
        row = _parse(line)
    except ValueError as error:
        return LineError(number, str(error))
    if not isinstance(row, dict):
        return LineError(number, f"must be a JSON object, not {kind(row)}")
    return number, row


def _example(number: int, row: dict[str, Any], form: "RowForm") -> Iterator[Example | LineError]:
    good = True
    for path, problem in form.problems(row):
        good = False
        yield LineError(number, problem, path)
    if good:
        yield Example(number, [stated(message) for message in form.messages(row)], row)


def is_nested_too_deeply(row: Any, most: int = MAX_DEPTH) -> bool:
    """Whether a JSON value has more than `most` levels: a response has other levels around it, and at most 254."""
    level: list[Any] = [row]
    for _ in range(most + 1):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True


def _parse(line: bytes) -> Any:
    """Parse one JSON value; raise ValueError with a message for the user."""
    if line.startswith(codecs.BOM_UTF8):
        raise ValueError("starts with a byte order mark, which is allowed only in the first line of a file")
    try:
        text = line.decode("utf-8")
        row = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_parsed_integer,
            object_pairs_hook=unique_keys,
        )
        broken = _has_lone_surrogate(text, row)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x}; save the file as UTF-8, or name its "
            "encoding: regraft convert --encoding cp1252"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if is_nested_too_deeply(row):
        raise ValueError("is nested too deeply")
    if broken:
        raise ValueError("contains a lone surrogate (such as \\ud83d), which is not a character")
    return row


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of json.loads for files and requests that people write.

    Raises:
        DuplicateKey: JSON parsers take the last of two equal keys, so a part of the object would be lost.
    """
    row = dict(pairs)
    if len(row) < len(pairs):
        seen = Counter(key for key, _ in pairs)
        raise DuplicateKey(next(key for key, times in seen.items() if times > 1))
    return row


class DuplicateKey(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"has the key {key[:100]!r} twice in one object; keep one of them")
        self.key = key


def _refuse_constant(name: str) -> float:
    raise ValueError(f"has {name}, which is not JSON; use null or leave the key out")


def _finite(digits: str) -> float:
    """Parse a float; 1e999 is valid JSON but would become Infinity."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError("has a number too large for a 64-bit float")
    return value


def _parsed_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"has a number of more than {MAX_DIGITS} digits")
    return int(digits)


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _has_lone_surrogate(text: str, row: Any) -> bool:
    # Such a string cannot be encoded again, so it would fail later, in a tokenizer or a grader. Encoding every row to
    # find out is slow, and few rows have the escape.
    if not _SURROGATE.search(text):
        return False
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


@dataclass(frozen=True)
class RowForm:
    """A format of rows."""

    problems: Callable[[dict[str, Any]], Iterator[Problem]]
    messages: Callable[[dict[str, Any]], list[dict[str, Any]]]  # of a row without problems


def _row_problems(row: dict[str, Any]) -> Iterator[Problem]:
    yield from tool_problems(row)
    yield from conversation_problems("messages", row)
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    role = last.get("role") if isinstance(last, dict) else None
    if role not in ("user", "tool") and role in ROLES:  # other roles were reported above
        where = f"messages[{len(messages or ()) - 1}].role"
        yield where, f"the last message must be from the user or a tool, not {role}"


PROMPTS = RowForm(_row_problems, lambda row: row["messages"])
