"""`regraft convert`: files in other formats as JSONL for a job, one row at a time.

The formats are those that the detector of the server names (core/storage/foreign_files.py), and rows of the other
methods. Each written row has passed the server's rules.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import IO, Any

from regraft._rules.datasets import (
    BLANK,
    MAX_LINE_BYTES,
    MAX_TRAINING_ROWS,
    PROMPTS,
    InvalidDataset,
    LineError,
    Problems,
    RowForm,
    read_objects,
)
from regraft._rules.foreign_files import (
    ANSWERS,
    ARROW_FILE,
    ARROW_STREAM,
    BINARY,
    BZIP2,
    CALLS,
    CR_LINES,
    FIELDS,
    GZIP,
    HEAD_BYTES,
    JSON_ARRAY,
    JSON_COLUMNS,
    NO_COLUMNS,
    PARQUET,
    PRETTY_JSON,
    RESULTS,
    SPEAKERS,
    XZ,
    ZSTD,
    CsvLayout,
    ForeignFormat,
    Target,
    container_of,
    csv_layout,
    encoding_of,
    has_turns,
    is_labeled_completion,
    is_named_table,
    json_cell,
    repeats_an_answer,
    rows_of_columns,
    truth_of,
    wraps_rows,
)
from regraft._rules.message_rows import kind
from regraft._rules.offline_rows import FORMS
from regraft.saving import atomic_file
from regraft.tables import Table, arrow_rows, python_scalar, reading, rereadable, table_rows

Row = dict[str, Any]
Message = dict[str, Any]
_NumberedRows = Iterator[tuple[int, Row] | LineError]

PIECE = 1 << 18  # characters of a file that are read at once
_FORMS: Mapping[Target, RowForm] = {"rft": PROMPTS, "sft": FORMS["supervised"], "dpo": FORMS["dpo"]}
_BETTER, _WORSE = ("preferred_output", "chosen"), ("non_preferred_output", "rejected")
_OF_MESSAGES = FIELDS.union(_BETTER, _WORSE)  # fields that may hold messages as a JSON text
_SYSTEMS = ("system", "system_prompt")
# Fields of a row that are one text, and those that are lists.
_CONVERSATIONS = ("messages", "conversations")
_TEXTS, _LISTS = ("instruction", "context", *_SYSTEMS), (*_CONVERSATIONS, "history")
_PYTHON_MESSAGES = re.compile(r"\s*\[\{'(role|from|content|value)'.*\}\]\s*", re.DOTALL)
# The start of messages as JSON, which may be encoded twice.
_OBJECTS = re.compile(r'\s*("\s*)?(\[\s*)?\{')
_PROMPTS = ("prompt", "question", "input")
_WRITTEN = (date, time, Decimal)  # values of tables that JSON has as texts
_BETWEEN = re.compile(r"[\s,\[\]]*")
_BAD_ANSWER, _NO_ANSWER = "whose label is false", "without an answer"
# Suffixes of compressed files, by their format.
COMPRESSED: Mapping[str, ForeignFormat] = {".gz": GZIP, ".xz": XZ, ".bz2": BZIP2, ".zst": ZSTD}


class CannotConvert(ValueError):
    """A row cannot become a row of the target; the message says why."""


class SameFile(ValueError):
    """The converted file would replace its source."""


class UnknownEncoding(ValueError):
    """Python knows no such encoding of text."""


class LeftOut(Exception):
    """A row is no example for the target; the message ends a sentence about such rows."""


@dataclass(frozen=True)
class Converted:
    """A written file."""

    path: Path
    rows: int
    left_out: Mapping[str, int]  # numbers of rows, by why they were left out, such as "without an answer"
    dropped_fields: tuple[str, ...]  # of the source, which rows of the target have no place for
    notes: tuple[str, ...] = ()  # sentences about the file that a user may want to check


def convert(
    source: str | Path | Table,
    to: Target,
    path: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    encoding: str | None = None,
) -> Converted:
    """Write a dataset for a job: rft for reinforcement, sft for supervised, dpo for preferences.

    Reads files: JSONL, JSON arrays, JSON over several lines, CSV, Parquet and Arrow, compressed with gzip, xz, bzip2,
    zstd or not; and tables in memory: datasets.Dataset, pandas.DataFrame, pyarrow.Table, a list of dicts. Rows are
    those of OpenAI's formats, Alpaca's, ShareGPT's, TRL's, or have a prompt and an answer.

    Rows for rft and sft whose label is false or whose answer is empty are left out, and those for dpo whose two answers
    are the same.

    Args:
        source: the path of a file, or a table; `regraft.tables.from_hub` downloads one from the Hugging Face hub.
        names: the field of the source for a field of the row, such as {"answer": "label"}.
        encoding: of a text file, such as "cp1252"; None: UTF-8, or UTF-16 or UTF-32, which are recognized.

    Raises:
        InvalidDataset: the source or rows of it cannot be converted. Nothing was written.
        SameFile: `path` is the source.
        UnknownEncoding
    """
    _check_encoding(encoding)
    if isinstance(source, str | Path) and Path(path).exists() and Path(path).samefile(source):
        raise SameFile(f"{path} is the file that is converted: choose another name")
    problems = Problems()
    rows = 0
    left_out: Counter[str] = Counter()
    dropped: dict[str, None] = {}
    form = _FORMS[to]
    source = source if isinstance(source, str | Path) else rereadable(source)
    prompts = _prompts_in_answers(source, names or {}, encoding)
    with atomic_file(Path(path)) as out:
        for row in _source_rows(source, encoding):
            if isinstance(row, LineError):
                problems.add(row)
                continue
            number, fields = row
            try:
                made, without_place = convert_row(prompts.cut(_renamed(fields, names or {})), to)
                line = _json(made)
            except LeftOut as left:
                left_out[str(left)] += 1
                continue
            except CannotConvert as cannot:
                problems.add(LineError(number, str(cannot)))
                continue
            except RecursionError:
                problems.add(LineError(number, "is nested too deeply"))
                continue
            wrong = [LineError(number, message, where) for where, message in form.problems(made)]
            for error in wrong:
                problems.add(error)
            if not wrong:
                out.write(line)
                rows += 1
                dropped |= dict.fromkeys(without_place)
        if left_out and not rows and not problems.errors:
            problems.add(LineError(0, f"there are only rows {' or '.join(left_out)}"))
        problems.refuse(rows, 1)
    notes = prompts.notes
    if to == "rft" and rows > MAX_TRAINING_ROWS:
        notes += (f"a reinforcement job reads at most {MAX_TRAINING_ROWS} rows",)
    return Converted(Path(path), rows, left_out, tuple(dropped), notes)


def _source_rows(source: str | Path | Table, encoding: str | None) -> _NumberedRows:
    """The rows of a file or a table, from the first at each call."""
    return read_any(Path(source), encoding) if isinstance(source, str | Path) else table_rows(source)


def _check_encoding(name: str | None) -> None:
    try:
        "".encode(name or "utf-8")
    except (LookupError, ValueError):  # a name may have a NUL
        raise UnknownEncoding(f"there is no encoding of text named {name}; examples: utf-8, cp1252") from None


# Files.


def uncompressed_name(path: Path) -> Path:
    """The name of a file without the suffix of its compression."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def read_any(path: Path, encoding: str | None = None) -> _NumberedRows:
    """Yield the numbered rows of a file in any of the formats, with the errors of the others.

    Args:
        encoding: of a text file; None: by its start.

    Raises:
        InvalidDataset: the file as a whole cannot be read.
    """
    with path.open("rb") as file:
        container = container_of(file.read(HEAD_BYTES), path.name)
    try:
        with _uncompressed(path, container) as file:
            head = file.read(HEAD_BYTES)
        with _uncompressed(path, container) as file:
            yield from _rows(path, file, head, encoding)
    except UnicodeError as error:  # some encodings raise no UnicodeDecodeError
        remedy = "save it as UTF-8, or name its encoding, such as --encoding cp1252"
        raise InvalidDataset(
            [LineError(0, f"the file is not {encoding or getattr(error, 'encoding', 'UTF-8')}: {remedy}")]
        ) from None


@contextmanager
def _uncompressed(path: Path, container: ForeignFormat | None) -> Iterator[IO[bytes]]:
    """Open a file of this format, to read the content of a compressed one.

    Raises:
        InvalidDataset: the compressed data is damaged.
    """
    with path.open("rb") as file:
        if container not in COMPRESSED.values():
            yield file
            return
        try:
            with _decompressor(container, file) as inner:
                yield inner
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            raise InvalidDataset([LineError(0, f"the compressed data is damaged: {error}")]) from None


def _decompressor(container: ForeignFormat | None, file: IO[bytes]) -> AbstractContextManager[Any]:
    if container is GZIP:
        return gzip.GzipFile(fileobj=file)
    if container is XZ:
        return lzma.LZMAFile(file)
    if container is BZIP2:
        return bz2.BZ2File(file)
    with reading("zstd file", is_file=True):
        import pyarrow

        stream: AbstractContextManager[Any] = pyarrow.CompressedInputStream(file, "zstd")
        return stream


def _rows(path: Path, file: IO[bytes], head: bytes, named_encoding: str | None) -> _NumberedRows:
    container = container_of(head, path.name)
    if container is PARQUET:
        yield from _parquet_rows(file)
        return
    if container in (ARROW_FILE, ARROW_STREAM):
        yield from _arrow_rows(file, is_stream=container is ARROW_STREAM)
        return
    # Text in an encoding of which the start looks like another file.
    is_text = container in (BINARY, NO_COLUMNS) and named_encoding is not None
    if container is not None and (container in COMPRESSED.values() or not (container.targets or is_text)):
        raise _refused(container)
    encoding = named_encoding or encoding_of(head)
    # The start decides on the layout once more, without its encoding.
    start = head.decode(encoding, "ignore")
    layout = container_of(start.encode("utf-8", "replace"), path.name)
    if layout is NO_COLUMNS:
        raise _refused(layout)
    if layout in (JSON_ARRAY, PRETTY_JSON):
        yield from _unwrapped(read_objects(json_lines(_pieces(file, encoding))))
    elif layout is CR_LINES:
        pieces = (piece.replace("\r", "\n").encode() for piece in _pieces(file, encoding))
        yield from _unwrapped(read_objects(pieces))
    elif (table := csv_layout(start, is_named=is_named_table(path.name))) is not None:
        yield from _csv_rows(io.TextIOWrapper(file, encoding, newline=""), table)
    elif encoding == "utf-8-sig":
        yield from _unwrapped(read_objects(iter(lambda: file.read(PIECE), b"")))
    else:
        pieces = (piece.encode("utf-8", "surrogatepass") for piece in _pieces(file, encoding))
        yield from _unwrapped(read_objects(pieces))


def _unwrapped(objects: _NumberedRows) -> _NumberedRows:
    """The rows inside of objects that hold those of a file, numbered from 1, and all other rows as they are."""
    rows = (row for row in objects if not (isinstance(row, LineError) and row.message == BLANK))
    first = [*islice(rows, 2)]
    for row in chain(first, rows):
        if isinstance(row, LineError):
            yield row
        elif wraps_rows(row[1]):
            yield from enumerate(row[1]["data"], 1)
        elif (of_columns := rows_of_columns(row[1], is_file=len(first) == 1)) is not None:
            yield from enumerate(of_columns, 1)
        else:
            yield row


def _refused(container: ForeignFormat) -> InvalidDataset:
    return InvalidDataset([LineError(0, f"{container.seen}; {container.remedy}")])


def _pieces(file: IO[bytes], encoding: str) -> Iterator[str]:
    text = io.TextIOWrapper(file, encoding, newline="")
    return iter(lambda: text.read(PIECE), "")


def json_lines(pieces: Iterable[str]) -> Iterator[bytes]:
    """Yield one line for each value of an array, or of values one after another.

    A value that is not JSON is the last one: where it ends is unknown.

    Raises:
        InvalidDataset: an array does not end, or has an array in it.
    """
    decoder = json.JSONDecoder()
    held = ""
    is_inside = False  # of an array
    for piece in pieces:
        held, at = held + piece, 0
        while True:
            start = _end_of_gap(held, at)
            is_inside = _is_inside(is_inside, held[at:start])
            at = start
            if at == len(held):
                break
            try:
                _, end = decoder.raw_decode(held, at)
            except (ValueError, RecursionError):
                if len(held) - at > MAX_LINE_BYTES:
                    yield _on_one_line(held[at:])
                    return
                break
            yield _on_one_line(held[at:end])
            at = end
        held = held[at:]
    if held:
        yield _on_one_line(held)
    elif is_inside:
        raise InvalidDataset([LineError(0, "the JSON array has no ] at its end: the file is not complete")])


def _is_inside(was_inside: bool, gap: str) -> bool:
    """Whether the text after a gap between values is inside of an array."""
    for bracket in filter("[]".__contains__, gap):
        if (bracket == "[") == was_inside:
            what = "an array inside of the array" if was_inside else "a ] without its ["
            raise InvalidDataset([LineError(0, f"the file has {what}: write one object per line")])
        was_inside = not was_inside
    return was_inside


def _end_of_gap(text: str, start: int) -> int:
    gap = _BETWEEN.match(text, start)
    return start if gap is None else gap.end()


def _on_one_line(value: str) -> bytes:
    # Line ends inside of strings are escaped in JSON, so all others are white space.
    return value.replace("\r", " ").replace("\n", " ").encode("utf-8", "surrogatepass") + b"\n"


def _csv_rows(text: IO[str], layout: CsvLayout) -> _NumberedRows:
    numbered = _numbered_cells(text, layout.delimiter)
    for _ in range(layout.lines_before):
        next(numbered)
    first, _ = next(numbered)
    repeated = next((name for name, times in Counter(layout.columns).items() if times > 1), None)
    if repeated is not None:
        raise InvalidDataset([LineError(first, f"has the column {repeated!r} twice: rename one of them")])
    has_rows = False
    for number, cells in numbered:
        has_rows = True
        if isinstance(cells, str):
            yield LineError(number, cells)
            continue
        if len(cells) != len(layout.columns):
            names = len(layout.columns)
            yield LineError(number, f"has {len(cells)} cells, and line {first} has {names} names")
            continue
        yield number, {name: cell for name, cell in zip(layout.columns, cells, strict=True) if name}
    if not has_rows:
        raise InvalidDataset([LineError(0, "the file has the names of its columns and no rows")])


def _numbered_cells(text: IO[str], delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the cells of each row that has any, with the line of the file at which the row begins.

    In place of a row with wrong quotes there is a text that says so. It is the last one: where such a row ends is
    unknown.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            remedy = 'close the quote, or write a quote inside of a cell as ""'
            yield number, f"has wrong quotes ({error}, at line {reader.line_num}): {remedy}"
            return
        if cells is None:
            return
        if any(cells):
            yield number, cells


def _parquet_rows(file: IO[bytes]) -> _NumberedRows:
    with reading("Parquet file", is_file=True):
        from pyarrow import parquet

        yield from arrow_rows(parquet.ParquetFile(file).iter_batches(batch_size=256))


def _arrow_rows(file: IO[bytes], *, is_stream: bool) -> _NumberedRows:
    with reading("Arrow file", is_file=True):
        from pyarrow import ipc

        if is_stream:
            yield from arrow_rows(ipc.open_stream(file))
        else:
            reader = ipc.open_file(file)
            yield from arrow_rows(reader.get_batch(number) for number in range(reader.num_record_batches))


# Rows.


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    """The row with the fields of the source under the names that are wanted, and with messages of JSON texts as lists.

    Texts in fields that `regraft convert` has no place for are a grader's, and stay as they are.

    Raises:
        CannotConvert: a field that --map names has nothing that its target needs, or a list as Python prints it.
    """
    read = {name: _of_json(name, value) for name, value in row.items()}
    taken = {target: _mapped(target, source, _value_at(read, source)) for target, source in names.items()}
    rest = {
        name: value if name.lower() in _OF_MESSAGES else row[name]
        for name, value in read.items()
        if name not in names.values() and name not in taken
    }
    made = taken | rest
    for name in rest:
        if (field := name.lower()) in FIELDS and field not in made:  # such as Question
            made[field] = made.pop(name)
    for name, value in made.items():
        if _is_python(name, value):
            raise CannotConvert(f"has in {name} a list as Python prints it: write it with json.dumps")
    return made


def _of_json(name: str, value: Any) -> Any:
    return json_cell(name, value) if isinstance(value, str) else value


def _is_python(name: str, value: Any) -> bool:
    """Whether a text that should be JSON has a list as str() writes it."""
    return name.lower() in JSON_COLUMNS and isinstance(value, str) and value.lstrip().startswith("[{'")


def _mapped(target: str, source: str, value: Any) -> Any:
    """The value that --map gives a field of the row, as that field needs it.

    Raises:
        CannotConvert: it has no text, or no messages, where the field needs them.
    """
    if value is None:
        return None
    if target in _LISTS:
        found = _of_json(target, value)
        if not isinstance(found, list):
            raise CannotConvert(
                f"has in {source} {kind(found)}, and {target} is a list of messages, or JSON of one"
            )
        return found
    _refuse_broken(source, value)
    if target not in _TEXTS:
        return value
    if isinstance(value, list | Mapping):
        raise CannotConvert(f"has in {source} {kind(value)}, and {target} is a text")
    return _text(value)


def _refuse_broken(name: str, value: Any) -> None:
    """Refuse a text in a field of messages that begins as JSON, such as half of a list or a list encoded twice.

    Raises:
        CannotConvert
    """
    if name.lower() in _CONVERSATIONS and isinstance(value, str) and _OBJECTS.match(value):
        raise CannotConvert(f"has in {name} a text that is not a JSON list of messages")


_PATH = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def _value_at(row: Row, path: str) -> Any:
    """The value of a field, or of a path into one, such as answers.text[0]."""
    if path in row:
        return row[path]
    # The longest name of a field that the path begins with, so that a name may have dots.
    for at in sorted((found.start() for found in re.finditer(r"[.\[]", path)), reverse=True):
        if path[:at] in row and (_PATH.sub("", path[at:]) == ""):
            value = row[path[:at]]
            for key, index in _PATH.findall(path[at:]):
                if key and isinstance(value, Mapping) and key in value:
                    value = value[key]
                elif index and isinstance(value, list) and int(index) < len(value):
                    value = value[int(index)]
                else:
                    raise CannotConvert(f"has nothing at {path!r}, which --map names")
            return value
    raise CannotConvert(f"has no field {path!r}, which --map names")


def convert_row(row: Row, to: Target) -> tuple[Row, list[str]]:
    """One row of the target from a row of any format, and the fields that have a value but no place in it.

    Raises:
        CannotConvert: it has no prompt, or lacks an answer that the target needs.
        LeftOut: its answer is empty or bad, and the target is for good answers; or its two answers are the same.
    """
    is_ours = (
        "output" in row and isinstance(row.get("input"), Mapping) and truth_of(row.get("label")) is not None
    )
    if to != "dpo" and (is_ours or is_labeled_completion(row)):
        if not truth_of(row["label"]):
            raise LeftOut(_BAD_ANSWER)
        row = {name: value for name, value in row.items() if name != "label"}
    made, rest = _MAKERS[to](_with_tools(_without_nan(row)))
    # No grader reads bytes, such as an image's, which datasets write as {"bytes": ..., "path": ...}.
    rest |= {name: made.pop(name) for name in [*made] if _has_bytes(made[name])}
    return made, [name for name, value in rest.items() if value not in (None, "", [], {})]


def _has_bytes(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, inside))


def _without_nan(row: Row) -> Row:
    """The row with null for numbers that are none, which pandas and Parquet write for a missing value."""
    return {
        name: None if isinstance(value, float) and value != value else value for name, value in row.items()
    }


class _PromptsInAnswers:
    """Texts in chosen and rejected that begin with their prompt, as files of whole conversations have them.

    An answer may begin with the words of its prompt by chance: "Hi" and "Hi! How can I help?". So prompts are cut off
    only if all rows have them.

    Args:
        everywhere: all rows of the file begin with their prompt.
    """

    def __init__(self, *, everywhere: bool) -> None:
        self._everywhere = everywhere
        self._rows = 0

    def cut(self, row: Row) -> Row:
        """The row with answers only, and counted if it begins with its prompt."""
        if not (asked := _prompt_of_both(row)):
            return row
        self._rows += 1
        if not self._everywhere:
            return row
        return row | {name: row[name].removeprefix(asked) for name in ("chosen", "rejected")}

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._rows:
            return ()
        what = f"chosen and rejected begin with the text of their prompt in {self._rows} row(s)"
        if self._everywhere:
            return (f"{what}, all of the file: it was cut off",)
        return (f"{what}, and not in all with a white space after it: nothing was cut off",)


def _prompts_in_answers(
    source: str | Path | Table, names: Mapping[str, str], encoding: str | None
) -> _PromptsInAnswers:
    """Read the rows up to the first whose answers do not begin with its prompt and a white space."""
    ends_at_word = False
    for row in _source_rows(source, encoding):
        if isinstance(row, LineError):
            continue
        try:
            fields = _renamed(row[1], names)
            asked = _prompt_of_both(fields)
        except (CannotConvert, RecursionError):  # which `convert` reports
            continue
        answers = [fields[name].removeprefix(asked) for name in ("chosen", "rejected")] if asked else []
        ends_at_word = bool(answers) and (asked[-1:].isspace() or all(text[0].isspace() for text in answers))
        if not ends_at_word:
            break
    return _PromptsInAnswers(everywhere=ends_at_word)


def _prompt_of_both(row: Row) -> str:
    """The text of the prompt that chosen and rejected both begin with, before an answer; empty: there is none."""
    better, worse = row.get("chosen"), row.get("rejected")
    if not (isinstance(better, str) and isinstance(worse, str)):
        return ""
    try:
        messages = _prompt(dict(row))
    except CannotConvert:
        return ""
    if len(messages) != 1 or _role(messages[0]) != "user":
        return ""
    asked = messages[0].get("content")
    if not (isinstance(asked, str) and asked and better.startswith(asked) and worse.startswith(asked)):
        return ""
    return asked if better[len(asked) :].strip() and worse[len(asked) :].strip() else ""


# Each maker returns a row of its target, and the fields that are not in it.


def _to_rft(row: Row) -> tuple[Row, Row]:
    messages, rest = _conversation(row)
    unused: Row = {}
    if messages and _role(messages[-1]) == "assistant":
        said = messages.pop().get("content")
        if "answer" in rest:
            unused["the message of the assistant"] = said
        else:
            rest = {"answer": _text(said)} | rest
    name = "answer" if "answer" in rest else next((name for name in ANSWERS if name in rest), None)
    if name is not None:
        _refuse_empty(rest[name])
    else:
        name = next((name for name in _BETTER if rest.get(name) is not None), None)
    if name is not None and name != "answer":
        rest = {"answer": _text(_answer_to_prompt(rest, name)[-1].get("content"))} | rest
    unused["messages"] = rest.pop("messages", None)
    return {"messages": messages, **rest}, unused


def _to_sft(row: Row) -> tuple[Row, Row]:
    messages, rest = _conversation(row)
    if not messages or _role(messages[-1]) != "assistant":
        given = (*_BETTER, *ANSWERS)
        present = [name for name in given if name in rest]
        name = next((name for name in present if rest[name] is not None), None)
        if name is None:
            if present:
                raise LeftOut(_NO_ANSWER)
            raise CannotConvert("has no answer; name its field with --map answer=FIELD")
        messages += _answer_to_prompt(rest, name)
    last = messages[-1]
    if not last.get("tool_calls"):
        _refuse_empty(last.get("content"))
    return {"messages": messages} | _tools_of(row), _without(rest, "tools")


def _to_dpo(row: Row) -> tuple[Row, Row]:
    messages, rest = _conversation(row)
    given = {"messages": messages} | _tools_of(row)
    rest.pop("tools", None)
    if "label" in rest and (name := next((name for name in ANSWERS if name in rest), None)) is not None:
        label = rest.pop("label")
        truth = truth_of(label)
        return {
            "input": given,
            "output": _answer_to_prompt(rest, name),
            "label": label if truth is None else truth,  # the rules refuse others
        }, rest
    better, worse = (
        next((name for name in names if rest.get(name) is not None), None) for names in (_BETTER, _WORSE)
    )
    if better is None or worse is None:
        raise CannotConvert(
            "has no two answers; name their fields with --map chosen=FIELD --map rejected=FIELD"
        )
    preferred, other = _answer_to_prompt(rest, better), _answer_to_prompt(rest, worse)
    if preferred == other:
        raise LeftOut("whose two answers are the same")
    return {"input": given, "preferred_output": preferred, "non_preferred_output": other}, rest


_MAKERS: Mapping[Target, Callable[[Row], tuple[Row, Row]]] = {"rft": _to_rft, "sft": _to_sft, "dpo": _to_dpo}


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _refuse_empty(answer: Any) -> None:
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise LeftOut(_NO_ANSWER)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _conversation(row: Row) -> tuple[list[Message], Row]:
    """The messages of a row, and its other fields."""
    rest = _of_turns(row)
    messages = _prompt(rest)
    _cut_prompt(messages, rest)
    if messages and _role(messages[0]) not in ("system", "developer"):
        name = next((name for name in _SYSTEMS if isinstance(rest.get(name), str) and rest[name]), None)
        if name is not None:
            messages.insert(0, {"role": "system", "content": rest.pop(name)})
    for name in ("tools", *_SYSTEMS):
        if not rest.get(name):
            rest.pop(name, None)
    return messages, rest


_SPEAKER = re.compile(r"\n\n(Human|Assistant):[ \t]?")


def _of_turns(row: Row) -> Row:
    """A copy of the row, with lists of messages for conversations of Anthropic's hh-rlhf in chosen and rejected."""
    pair = [row.get(name) for name in ("chosen", "rejected")]
    if not all(isinstance(text, str) and _SPEAKER.match(text) for text in pair):
        return dict(row)
    return dict(row) | {name: _spoken(row[name]) for name in ("chosen", "rejected")}


def _spoken(text: str) -> list[Message]:
    """The messages of a text in which each turn begins with its speaker."""
    _, *turns = _SPEAKER.split(text)
    return [
        {"role": "user" if speaker == "Human" else "assistant", "content": said.strip()}
        for speaker, said in zip(turns[::2], turns[1::2], strict=True)
    ]


def _prompt(rest: Row) -> list[Message]:
    """Take the messages out of the fields of a row."""
    given = rest.get("input")
    if isinstance(rest.get("messages"), list) and not repeats_an_answer(rest):
        messages = rest.pop("messages")
        return _turns(messages) if has_turns(messages) else list(messages)
    if isinstance(rest.get("conversations"), list):
        return _turns(rest.pop("conversations"))
    for name in _CONVERSATIONS:
        _refuse_broken(name, rest.get(name))
    if isinstance(given, Mapping) and isinstance(given.get("messages"), list):
        rest.pop("input")
        return list(given["messages"])
    if "instruction" in rest:
        parts = [_text(rest.pop("instruction")), _text(rest.pop("input", None) or "")]
        return _messages_of_prompt("\n\n".join(part for part in parts if part), rest)
    given = {name: rest[name] for name in _PROMPTS if rest.get(name) is not None}
    plain = [name for name, value in given.items() if not isinstance(value, Mapping)]
    for name in sorted(plain, key=lambda name: not isinstance(given[name], str | list))[:1]:
        return _messages_of_prompt(_text_or_messages(name, rest.pop(name)), rest)
    shared: list[Message] = []
    if _cut_prompt(shared, rest):
        return shared
    for name in given:
        return _messages_of_prompt(_text_or_messages(name, rest.pop(name)), rest)
    nothing = next((name for name in _PROMPTS if name in rest), None)
    if nothing is not None:
        raise CannotConvert(f"has null in {nothing}")
    for name in _CONVERSATIONS:
        if rest.get(name) and isinstance(rest[name], str):
            raise CannotConvert(
                f"has in {name} a text that is not a JSON list of messages; for a prompt use --map prompt={name}"
            )
    raise CannotConvert("has no prompt; name its field with --map prompt=FIELD")


def _text_or_messages(name: str, value: Any) -> str | list[Any]:
    """A prompt or an answer: the text of a text, a number or a boolean, or the messages of a list or of one message."""
    messages = [value] if isinstance(value, Mapping) else value
    if isinstance(messages, list):
        if all(isinstance(one, Mapping) and not one.keys().isdisjoint(("role", "from")) for one in messages):
            return _turns(messages) if has_turns(messages) else list(messages)
        one_text = f"; for one text of it use --map {name}=FIELD[0]" if isinstance(value, list) else ""
        raise CannotConvert(f"has in {name} {kind(value)} that is no text and no messages{one_text}")
    text = _text(value)
    if _PYTHON_MESSAGES.fullmatch(text):
        raise CannotConvert(f"has in {name} a list as Python prints it: write it with json.dumps")
    return text


def _messages_of_prompt(prompt: str | list[Any], rest: Row) -> list[Message]:
    """The messages of a prompt, with the context and the earlier turns that its row has beside it."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    context = rest.get("context")
    last = messages[-1] if messages else None
    if isinstance(context, str) and isinstance(last, Mapping) and isinstance(last.get("content"), str):
        rest.pop("context")
        if context.strip() and context not in last["content"]:
            messages[-1] = {**last, "content": f"{last['content']}\n\n{context}"}
    if isinstance(rest.get("history"), list):
        earlier = [message for turn in rest.pop("history") for message in _earlier(turn)]
        at = sum(1 for one in messages if _role(one) in ("system", "developer"))
        messages[at:at] = earlier
    return messages


def _earlier(turn: Any) -> list[Message]:
    """The messages of a turn in history: one message, or the texts of the user and the assistant."""
    if isinstance(turn, Mapping):
        return [_turn(turn)]
    if isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
        return [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    raise CannotConvert("has a turn in history that is no pair of texts")


def _cut_prompt(messages: list[Message], rest: Row) -> bool:
    """Cut the messages of the prompt off chosen and rejected if both begin with it; others they share extend it.

    Returns:
        whether chosen and rejected began with a prompt.
    """
    better, worse = rest.get("chosen"), rest.get("rejected")
    if not (isinstance(better, list) and isinstance(worse, list)):
        return False
    for start in (messages, [one for one in messages if _role(one) not in ("system", "developer")]):
        size = len(start)
        if better[:size] == start == worse[:size]:
            better, worse = better[size:], worse[size:]
            # The last message of each is its answer, even if both are the same.
            pairs = takewhile(lambda pair: pair[0] == pair[1], zip(better[:-1], worse[:-1], strict=False))
            shared = [one for one, _ in pairs]
            messages += shared
            rest["chosen"], rest["rejected"] = better[len(shared) :], worse[len(shared) :]
            return bool(messages)
    return False


def _turns(conversations: Sequence[Any]) -> list[Message]:
    """The messages of a conversation of ShareGPT, with its calls of tools and their results."""
    messages: list[Message] = []
    waiting: list[str] = []  # the ids of the calls that have no result yet
    calls = 0
    for turn in conversations:
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if speaker in RESULTS:
            if not waiting:
                raise CannotConvert(
                    f"has a message in conversations from {speaker!r} without a call before it"
                )
            content = _result(_text(turn.get("value")))
            messages.append({"role": "tool", "tool_call_id": waiting.pop(0), "content": content})
            continue
        message: Message = {"role": "assistant", "content": None} if speaker in CALLS else _turn(turn)
        called = _calls(turn, message)
        if called:
            waiting = [f"call_{calls + number}" for number in range(1, len(called) + 1)]
            calls += len(called)
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": one}
                for call_id, one in zip(waiting, called, strict=True)
            ]
        messages.append(message)
    return messages


# Hermes writes the calls and results of tools into texts.
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_TOOL_RESPONSE = ("<tool_response>", "</tool_response>")


def _result(text: str) -> str:
    """The text between the tags of a result; all of it if they are not around it."""
    begin, end = _TOOL_RESPONSE
    inside = text.strip()
    if not (inside.startswith(begin) and inside.removeprefix(begin).endswith(end)):
        return text
    return inside.removeprefix(begin).removesuffix(end).strip()


def _cut_calls(text: str) -> tuple[list[str], str]:
    """The texts between the tags of calls, and the text without them.

    In linear time, unlike a regular expression that takes anything between the tags.
    """
    begin, end = _TOOL_CALL
    before, *parts = text.split(begin)
    calls, rest = list[str](), [before]
    opened: list[str] = []  # the parts of a call that is not closed yet
    for part in parts:
        opened.append(part)
        inside, closed, after = part.partition(end)
        if closed:
            calls.append(begin.join([*opened[:-1], inside]).strip())
            rest.append(after)
            opened.clear()
    return calls, "".join([*rest, *(begin + part for part in opened)])


def _calls(turn: Mapping[str, Any], message: Message) -> list[Message]:
    """The functions that a turn calls. Their text is cut out of its message."""
    if turn.get("from") in CALLS:
        value = turn.get("value")
        given = _parsed(value) if isinstance(value, str) else value
        return [_call(one) for one in (given if isinstance(given, list) else [given])]
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return []
    calls, rest = _cut_calls(content)
    called = [_call(_parsed(text)) for text in calls]
    if called:
        message["content"] = rest.strip() or None
    return called


def _call(value: Any) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise CannotConvert("has a call in conversations that is no object with name and arguments")
    arguments = value.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": value["name"], "arguments": text}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise CannotConvert("has a call in conversations that is not JSON") from None


def _turn(turn: Any) -> Message:
    """A message of ShareGPT."""
    if isinstance(turn, Mapping) and "role" in turn and "content" in turn:
        return dict(turn)
    if not isinstance(turn, Mapping) or turn.get("from") not in SPEAKERS:
        speaker = turn.get("from") if isinstance(turn, Mapping) else turn
        raise CannotConvert(f"has a message in conversations from {speaker!r}, which is unknown")
    return {"role": SPEAKERS[turn["from"]], "content": turn.get("value")}


def _answer_to_prompt(rest: Row, name: str) -> list[Message]:
    """Take the messages of an answer out of this field of a row."""
    given = _text_or_messages(name, rest.pop(name))
    if isinstance(given, str):
        return [{"role": "assistant", "content": given}]
    roles = [*map(_role, given)]
    if "user" in roles or roles[-1:] != ["assistant"]:
        raise CannotConvert(f"has in {name} other messages than the answer to its prompt")
    return given


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        return _text(value[0].get("content", value[0].get("text")))
    if value is None or isinstance(value, list | Mapping):
        raise CannotConvert("has an answer or a prompt that is not one text")
    try:
        return str(value) if isinstance(value, _WRITTEN) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise CannotConvert(f"has an answer or a prompt that is no text: {value!r:.40}") from None


def _tools_of(row: Row) -> Row:
    given = row.get("input")
    tools = row.get("tools") or (given.get("tools") if isinstance(given, Mapping) else None)
    return {"tools": tools} if tools else {}


def _with_tools(row: Row) -> Row:
    """The row with tools in place of functions, and tool_calls in place of function_call."""
    made = dict(row)
    functions = made.pop("functions", None)
    if isinstance(tools := made.get("tools"), str | list):
        made["tools"] = _tools(tools)
    if functions:
        made["tools"] = [_tool(one) for one in functions]
    given = made.get("input")
    if isinstance(made.get("messages"), list):
        made["messages"] = _called(made["messages"])
    elif isinstance(given, Mapping) and isinstance(given.get("messages"), list):
        made["input"] = {**given, "messages": _called(given["messages"])}
    return made


def _tools(tools: str | list[Any]) -> list[Any]:
    """The tools of a row: a list, or a JSON text of one. ShareGPT's are bare functions."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except (ValueError, RecursionError):
            raise CannotConvert("has tools that are not JSON") from None
    if not isinstance(tools, list):
        raise CannotConvert("has tools that are no list")
    return [_tool(one) if isinstance(one, Mapping) and "function" not in one else one for one in tools]


def _tool(function: Any) -> Row:
    return {"type": "function", "function": function}


def _called(messages: Sequence[Any]) -> list[Any]:
    made: list[Any] = []
    calls = 0
    for message in messages:
        if not isinstance(message, Mapping):
            made.append(message)
            continue
        new = {name: value for name, value in message.items() if name != "function_call"}
        if isinstance(call := message.get("function_call"), Mapping):
            calls += 1
            new["tool_calls"] = [{"id": f"call_{calls}", "type": "function", "function": dict(call)}]
        elif message.get("role") == "function":  # the result of the call before it
            new = {"role": "tool", "tool_call_id": f"call_{calls}", "content": message.get("content")}
        made.append(new)
    return made


def _json(row: Row) -> bytes:
    try:
        return _dumped(row).encode() + b"\n"
    except (TypeError, ValueError) as cause:
        name = next((name for name, value in row.items() if not _is_json(value)), "the name of a field")
        raise CannotConvert(f"has in {name} a value that JSON cannot hold: {cause}") from None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)


def _is_json(value: Any) -> bool:
    try:
        _dumped(value).encode()
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, _WRITTEN):
        return str(value)
    if (scalar := python_scalar(value)) is not value:
        return scalar
    raise TypeError(f"it is of type {type(value).__name__}")
