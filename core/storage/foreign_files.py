"""Names the format of a file that is not JSONL with rows of a job, and says what to do with it.

The API uses it on upload, when a job's files are validated and for profiles, the client before it uploads anything and
to convert files. `regraft convert` (sdk/regraft/convert.py) reads each format whose `targets` are not empty.
"""

import bz2
import codecs
import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Literal

from .datasets import read_objects
from .message_rows import ROLES

Target = Literal["rft", "sft", "dpo"]
# What `regraft convert --to` writes, by the method whose rows a job reads.
TARGETS: Mapping[str, Target] = MappingProxyType(
    {"reinforcement": "rft", "supervised": "sft", "dpo": "dpo", "reward_model": "dpo"}
)
_METHODS: Mapping[Target, str] = MappingProxyType({"rft": "reinforcement", "sft": "supervised", "dpo": "dpo"})
_ANY: tuple[Target, ...] = ("rft", "sft", "dpo")

# Fields that `regraft convert` has a place for. Files may write them with capitals.
FIELDS = frozenset(
    "prompt question instruction input context history system system_prompt messages conversations tools completion "
    "output response answer chosen rejected label".split()
)
# Speakers of ShareGPT for calls of tools, and for their results.
CALLS = ("function_call", "tool_call")
RESULTS = ("observation", "tool", "function_response", "tool_response", "function")
# The role of each other speaker.
SPEAKERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
        "system": "system",
    }
)
# Roles that messages have in some format, in lower case. The rules for rows refuse those that are not OpenAI's.
_KNOWN_ROLES = frozenset({*ROLES, *RESULTS, *CALLS, *SPEAKERS, "ai"})
# Fields with the answer; `regraft convert` takes the first that a row has.
ANSWERS = ("completion", "output", "response", "answer")
# Fields with the prompt.
_PROMPT_FIELDS = frozenset({"messages", "conversations", "input", "instruction", "prompt", "question"})
# Fields whose texts are JSON, such as the cells of CSV files.
JSON_COLUMNS = ("messages", "conversations", "tools", "history")
HEAD_BYTES = 64 << 10
# Rows by which the format of a file is recognized.
FIRST_ROWS = 20
_MAX_NAMES, _MAX_NAME = 8, 40  # of the keys or columns of a file, as a sentence shows them


@dataclass(frozen=True)
class ForeignFormat:
    """A format that a file has. `seen` names it, `remedy` says what to do by hand."""

    seen: str
    remedy: str
    targets: tuple[Target, ...] = _ANY  # what `regraft convert` makes of it
    lacks_answer: bool = False  # rows for other targets than rft need --map for it
    lacks_prompt: bool = False  # rows for all targets need --map for it
    lacks_pair: bool = False  # rows for dpo need --map for two answers, which other fields may have

    def sentence(self, rows_for: str | None = None) -> str:
        """Return one or two sentences for the user: the format, and the remedy.

        Args:
            rows_for: the method whose rows are needed; None: unknown.
        """
        target = None if rows_for is None else TARGETS[rows_for]
        named = " --map prompt=FIELD" if self.lacks_prompt else ""
        if target == "dpo" and self.lacks_pair:
            command = f"regraft convert FILE --to dpo{named} --map chosen=FIELD --map rejected=FIELD"
            return f"{self.seen}; pairs need two answers in each row: if these have them, name them with `{command}`."
        if self.targets and target is not None and target not in self.targets:
            fits = " or ".join(f"'{_METHODS[one]}'" for one in self.targets)
            what = "its rows" if self.seen.startswith("the file") else "they"
            return f"{self.seen}; {what} can become rows for method {fits}, not for '{rows_for}'."
        if not self.targets:
            return f"{self.seen}; {self.remedy}."
        named += " --map answer=FIELD" if self.lacks_answer and target != "rft" else ""
        command = f"regraft convert FILE --to {target or '|'.join(self.targets)}{named}"
        return f"{self.seen}; {self.remedy}. `{command}` does that."


_ONE_A_LINE = "write one object per line"
_AS_MESSAGES = "write them as messages"

EMPTY = ForeignFormat("the file is empty", _ONE_A_LINE, ())  # or has white space or [] only
BLANK_START = ForeignFormat("the file starts with 64 KiB of white space", "remove it")
GZIP, XZ, BZIP2, ZSTD = (
    ForeignFormat(f"the file is compressed with {name}", "uncompress it")
    for name in ("gzip", "xz", "bzip2", "zstd")
)
ZIP = ForeignFormat(
    "the file is a ZIP archive or an Excel workbook", "unpack it, or save the sheet as CSV", ()
)
TAR = ForeignFormat("the file is a tar archive", "unpack it", ())
TWICE = ForeignFormat("the file is compressed twice", "uncompress it", ())
PARQUET = ForeignFormat("the file is Parquet", _ONE_A_LINE)
ARROW_FILE = ForeignFormat("the file is Arrow or Feather", _ONE_A_LINE)
ARROW_STREAM = ForeignFormat("the file is an Arrow stream, such as of datasets' save_to_disk", _ONE_A_LINE)
FEATHER_1 = ForeignFormat("the file is Feather in version 1", "save it as Parquet or CSV", ())
BINARY = ForeignFormat("the file is binary", "save its rows as JSONL, CSV or Parquet", ())
MARKUP = ForeignFormat(
    "the file is an HTML or XML page, such as that of a login or of an error",
    "download the data once more and look at it before the upload",
    (),
)
NO_COLUMNS = ForeignFormat(
    "the file is named as CSV, and its first line does not name columns",
    "write the names of the columns into the first line",
    (),
)
LFS_POINTER = ForeignFormat("the file is a pointer of Git LFS", "download the data with `git lfs pull`", ())
UTF_16 = ForeignFormat("the file is UTF-16", "save it as UTF-8")
UTF_32 = ForeignFormat("the file is UTF-32", "save it as UTF-8")
JSON_ARRAY = ForeignFormat("the file is one JSON array", _ONE_A_LINE)
PRETTY_JSON = ForeignFormat("the file has JSON objects over several lines", _ONE_A_LINE)
CR_LINES = ForeignFormat("the lines of the file end with CR alone", "end them with LF")

JSON_TEXTS = ForeignFormat("the rows have their messages as texts of JSON", "write them as lists")
WRAPPED = ForeignFormat('the file is one JSON object with its rows in {"data": [...]}', _ONE_A_LINE)
COLUMNS = ForeignFormat("the file is one JSON object with its columns", _ONE_A_LINE)
FUNCTIONS = ForeignFormat(
    "the rows use functions and function_call, which OpenAI has replaced",
    "write them as tools and tool_calls",
    ("sft",),
)
FUNCTIONS_BEFORE_TEXT = replace(FUNCTIONS, targets=("rft", "sft"))
FUNCTIONS_OF_PAIRS = replace(FUNCTIONS, targets=("sft", "dpo"))
SHAREGPT = ForeignFormat("the rows are ShareGPT's (conversations)", _AS_MESSAGES, ("rft", "sft"))
SHAREGPT_TURNS = ForeignFormat(
    "the messages have ShareGPT's keys (from, value)", "write them as role and content", ("rft", "sft")
)
SHAREGPT_TOOLS = ForeignFormat(
    "the rows are ShareGPT's with calls of tools (conversations)", _AS_MESSAGES, ("rft", "sft")
)
SHAREGPT_PREFERENCES = ForeignFormat(
    "the rows are LLaMA-Factory's preferences (conversations, chosen, rejected)",
    "write them as input, preferred_output and non_preferred_output, or the prompts as messages",
)
PREFERENCES = ForeignFormat(
    "the rows are TRL's preferences (chosen, rejected)",
    "write them as input, preferred_output and non_preferred_output, or the prompts as messages",
)
DOLLY = ForeignFormat("the rows are Dolly's (instruction, context, response)", _AS_MESSAGES, ("rft", "sft"))
ALPACA = ForeignFormat("the rows are Alpaca's (instruction, input, output)", _AS_MESSAGES, ("rft", "sft"))
INSTRUCTION = ForeignFormat(
    "the rows have their prompt in the key instruction", "write it as messages", ("rft", "sft")
)
LABELED = ForeignFormat(
    "the rows are TRL's labeled answers (prompt, completion, label)",
    "write them as input, output and label, or the good ones as messages",
)
PROMPT_COMPLETION = ForeignFormat("the rows have prompt and completion", _AS_MESSAGES, ("rft", "sft"))
PROMPT = ForeignFormat("the rows have their prompt in the key prompt", "write it as messages", ("rft", "sft"))
QUESTION = ForeignFormat(
    "the rows have their prompt in the key question", "write it as messages", ("rft", "sft")
)
INPUT = ForeignFormat("the rows have their prompt in the key input", "write it as messages", ("rft", "sft"))

# Formats that say nothing about an answer.
_PROMPTS_ONLY = frozenset(one.seen for one in (INSTRUCTION, PROMPT, QUESTION, INPUT))

_ROW_FORMATS: Sequence[tuple[ForeignFormat, Callable[[Mapping[str, Any]], bool]]] = (
    (WRAPPED, lambda row: wraps_rows(row)),
    (COLUMNS, lambda row: rows_of_columns(row) is not None),
    (
        SHAREGPT_PREFERENCES,
        lambda row: isinstance(row.get("conversations"), list) and {"chosen", "rejected"} <= row.keys(),
    ),
    (SHAREGPT_TURNS, lambda row: has_turns(row.get("messages"))),
    (SHAREGPT, lambda row: isinstance(row.get("conversations"), list)),
    (PREFERENCES, lambda row: {"chosen", "rejected"} <= row.keys()),
    (DOLLY, lambda row: {"instruction", "response"} <= row.keys()),
    (ALPACA, lambda row: {"instruction", "output"} <= row.keys()),
    (INSTRUCTION, lambda row: "instruction" in row),
    (LABELED, lambda row: is_labeled_completion(row)),
    (PROMPT_COMPLETION, lambda row: {"prompt", "completion"} <= row.keys()),
    (PROMPT, lambda row: "prompt" in row),
    (QUESTION, lambda row: "question" in row),
    (INPUT, lambda row: isinstance(row.get("input"), str | list)),
)


def detect(chunks: Iterable[bytes], name: str = "") -> ForeignFormat | None:
    """The foreign format of a file; None: it is JSONL, with the keys of a method or with unknown ones.

    Reads the first 64 KiB, and the first FIRST_ROWS lines.

    Args:
        name: of the file, which decides where its content may be CSV or broken JSONL. Empty: unknown.
    """
    rest = iter(chunks)
    head = bytearray()
    while len(head) < HEAD_BYTES and (chunk := next(rest, None)) is not None:
        head += chunk
    if (container := container_of(bytes(head), name)) is not None:
        return for_rows_of(container, bytes(head), name)
    first = [*islice(read_objects(chain([bytes(head)], rest)), FIRST_ROWS)]
    rows = [row[1] for row in first if isinstance(row, tuple)]
    known = format_of_rows([*map(_with_known_names, rows)], is_file=len(first) == 1)
    return known or _of_json_texts(rows) or _of_unknown_keys(rows)


def _of_json_texts(rows: Sequence[Mapping[str, Any]]) -> ForeignFormat | None:
    """The format of rows of which each has messages, or the input of a pair, as a text of JSON."""
    if not rows or not all(_is_json_text(row, "messages") or _is_json_text(row, "input") for row in rows):
        return None
    return _fitted(JSON_TEXTS, rows)


def _is_json_text(row: Mapping[str, Any], name: str) -> bool:
    """Whether this field of a row is a text with messages."""
    text = row.get(name)
    return isinstance(text, str) and isinstance(json_cell(name, text), list | Mapping)


def _of_unknown_keys(rows: Sequence[Mapping[str, Any]]) -> ForeignFormat | None:
    """The format of rows without a prompt under a known name; None: a row has one, or no key at all."""
    if not rows or not all(rows) or any(_has_prompt(row) or _is_of_a_method(row) for row in rows):
        return None
    seen = f"the rows have no known key for their prompt (they have {_listed([*rows[0]])})"
    return _fitted(ForeignFormat(seen, _AS_MESSAGES), rows)


def container_of(head: bytes, name: str = "") -> ForeignFormat | None:
    """The format of a file that is not JSONL in UTF-8, by its start and its name; None: it seems to be.

    Args:
        head: the first bytes of the file, at least HEAD_BYTES of a longer one.
        name: as in `detect`.
    """
    if (container := _of_magic(head)) is not None:
        return _packed(container, head, name) or container
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return TAR
    encoding = encoding_of(head)
    decoded = head[:HEAD_BYTES].decode(encoding, "replace")
    text = decoded.lstrip()
    if not text:
        return EMPTY if len(head) < HEAD_BYTES else BLANK_START
    if encoding != "utf-8-sig":
        return UTF_16 if encoding == "utf-16" or encoding.startswith("utf-16-") else UTF_32
    if "\0" in decoded[:_BINARY_CHARACTERS] and not text.startswith(("{", "[")):
        return BINARY
    if _MARKUP.match(text):
        return MARKUP
    if re.fullmatch(r"\[\s*\]\s*", text):
        return EMPTY
    if re.match(r"\[\s*\{", text):
        return JSON_ARRAY
    if _is_pretty(text, is_cut=len(head) >= HEAD_BYTES):
        return PRETTY_JSON
    first, *others = text.split("\r")
    if "\n" not in text and any(map(str.strip, others)) and _is_json(first):
        return CR_LINES
    if (table := csv_layout(decoded, is_named=is_named_table(name))) is not None:
        columns = [column for column in table.columns if column]
        what = "column" if len(columns) == 1 else "columns"
        return ForeignFormat(f"the file is CSV with the {what} {_listed(columns)}", _ONE_A_LINE)
    line, end, _ = text.partition("\n")
    is_whole = bool(end) or len(head) < HEAD_BYTES
    return NO_COLUMNS if is_named_table(name) and is_whole and not _is_json(line) else None


def is_named_table(name: str) -> bool:
    """Whether a file is named as CSV, compressed or not."""
    return _TABLE_NAME.search(name) is not None


def _listed(names: Sequence[str]) -> str:
    """The first names, as a sentence shows them."""
    shown = [name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…" for name in names[:_MAX_NAMES]]
    return ", ".join([*shown, *(["…"] if len(names) > _MAX_NAMES else [])])


def for_rows_of(container: ForeignFormat, head: bytes, name: str = "") -> ForeignFormat:
    """The format of a file with the targets of the rows that its start has, and whether these lack prompt or answer.

    Args:
        container: `container_of(head, name)`.
    """
    return _fitted(container, first_rows(head, name)) if container.targets else container


def _fitted(container: ForeignFormat, rows: Sequence[Mapping[str, Any]]) -> ForeignFormat:
    """The format of what holds these rows."""
    rows = [_with_known_names(row) for row in rows]
    if (inner := format_of_rows(rows, is_file=len(rows) == 1)) is not None:
        return _with_targets_of(container, inner)
    if not rows:
        return container
    lacks_prompt = not any(map(_has_prompt, rows))
    if not lacks_prompt and not all(map(_is_of_a_method, rows)):
        return container
    container = replace(container, lacks_prompt=lacks_prompt)
    if all(map(_has_pair, rows)):
        return container
    container = replace(container, lacks_pair=all(_has_room_for_pair(row, lacks_prompt) for row in rows))
    if all(map(_is_answered, rows)):
        return replace(container, targets=("rft", "sft"))
    if all(len(row) > 1 for row in rows):
        return replace(container, targets=("rft", "sft"), lacks_answer=True)
    return replace(container, targets=("rft",))


def _with_targets_of(container: ForeignFormat, inner: ForeignFormat) -> ForeignFormat:
    return replace(
        container,
        targets=inner.targets,
        lacks_answer=inner.lacks_answer,
        lacks_prompt=inner.lacks_prompt,
        lacks_pair=inner.lacks_pair,
    )


def _has_room_for_pair(row: Mapping[str, Any], lacks_prompt: bool) -> bool:
    """Whether two fields of the row may be answers, beside one for the prompt if that is none of the known ones."""
    free = [
        name for name in map(str.lower, row) if name not in FIELDS or name in (*ANSWERS, "chosen", "rejected")
    ]
    return len(free) - lacks_prompt >= 2


def _with_known_names(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its known fields in lower case, as `regraft convert` reads them: Question is question.

    Messages that are a JSON text are a list in it.
    """
    return {
        name.lower() if name.lower() in FIELDS else name: (
            json_cell(name, value) if isinstance(value, str) else value
        )
        for name, value in row.items()
    }


def _has_prompt(row: Mapping[str, Any]) -> bool:
    """Whether `regraft convert` finds a prompt in the row: in a field, or at the start of two answers."""
    return not _PROMPT_FIELDS.isdisjoint(row) or {"chosen", "rejected"} <= row.keys()


def first_rows(head: bytes, name: str = "") -> list[dict[str, Any]]:
    """The first rows in a file, by its start; empty: none is read without pyarrow, or none is complete.

    In place of the rows of a CSV file of which none can be read stands one with empty cells.
    """
    inside = _uncompressed(head)
    is_cut = max(len(head), len(inside)) >= HEAD_BYTES
    text = inside.decode(encoding_of(inside), "ignore")
    if (table := csv_layout(text, is_named=is_named_table(name))) is not None:
        body = text.lstrip("\r\n ").split("\n", table.lines_before + 1)[-1]
        cells = csv.reader(io.StringIO(body, newline=""), delimiter=table.delimiter, strict=True)
        lines: list[list[str]] = []
        try:
            for line in islice(cells, FIRST_ROWS + 1):
                lines.append(line)
        except csv.Error:  # a quote that is not closed, at least not in the start of the file
            pass
        else:
            lines = lines[:-1] if is_cut else lines  # the last may lack cells
        return [
            {column: cell for column, cell in zip(table.columns, line, strict=False) if column}
            for line in lines[:FIRST_ROWS]
            if any(line)
        ] or [{name: [] if name.lower() in JSON_COLUMNS else "" for name in table.columns if name}]
    rows: list[dict[str, Any]] = []
    decoder, at = json.JSONDecoder(), 0
    while len(rows) < FIRST_ROWS and (start := _OBJECT.search(text, at)) is not None:
        try:
            row, at = decoder.raw_decode(text, start.end() - 1)
        except (ValueError, RecursionError):  # the start cuts it
            break
        rows.append(row)
    return rows


def json_cell(column: str, cell: str) -> Any:
    """The value of a text in a row: the list of a JSON text in JSON_COLUMNS, or messages as JSON in any column.

    Messages are a list of them, an object with that list, or one message.
    """
    is_json_column = column.lower() in JSON_COLUMNS
    if not is_json_column and not _OBJECTS.match(cell):
        return cell
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    if is_json_column:
        return value if isinstance(value, list | None) else cell
    return value if has_turns(value) or _has_roles(value) or _holds_messages(value) else cell


def _has_roles(value: Any) -> bool:
    """Whether these are messages, and not other objects with a role."""
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and str(one.get("role")).lower() in _KNOWN_ROLES for one in value
    )


def _holds_messages(value: Any) -> bool:
    """Whether this is an object with messages, such as the input of a pair, or one message."""
    if not isinstance(value, Mapping):
        return False
    given = [value[name] for name in ("messages", "conversations") if name in value]
    return (
        any(map(has_turns, given))
        or any(map(_has_roles, given))
        or ("content" in value and _has_roles([value]))
    )


_OBJECTS = re.compile(r"\s*(\[\s*)?\{")


# An object after what may stand between rows.
_OBJECT = re.compile(r"(?<![^\s,\[\ufeff}])\{")


def _uncompressed(head: bytes) -> bytes:
    """The start of what a file compresses; the same bytes if it is not compressed, or not by Python."""
    container = _of_magic(head)
    try:
        if container is GZIP:
            return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, HEAD_BYTES)
        if container is XZ:
            return lzma.LZMADecompressor().decompress(head, HEAD_BYTES)
        if container is BZIP2:
            return bz2.BZ2Decompressor().decompress(head, HEAD_BYTES)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return b""
    return head


_MAGIC: Sequence[tuple[bytes, ForeignFormat]] = (
    (b"\x1f\x8b\x08", GZIP),
    (b"\xfd7zXZ\x00", XZ),
    *((b"BZh%d1AY&SY" % level, BZIP2) for level in range(1, 10)),
    (b"\x28\xb5\x2f\xfd", ZSTD),
    (b"PK\x03\x04", ZIP),
    (b"PAR1", PARQUET),
    (b"ARROW1\x00\x00", ARROW_FILE),
    (b"\xff\xff\xff\xff", ARROW_STREAM),  # before the length of its first message
    (b"FEA1", FEATHER_1),
    (b"%PDF-", BINARY),
    (b"version https://git-lfs.github.com/spec/", LFS_POINTER),
)
_TAR_AT = 257  # where a tar archive says that it is one


def _of_magic(head: bytes) -> ForeignFormat | None:
    return next((container for magic, container in _MAGIC if head.startswith(magic)), None)


def _packed(container: ForeignFormat, head: bytes, name: str) -> ForeignFormat | None:
    """The format inside of a compressed file that `regraft convert` cannot read; None: there is none.

    Only of formats that Python itself uncompresses.
    """
    if container not in (GZIP, XZ, BZIP2) or not (inside := _uncompressed(head)):
        return None
    if _of_magic(inside) in (GZIP, XZ, BZIP2, ZSTD):
        return TWICE
    found = container_of(inside, name)
    # A cut archive may have lost the rows after its white space.
    return found if found is not None and found is not EMPTY and not found.targets else None


_MARKUP = re.compile(r"<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE)
_BINARY_CHARACTERS = 1024  # in which a binary file has a NUL


def encoding_of(head: bytes) -> str:
    """The encoding of a text file, as Python names it: utf-8-sig unless the start shows UTF-16 or UTF-32."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # the first begins with UTF-16's mark
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = [byte == 0 for byte in head[:4]]  # of files without a mark, which begin with { or [
    if zeros == [False, True, False, True]:
        return "utf-16-le"
    return "utf-16-be" if zeros == [True, False, True, False] else "utf-8-sig"


@dataclass(frozen=True)
class CsvLayout:
    delimiter: str
    columns: list[str]  # the first may have no name: pandas writes its index there
    lines_before: int  # the line of the names: Excel's `sep=;`


def csv_layout(text: str, *, is_named: bool = False) -> CsvLayout | None:
    """Return the layout of a CSV file that starts with this text; None: it is not CSV.

    One column is recognized by its name, which is one of FIELDS: other files look like lines of text.

    Args:
        is_named: the file is named as CSV, so that any names of columns are believed.
    """
    text = text.lstrip("\r\n ")
    if text.lstrip().startswith(("{", "[")):
        return None
    said = _SEPARATOR.match(text)
    table = text[said.end() :] if said else text
    believed: CsvLayout | None = None
    for delimiter in (delimiters := said[1] if said else ",;\t|"):
        columns, row = _first_cells(table, delimiter)
        named = columns[1:] if columns[:1] == [""] else columns
        if not named or not all(_names_column(name, is_named) for name in named):
            continue
        layout = CsvLayout(delimiter, columns, 1 if said else 0)
        is_known = is_named or any(name.lower() in FIELDS for name in named)
        if len(columns) == 1:
            believed = layout if is_known and delimiter == delimiters[0] else believed
        elif row is not None and len(row) == len(columns):
            return layout
        elif is_named or (row is None and (is_known or said)):
            believed = layout if believed is None or len(believed.columns) == 1 else believed
    return believed


def _first_cells(table: str, delimiter: str) -> tuple[list[str], list[str] | None]:
    """The names of the columns, and the cells of the first row; None: there is none, or its quotes are wrong."""
    lines = csv.reader(io.StringIO(table, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = [name.strip() for name in next(lines, [])]
    except csv.Error:
        return [], None
    try:
        return columns, next(lines, None)
    except csv.Error:  # which the reader of the rows reports
        return columns, None


def _names_column(name: str, is_named: bool) -> bool:
    return name.isprintable() and (bool(name) if is_named else _COLUMN.fullmatch(name) is not None)


_COLUMN = re.compile(r"\w[^{}\[\]\":]*")
_TABLE_NAME = re.compile(r"\.[ct]sv(\.(gz|xz|bz2|zst))?$", re.IGNORECASE)
_SEPARATOR = re.compile(r'"?sep=([,;\t|])"?\r?\n', re.IGNORECASE)


def format_of_rows(rows: Sequence[Mapping[str, Any]], *, is_file: bool) -> ForeignFormat | None:
    """The foreign format that all these rows have; that of functions if one row uses them.

    Args:
        is_file: the only row is the whole file.
    """
    if any(map(uses_functions, rows)):
        if all("input" in row for row in rows):
            return FUNCTIONS_OF_PAIRS
        return FUNCTIONS_BEFORE_TEXT if all(map(_ends_with_text, rows)) else FUNCTIONS
    if any(map(_calls_tools, rows)) and all(isinstance(row.get("conversations"), list) for row in rows):
        return SHAREGPT_TOOLS
    for row_format, has_it in _ROW_FORMATS:
        if rows and all(not _is_of_a_method(row) and has_it(row) for row in rows):
            return _as_its_rows(row_format, rows[0])
    if is_file and rows and not _is_of_a_method(rows[0]) and rows_of_columns(rows[0], is_file=True):
        return _as_its_rows(COLUMNS, rows[0])
    return None


def _as_its_rows(found: ForeignFormat, row: Mapping[str, Any]) -> ForeignFormat:
    """The format, with the targets of the rows that an object holds, and whether they have an answer."""
    inside = (
        row["data"] if found is WRAPPED else rows_of_columns(row, is_file=True) if found is COLUMNS else None
    )
    if inside:
        return _fitted(found, inside[:FIRST_ROWS])
    if "dpo" not in found.targets:
        found = replace(found, lacks_pair=_has_room_for_pair(row, lacks_prompt=False))
    if found.seen in _PROMPTS_ONLY and set(ANSWERS).isdisjoint(map(str.lower, row)):
        return replace(found, lacks_answer=True) if len(row) > 1 else replace(found, targets=("rft",))
    return found


def is_labeled_completion(row: Mapping[str, Any]) -> bool:
    """Whether the row is TRL's good or bad answer."""
    return {"prompt", "completion"} <= row.keys() and truth_of(row.get("label")) is not None


def truth_of(label: Any) -> bool | None:
    """The label of an answer as a boolean, such as of 1, "False" or "yes"; None: it is neither true nor false."""
    if isinstance(label, str):
        return _TRUTHS.get(label.strip().lower())
    return bool(label) if isinstance(label, int | float) and label in (0, 1) else None


_TRUTHS = MappingProxyType(
    {**dict.fromkeys(("true", "yes", "1", "1.0"), True), **dict.fromkeys(("false", "no", "0", "0.0"), False)}
)


def wraps_rows(row: Mapping[str, Any]) -> bool:
    """Whether the object has the rows of its file in data, and no field of a row."""
    inner = row.get("data")
    is_list = isinstance(inner, list) and bool(inner) and all(isinstance(one, Mapping) for one in inner)
    return is_list and FIELDS.isdisjoint(row)


def rows_of_columns(row: Mapping[str, Any], *, is_file: bool = False) -> list[dict[str, Any]] | None:
    """The rows of an object with the columns of its file, as lists or as pandas writes them; None: it is a row.

    In pandas' columns each value is under the index of its row: {"prompt": {"0": "a"}, "answer": {"0": "b"}}.

    Args:
        is_file: the object is the whole file, so that its keys may have any names.
    """
    columns = [*row.values()]
    if not columns or not columns[0] or (FIELDS.isdisjoint(map(str.lower, row)) and not is_file):
        return None
    if all(isinstance(one, Mapping) and one.keys() == columns[0].keys() for one in columns):
        indexes = list(columns[0])
        if not all(index.isdecimal() for index in indexes):
            return None
        return [{name: column[index] for name, column in row.items()} for index in indexes]
    # Messages are a list of objects, and the one message of a prompt may have an answer in a list.
    if not all(isinstance(one, list) and len(one) == len(columns[0]) for one in columns):
        return None
    if any(isinstance(value, Mapping) for column in columns for value in column):
        return None
    return [dict(zip(row, values, strict=True)) for values in zip(*columns, strict=True)]


def has_turns(messages: Any) -> bool:
    """Whether these are turns of ShareGPT: messages with `from` and `value`."""
    turns = messages if isinstance(messages, list) else ()
    return bool(turns) and all(isinstance(one, Mapping) and {"from", "value"} <= one.keys() for one in turns)


def _calls_tools(row: Mapping[str, Any]) -> bool:
    """Whether a row of ShareGPT has tools, a call of one or its result."""
    turns = row.get("conversations")
    speakers = [turn.get("from") for turn in turns or () if isinstance(turn, Mapping)]
    tagged = (str(turn.get("value")) for turn in turns or () if isinstance(turn, Mapping))
    return bool(
        row.get("tools")
        or not {*CALLS, *RESULTS}.isdisjoint(speakers)
        or any("<tool_call>" in text for text in tagged)
    )


def repeats_an_answer(row: Mapping[str, Any]) -> bool:
    """Whether messages is a conversation with an answer, in a row that has the answers chosen and rejected."""
    return _ends_with_answer(row) and row.get("chosen") is not None and row.get("rejected") is not None


def _ends_with_answer(row: Mapping[str, Any]) -> bool:
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _ends_with_text(row: Mapping[str, Any]) -> bool:
    """Whether the last message of a row is a text of the assistant, and no call: an answer for a grader."""
    last = row["messages"][-1] if _ends_with_answer(row) else {}
    return isinstance(last.get("content"), str) and not (last.get("function_call") or last.get("tool_calls"))


def uses_functions(row: Mapping[str, Any]) -> bool:
    """Whether the row has OpenAI's functions or calls from before there were tools."""
    given = row.get("input")
    messages = row.get("messages") or (given.get("messages") if isinstance(given, Mapping) else None)
    called = (
        one.get("function_call") is not None or one.get("role") == "function"
        for one in (messages if isinstance(messages, list) else ())
        if isinstance(one, Mapping)
    )
    return bool(row.get("functions")) or any(called)


def _is_answered(row: Mapping[str, Any]) -> bool:
    """Whether a row with messages ends with an answer, or has one in a field."""
    has_one = not {*ANSWERS, "chosen", "preferred_output"}.isdisjoint(map(str.lower, row))
    return has_one or _ends_with_answer(row)


def _has_pair(row: Mapping[str, Any]) -> bool:
    """Whether a row has two answers to compare, or one with a label."""
    names = {name.lower() for name in row}
    is_labeled = "label" in names and not names.isdisjoint(ANSWERS)
    return (
        is_labeled or {"preferred_output", "non_preferred_output"} <= names or {"chosen", "rejected"} <= names
    )


def _is_of_a_method(row: Mapping[str, Any]) -> bool:
    """Whether a job of some method reads the row, or refuses it with a sentence about its messages or answers."""
    if "messages" in row:
        messages = row["messages"]
        is_list = isinstance(messages, list) and all(isinstance(one, Mapping) for one in messages)
        return is_list and not (repeats_an_answer(row) or has_turns(messages))
    answers = [row[name] for name in ("preferred_output", "non_preferred_output") if name in row]
    return bool(answers) and not all(isinstance(one, Mapping) for one in answers)


def _is_pretty(text: str, *, is_cut: bool) -> bool:
    """Whether the text starts with a JSON object over several lines."""
    first, _, rest = text.partition("\n")
    if not text.startswith("{") or not rest.strip() or _is_json(first):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        # An object that is longer than the text has its error at the end.
        return is_cut and first.rstrip().endswith(("{", "[", ",")) and error.pos > len(first)
    except RecursionError:
        return False
    return "\n" in text[:end]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
