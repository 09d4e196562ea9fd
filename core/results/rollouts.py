"""Graded samples in columns: one Parquet blob per page, one page per step and split of a job (docs/howto/rollouts.md).

Pages of more than IN_MEMORY_BYTES are read from a temporary file, one row group at a time, starting with the filtered
columns, so the memory of a request does not grow with the job.
"""

import json
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.database.tables import RolloutPage
from core.errors import ContentDamaged
from core.results.prefetch import ahead
from core.results.rollout_filters import SEARCHED, Wanted, all_of, contains
from core.storage.store import BlobNotFound, BlobStore
from core.text import storable, storable_json

Split = Literal["train", "valid"]
Row = dict[str, Any]
"""One sample, with the keys of SCHEMA."""

IN_MEMORY_BYTES = (
    1 << 20
)  # a page of at most this size is read in one go; a larger one from disk, by row group
ROWS_AT_ONCE = 256  # per row group: bounds memory, and is the unit that a filter can skip

_TEXTS = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),  # train | valid
        (
            "group",
            pa.int32(),
        ),  # index of the prompt in the step, from 0; its samples are compared with each other
        ("member", pa.int32()),  # index of the sample in the group, from 0
        ("line", pa.int32()),  # of the dataset file, from 1
        ("messages", pa.string()),  # JSON: the prompt
        ("item", pa.string()),  # JSON: the other fields of the dataset row
        ("output_text", pa.string()),  # the final answer, without calls
        (
            "output_tools",
            pa.string(),
        ),  # JSON: the calls in it, in OpenAI's format; null: the row has no tools
        ("output_tools_error", pa.string()),  # why calls could not be read, so that they are in the text
        # Of an episode; null: the answer is of one call.
        ("conversation", pa.string()),  # JSON: the messages after the prompt
        ("stop", pa.string()),  # why it ended
        ("trace_id", pa.string()),  # as tools and the grader got it
        ("output_reasoning", pa.string()),  # what a reasoning model wrote before it
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("reasoning_tokens", pa.int32()),  # of these
        ("grammar_start", pa.int32()),  # the index of the final answer's first token
        ("finish_reason", pa.string()),
        ("policy_step", pa.int32()),  # the steps that the policy had learned from which sampled it
        ("score", pa.float64()),  # null: could not be graded; see reason and error
        ("reason", pa.string()),
        ("error", pa.string()),
        ("output", pa.string()),  # printed by the grader
        ("sub_scores", pa.map_(pa.string(), pa.float64())),  # by grader, of a multi grader
        ("sub_reasons", _TEXTS),
        ("sub_errors", _TEXTS),
        ("sub_outputs", _TEXTS),
        ("centered_reward", pa.float64()),  # the score minus the mean of its group
        ("advantage", pa.float64()),  # as used in training; null: the sample was not trained on
        ("trained", pa.bool_()),
        ("replacement", pa.bool_()),  # resampled in place of a prompt without signal
        ("has_tokens", pa.bool_()),  # whether TOKENS is stored
        (  # of an answer that was judged by steps; a step ends before this character
            "steps",
            pa.list_(pa.struct([("end", pa.int32()), ("score", pa.float64()), ("advantage", pa.float64())])),
        ),
    ]
)
# A column of some samples: the values of each token, the thought and the stop token included. Only `tokens_at` reads
# it, and pages without any lack it. Half precision has three decimal digits, and takes half of the space.
TOKENS = pa.field(
    "tokens",
    pa.list_(
        pa.struct(
            [
                ("text", pa.string()),  # all of them together are the text of the answer
                ("logprob", pa.float16()),  # of the sampler; null: the token was not sampled
                ("advantage", pa.float16()),  # as used in training; null: not trained on
                ("gap", pa.float16()),  # log p of the trainer less that of the sampler; null: not computed
            ]
        )
    ),
)
_MAPS = ("sub_scores", "sub_reasons", "sub_errors", "sub_outputs")
_JSON = ("messages", "item", "output_tools", "conversation")
_ID = re.compile(r"rollout_(\d{1,9})_([tv])_(\d{1,9})_(\d{1,9})")


@dataclass(frozen=True, order=True)
class SamplePosition:
    """The position of a sample in its job. Lists sort by it: by step, "train" before "valid"."""

    step: int
    split: str
    group: int
    member: int

    @classmethod
    def of(cls, row: Row) -> "SamplePosition":
        return cls(row["step"], row["split"], row["group"], row["member"])

    @classmethod
    def parse(cls, sample_id: str) -> "SamplePosition | None":
        """Parse the id of a sample; None if it is invalid."""
        match = _ID.fullmatch(sample_id)
        if match is None:
            return None
        step, split, group, member = match.groups()
        return cls(int(step), "train" if split == "t" else "valid", int(group), int(member))

    @property
    def id(self) -> str:
        return f"rollout_{self.step}_{self.split[0]}_{self.group}_{self.member}"


# Writing.


# Most pages have few samples with little text, so the overhead of the format matters: this halves it.
FORMAT = {
    "compression": "zstd",
    "store_schema": False,  # Arrow's copy of the Parquet schema
    "use_dictionary": ["split", "messages", "item", "finish_reason", "reason", "error"],
    "write_statistics": ["step", "line", "score", "advantage"],
}


def encode(rows: Sequence[Row], total: int) -> bytes:
    """The samples as a Parquet file, with the total number of samples in its metadata."""
    sink = pa.BufferOutputStream()
    schema = SCHEMA.append(TOKENS) if any(row.get(TOKENS.name) for row in rows) else SCHEMA
    with pq.ParquetWriter(sink, schema, **FORMAT) as writer:
        writer.write_table(_table(rows, schema), row_group_size=ROWS_AT_ONCE)
        writer.add_key_value_metadata({"total": str(total)})
    data: bytes = sink.getvalue().to_pybytes()
    return data


@dataclass(frozen=True)
class Fitted:
    data: bytes
    samples: int
    total: int


def fitted(groups: Sequence[Sequence[Row]], *, most_samples: int, most_bytes: int, seed: str) -> Fitted:
    """A page of whole groups: all of them if they are within both bounds.

    Otherwise a sample of the groups by `seed`, nested: a smaller page is a subset of a larger one. It may be empty. The
    values of tokens are left out before any group is.
    """
    total = sum(map(len, groups))
    drawn = random.Random(seed).sample(range(len(groups)), len(groups))
    while drawn and sum(len(groups[number]) for number in drawn) > most_samples:
        drawn.pop()

    def page(count: int) -> Fitted:
        rows = [row for number in sorted(drawn[:count]) for row in groups[number]]
        return Fitted(encode(rows, total), len(rows), total)

    best = page(len(drawn))
    if len(best.data) <= most_bytes:
        return best
    if any(row.get(TOKENS.name) for rows in groups for row in rows):
        bare = [[row | {"has_tokens": False, TOKENS.name: None} for row in rows] for rows in groups]
        return fitted(bare, most_samples=most_samples, most_bytes=most_bytes, seed=seed)
    best, fits, too_many = page(0), 0, len(drawn)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        tried = page(middle)
        if len(tried.data) <= most_bytes:
            best, fits = tried, middle
        else:
            too_many = middle
    return best


def bytes_before(session: Session, job_id: str, step: int) -> int:
    """Bytes of the job's pages of earlier steps."""
    before = select(func.coalesce(func.sum(RolloutPage.bytes), 0))
    return session.scalar(before.where(RolloutPage.job_id == job_id, RolloutPage.step < step)) or 0


# Reading.


def pages(
    session: Session,
    job_id: str,
    *,
    first_step: int | None = None,
    last_step: int | None = None,
    split: str | None = None,
) -> Sequence[RolloutPage]:
    """The job's pages in the order of their samples."""
    statement = select(RolloutPage).where(RolloutPage.job_id == job_id)
    if first_step is not None:
        statement = statement.where(RolloutPage.step >= first_step)
    if last_step is not None:
        statement = statement.where(RolloutPage.step <= last_step)
    if split is not None:
        statement = statement.where(RolloutPage.split == split)
    return session.scalars(statement.order_by(RolloutPage.step, RolloutPage.split)).all()


def find(
    blobs: BlobStore,
    pages: Sequence[RolloutPage],
    wanted: Wanted,
    *,
    after: SamplePosition | None = None,
    descending: bool = False,
) -> Iterator[Row]:
    """Yield the matching samples of these pages after `after`, as the API shows them. Lazy."""
    for table in found_tables(blobs, pages, wanted, after=after, descending=descending):
        yield from records(table)


def at(blobs: BlobStore, page: RolloutPage, place: SamplePosition) -> Row | None:
    """One sample of a page; None if it is not stored."""
    return next(
        (row for row in find(blobs, [page], Wanted(group=place.group)) if row["member"] == place.member), None
    )


def tokens_at(blobs: BlobStore, page: RolloutPage, place: SamplePosition) -> list[Row] | None:
    """The values of each token of one sample, with the keys of TOKENS; None if they are not stored."""
    opened, matches = _scanned(blobs, page, Wanted(group=place.group))
    try:
        for number, _ in matches:
            found = opened.part(number, ["group", "member", TOKENS.name])
            mine = found.filter(
                pc.and_(pc.equal(found["group"], place.group), pc.equal(found["member"], place.member))
            )
            if mine.num_rows:
                tokens: list[Row] | None = mine[TOKENS.name][0].as_py()
                return tokens
    finally:
        opened.close()
    return None


def found_tables(
    blobs: BlobStore,
    pages: Sequence[RolloutPage],
    wanted: Wanted,
    *,
    after: SamplePosition | None = None,
    descending: bool = False,
) -> Iterator[pa.Table]:
    """As `find`, by row group or small page. A page whose blob was just deleted by retention is empty."""
    for opened, masks in _scan(blobs, pages, wanted, after, descending):
        for number, mask in masks:
            table = (
                opened.part(number)
                if mask is None
                else opened.take(number, pc.indices_nonzero(mask).to_pylist())
            )
            if table.num_rows:
                yield table.take(list(range(table.num_rows))[::-1]) if descending else table


class OpenPage(Protocol):
    """The samples of a page, in parts: row groups, or the whole of a small page."""

    page: RolloutPage
    parts: int

    def part(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The samples of one part, with these columns of SCHEMA and TOKENS, or with all of SCHEMA."""
        ...

    def take(self, number: int, rows: Sequence[int]) -> pa.Table:
        """Some samples of one part, by ascending index, with all columns."""
        ...

    def close(self) -> None: ...


Matches = list[tuple[int, Any]]
"""Of each part of a page with matching samples the number, and which of its samples match (None: all)."""
T = TypeVar("T")


def map_pages(
    blobs: BlobStore, pages: Sequence[RolloutPage], wanted: Wanted, use: Callable[[OpenPage, Matches], T]
) -> Iterator[T]:
    """Yield `use` of each page and its matching samples, which runs in a thread."""

    def used(page: RolloutPage) -> T:
        opened, matches = _scanned(blobs, page, wanted)
        try:
            return use(opened, matches)
        finally:
            opened.close()

    return ahead(used, pages, lambda result: None)


def columns(
    blobs: BlobStore, pages: Sequence[RolloutPage], names: Sequence[str]
) -> Iterator[tuple[int, pa.Table]]:
    """These columns of all samples, by page with its step."""

    def read(opened: OpenPage, matches: Matches) -> tuple[int, pa.Table]:
        parts = [opened.part(number, names) for number, _ in matches]
        return opened.page.step, pa.concat_tables([SCHEMA.empty_table().select(names), *parts])

    return map_pages(blobs, pages, Wanted(), read)


def _scan(
    blobs: BlobStore,
    pages: Sequence[RolloutPage],
    wanted: Wanted,
    after: SamplePosition | None,
    descending: bool,
) -> Iterator[tuple[OpenPage, Matches]]:
    """Yield each page, open until the next one. Texts are read only to search them."""
    here = (after.step, after.split) if after is not None else None

    def scanned_page(page: RolloutPage) -> tuple[OpenPage, Matches]:
        behind = after if (page.step, page.split) == here else None
        return _scanned(blobs, page, wanted, behind, descending)

    ordered = reversed(pages) if descending else pages
    left = (
        page
        for page in ordered
        if here is None or (at := (page.step, page.split)) == here or (at > here) != descending
    )
    for opened, matches in ahead(scanned_page, left, lambda scanned: scanned[0].close()):
        try:
            yield opened, matches
        finally:
            opened.close()


def _scanned(
    blobs: BlobStore,
    page: RolloutPage,
    wanted: Wanted,
    after: SamplePosition | None = None,
    descending: bool = False,
) -> tuple[OpenPage, Matches]:
    opened = open_page(blobs, page)
    try:
        masks = [
            (number, _matching(opened, number, wanted, _behind(opened, number, after, descending)))
            for number in range(opened.parts)[:: -1 if descending else 1]
        ]
    except BaseException:
        opened.close()
        raise
    return opened, [(number, mask) for number, mask in masks if mask is None or pc.any(mask).as_py()]


def _matching(opened: OpenPage, number: int, wanted: Wanted, *conditions: Any) -> Any:
    """Whether each sample of a part matches, and the conditions hold that are not None. None: all do."""
    narrow = opened.part(number, wanted.columns) if wanted.columns else None
    own = None if narrow is None else wanted.mask(narrow)
    mask = all_of(one for one in (own, *conditions) if one is not None)
    if wanted.text is None or (mask is not None and not pc.any(mask).as_py()):
        return mask
    text = contains(opened.part(number, SEARCHED), wanted.text)
    return text if mask is None else pc.and_(mask, text)


def _behind(opened: OpenPage, number: int, after: SamplePosition | None, descending: bool) -> Any:
    """Whether each sample of a part comes after the cursor; None without one in this page."""
    if after is None:
        return None
    beyond = pc.less if descending else pc.greater
    place = opened.part(number, ["group", "member"])
    same = pc.and_(pc.equal(place["group"], after.group), beyond(place["member"], after.member))
    return pc.or_(beyond(place["group"], after.group), same)


@contextmanager
def _intact(page: RolloutPage) -> Iterator[None]:
    """Raise ContentDamaged for errors of a stored page that is not Parquet, or is truncated or altered."""
    try:
        yield
    except (pa.ArrowException, OSError) as cause:
        # pyarrow raises OSError for a page whose compressed data is altered; those of a disk have an errno.
        if isinstance(cause, OSError) and cause.errno is not None:
            raise
        raise ContentDamaged(
            f"The stored {page.split} rollouts of step {page.step} are damaged. Select other steps with step_from and "
            "step_to."
        ) from cause


def open_page(blobs: BlobStore, page: RolloutPage) -> OpenPage:
    """The samples of a page. There are none if retention has just deleted its blob.

    Raises:
        ContentDamaged: the blob is not a page; reading a part of the page raises it, too.
    """
    try:
        if page.bytes <= IN_MEMORY_BYTES:
            return _Parquet(page, pa.BufferReader(blobs.read(page.blob_key)), as_one_part=True)
        chunks = blobs.open(page.blob_key)
    except BlobNotFound:
        return _Deleted(page)
    file = tempfile.TemporaryFile(prefix="regraft-rollouts-")  # noqa: SIM115 - closed with the page
    try:
        for chunk in chunks:
            file.write(chunk)
        file.seek(0)
        return _Parquet(page, file)
    except BaseException:
        file.close()
        raise


def records(table: pa.Table) -> list[Row]:
    """The rows as the API shows them: with their id, and with parsed JSON columns."""
    rows: list[Row] = table.to_pylist(maps_as_pydicts="strict")
    return [
        {"id": SamplePosition.of(row).id}
        | row
        | {key: json.loads(row[key]) if row[key] else None for key in _JSON}
        for row in rows
    ]


class _Parquet(OpenPage):
    def __init__(self, page: RolloutPage, file: Any, *, as_one_part: bool = False) -> None:
        self.page = page
        self._source = file
        with _intact(page):
            self._file = pq.ParquetFile(file)
        groups = range(self._file.num_row_groups)
        self._parts = [list(groups)] if as_one_part else [[number] for number in groups]
        self.parts = len(self._parts)

    def part(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        return self._read(self._parts[number], columns)

    def take(self, number: int, rows: Sequence[int]) -> pa.Table:
        tables, start = [SCHEMA.empty_table()], 0
        for group in self._parts[number]:  # only those with one of these rows are read
            end = start + self._rows(group)
            if here := [row - start for row in rows if start <= row < end]:
                tables.append(self._read([group]).take(here))
            start = end
        return pa.concat_tables(tables)

    def _rows(self, group: int) -> int:
        return int(self._file.metadata.row_group(group).num_rows)

    def _read(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        names = SCHEMA.names if columns is None else list(columns)
        with _intact(self.page):
            table = self._file.read_row_groups(groups, columns=names, use_threads=False)
        if TOKENS.name in names and TOKENS.name not in table.column_names:
            table = table.append_column(TOKENS, pa.nulls(sum(map(self._rows, groups)), TOKENS.type))
        return table.select(names)

    def close(self) -> None:
        self._source.close()


class _Deleted(OpenPage):
    """A page whose blob retention has just deleted: no samples."""

    parts = 1

    def __init__(self, page: RolloutPage) -> None:
        self.page = page

    def part(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        schema = pa.schema([*SCHEMA, TOKENS])
        return schema.empty_table().select(SCHEMA.names if columns is None else columns)

    def take(self, number: int, rows: Sequence[int]) -> pa.Table:
        return SCHEMA.empty_table()

    def close(self) -> None:
        pass


def _table(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([stored | _pairs(stored) for stored in map(_storable, rows)], schema=schema)


def _storable(row: Row) -> Row:
    """The row with all its texts storable. Tokens are many, so only their `text` is changed."""
    stored: dict[str, Any] = storable_json({k: v for k, v in row.items() if k != TOKENS.name})
    if tokens := row.get(TOKENS.name):
        stored[TOKENS.name] = [token | {"text": storable(token["text"])} for token in tokens]
    return stored


def _pairs(row: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]] | None]:
    """Convert maps to pyarrow's format."""
    return {key: None if row[key] is None else list(row[key].items()) for key in _MAPS}
