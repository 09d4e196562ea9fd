"""Graded samples in columns: one Parquet blob per page, one page per step and split of a job (docs/howto/rollouts.md).

Pages are read from a temporary file, one row group at a time, starting with the filtered columns, so the memory of a
request does not grow with the job. Pages with the suffix .jsonl were written by versions before this format.
"""

import json
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.database.tables import RolloutPage
from core.storage.store import BlobNotFound, BlobStore

Split = Literal["train", "valid"]
Row = dict[str, Any]
"""One sample, with the keys of SCHEMA."""

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
        ("output_text", pa.string()),  # the final answer
        ("output_reasoning", pa.string()),  # what a reasoning model wrote before it
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("reasoning_tokens", pa.int32()),  # of these
        ("grammar_start", pa.int32()),  # the index of the final answer's first token
        ("finish_reason", pa.string()),
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
        (  # of an answer that was judged by steps; a step ends before this character
            "steps",
            pa.list_(pa.struct([("end", pa.int32()), ("score", pa.float64()), ("advantage", pa.float64())])),
        ),
    ]
)
# Earlier names of columns, by the name now. Pages of earlier versions have them, and responses do until version 0.2.
EARLIER_NAMES = {"centered_reward": "centred_reward"}
_MAPS = ("sub_scores", "sub_reasons", "sub_errors", "sub_outputs")
_JSON = ("messages", "item")
# The columns for filters and for sorting.
_FILTERED = ["group", "member", "line", "finish_reason", "score", "error", "sub_scores"]

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


@dataclass(frozen=True)
class Wanted:
    """A filter; None means any. With `grader` the bounds and `graded` apply to that part of a multi grader."""

    line: int | None = None
    finish_reason: str | None = None
    graded: bool | None = None
    error: str | None = None
    grader: str | None = None
    min_score: float | None = None
    max_score: float | None = None

    @property
    def all(self) -> bool:
        return self == Wanted()

    def matches(self, row: Row) -> bool:
        scores = row["sub_scores"] or {}
        score = row["score"] if self.grader is None else scores.get(self.grader)
        return (
            (self.grader is None or self.grader in scores)
            and self.line in (None, row["line"])
            and self.finish_reason in (None, row["finish_reason"])
            and self.graded in (None, score is not None)
            and self.error in (None, row["error"])
            # A missing score is within no bounds.
            and (self.min_score is None or (score is not None and score >= self.min_score))
            and (self.max_score is None or (score is not None and score <= self.max_score))
        )


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
    with pq.ParquetWriter(sink, SCHEMA, **FORMAT) as writer:
        writer.write_table(_table(rows, SCHEMA), row_group_size=ROWS_AT_ONCE)
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

    Otherwise a sample of the groups by `seed`, nested: a smaller page is a subset of a larger one. It may be empty.
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

    def keep(row: Row) -> bool:
        return (row["group"], row["member"]) == (place.group, place.member)

    try:
        return next((row for table in tables(blobs, page, keep) for row in records(table)), None)
    except BlobNotFound:
        return None


def found_tables(
    blobs: BlobStore,
    pages: Sequence[RolloutPage],
    wanted: Wanted,
    *,
    after: SamplePosition | None = None,
    descending: bool = False,
) -> Iterator[pa.Table]:
    """As `find`, in batches of at most ROWS_AT_ONCE. A page whose blob was just deleted by retention is empty."""
    here = (after.step, after.split) if after is not None else None
    for page in reversed(pages) if descending else pages:
        at = (page.step, page.split)
        if here is not None and at != here and (at > here) == descending:
            continue
        if after is not None and at == here:
            keep: Keep | None = _behind(after, descending, wanted)
        else:
            keep = None if wanted.all else wanted.matches
        try:
            yield from tables(blobs, page, keep, descending=descending)
        except BlobNotFound:
            continue


Keep = Callable[[Row], bool]


def _behind(after: SamplePosition, descending: bool, wanted: Wanted) -> Keep:
    """A predicate for the page of the cursor: matching samples after it."""

    def keep(row: Row) -> bool:
        place, cursor = (row["group"], row["member"]), (after.group, after.member)
        return (place < cursor if descending else place > cursor) and wanted.matches(row)

    return keep


def tables(
    blobs: BlobStore, page: RolloutPage, keep: Keep | None = None, *, descending: bool = False
) -> Iterator[pa.Table]:
    """Yield the samples of a page that `keep` selects (None: all), in batches of at most ROWS_AT_ONCE.

    `keep` sees only the columns in _FILTERED.

    Raises, with the first next(): BlobNotFound.
    """
    with tempfile.TemporaryDirectory(prefix="regraft-rollouts-") as folder:
        path = Path(folder) / "page"
        blobs.download(page.blob_key, path)
        batches = _older(path, page, keep) if is_older(page) else _parquet(path, keep, descending)
        for table in batches:
            if table.num_rows:
                yield table.take(list(range(table.num_rows))[::-1]) if descending else table


def is_older(page: RolloutPage) -> bool:
    return page.blob_key.endswith(".jsonl")


def records(table: pa.Table) -> list[Row]:
    """The rows as the API shows them: with their id, and with parsed JSON columns."""
    rows: list[Row] = table.to_pylist(maps_as_pydicts="strict")
    return [
        {"id": SamplePosition.of(row).id}
        | row
        | {key: json.loads(row[key]) if row[key] else None for key in _JSON}
        | {earlier: row[name] for name, earlier in EARLIER_NAMES.items()}
        for row in rows
    ]


def with_earlier_names(table: pa.Table) -> pa.Table:
    """The table of a downloaded file, with the renamed columns under both names."""
    for name, earlier in EARLIER_NAMES.items():
        table = table.append_column(SCHEMA.field(name).with_name(earlier), table.column(name))
    return table


def _parquet(path: Path, keep: Keep | None, descending: bool) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        numbers = range(file.num_row_groups)
        for number in reversed(numbers) if descending else numbers:
            if keep is None:
                yield _current(file.read_row_group(number))
                continue
            looked_at = file.read_row_group(number, columns=_FILTERED).to_pylist(maps_as_pydicts="strict")
            places = [place for place, row in enumerate(looked_at) if keep(row)]
            if places:  # otherwise the texts of this row group are not read
                yield _current(file.read_row_group(number).take(places))


def _current(table: pa.Table) -> pa.Table:
    """The table with all columns of SCHEMA under their names of today.

    Pages of earlier versions lack some, which are null, and have earlier names of others.
    """
    now = {earlier: name for name, earlier in EARLIER_NAMES.items()}
    table = table.rename_columns([now.get(name, name) for name in table.column_names])
    for field in SCHEMA:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(SCHEMA.names)


def _older(path: Path, page: RolloutPage, keep: Keep | None) -> Iterator[pa.Table]:
    """A page in JSON lines, without groups and advantages: groups are derived from the members."""
    rows: list[Row] = []
    group, last = -1, -1
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            stored = json.loads(line)
            member = stored.get("member", number)
            group, last = (group if member > last >= 0 else group + 1), member
            row = dict.fromkeys(SCHEMA.names) | stored | {"group": group, "member": member}
            row |= {"step": page.step, "split": page.split, "sub_scores": stored.get("sub_scores") or {}}
            row |= {"messages": json.dumps(stored["messages"]) if "messages" in stored else None}
            if keep is None or keep(row):
                rows.append(row)
    yield _table(rows, SCHEMA)


def _table(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([row | _pairs(row) for row in rows], schema=schema)


def _pairs(row: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]] | None]:
    """Convert maps to pyarrow's format."""
    return {key: None if row[key] is None else list(row[key].items()) for key in _MAPS}
