"""The items of an eval run: one Parquet blob per block of rows, and the journal of blocks that are not complete.

A block has BLOCK_ROWS consecutive rows of the source. An item is stored as it is shown, with its three large fields as
JSON.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.tables import EvalJournal, EvalPage, EvalRun
from core.storage.store import BlobNotFound, BlobStore

Item = dict[str, Any]
"""One item, with the keys of SCHEMA; the columns in _JSON are parsed."""

BLOCK_ROWS = 128
MAX_ROWS = 50_000
_JSON = ("datasource_item", "results", "sample")
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("line", pa.int32()),  # of the source, from 1; of an imported run, the order of its items
        ("datasource_item_id", pa.int64()),  # the line, except in an imported run
        ("status", pa.string()),  # pass | fail | error
        ("created_at", pa.int64()),
        *((name, pa.string()) for name in _JSON),
    ]
)


def item_id(run_id: str, line: int) -> str:
    return f"outputitem_{run_id.removeprefix('evalrun_')}_{line}"


def block_of(line: int) -> int:
    return (line - 1) // BLOCK_ROWS


def blob_key(run: EvalRun, block: int, epoch: int) -> str:
    """The key has the epoch: a worker that lost the run cannot overwrite the page of its successor."""
    return f"projects/{run.project_id}/evals/{run.id}/{block:06d}-{epoch}.parquet"


@dataclass(frozen=True)
class Encoded:
    data: bytes
    sha256: str


def encode(items: Sequence[Item]) -> Encoded:
    """The items as a Parquet file."""
    rows = [item | {name: _text(item[name]) for name in _JSON} for item in items]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink, compression="zstd", store_schema=False)
    data: bytes = sink.getvalue().to_pybytes()
    return Encoded(data, hashlib.sha256(data).hexdigest())


def decode(data: bytes) -> list[Item]:
    with tempfile.TemporaryDirectory(prefix="regraft-evals-") as folder:
        path = Path(folder) / "page"
        path.write_bytes(data)
        rows: list[Item] = pq.read_table(path).to_pylist()
    return [row | {name: json.loads(row[name]) for name in _JSON} for row in rows]


@dataclass(frozen=True)
class StoredItems:
    """The places of a run's items: pages by block, and finished items that are in no page yet."""

    pages: dict[int, EvalPage]
    loose: dict[int, list[Item]]

    def blocks(self) -> list[int]:
        return sorted({*self.pages, *self.loose})


def items_of_run(session: Session, run_id: str) -> StoredItems:
    """Find the items of a run. Needs a session of Database.read, which sees one snapshot: the worker replaces entries
    of the journal by pages.
    """
    pages = session.scalars(select(EvalPage).where(EvalPage.run_id == run_id)).all()
    loose: dict[int, list[Item]] = {}
    mine = EvalJournal.run_id == run_id, EvalJournal.part == 0
    journal = select(EvalJournal).where(*mine).order_by(EvalJournal.line)
    for entry in session.scalars(journal):
        if "item" in entry.data:
            loose.setdefault(block_of(entry.line), []).append(entry.data["item"])
    return StoredItems({page.number: page for page in pages}, loose)


def find(
    blobs: BlobStore,
    where: StoredItems,
    *,
    after_line: int | None = None,
    newest_first: bool = False,
    status: str | None = None,
) -> Iterator[Item]:
    """Yield the items after a line, in the order of the source or reversed. Reads one block at a time."""
    for block in sorted(where.blocks(), reverse=newest_first):
        if after_line is not None:
            cursor = block_of(after_line)
            if block > cursor if newest_first else block < cursor:
                continue
        items = of_block(blobs, where, block)
        for item in reversed(items) if newest_first else items:
            line = item["line"]
            seen = after_line is not None and (line >= after_line if newest_first else line <= after_line)
            if not seen and status in (None, item["status"]):
                yield item


def of_block(blobs: BlobStore, where: StoredItems, block: int) -> list[Item]:
    """The finished items of a block, in order. A page that was deleted meanwhile is empty."""
    page = where.pages.get(block)
    if page is None:
        return where.loose.get(block, [])
    try:
        return decode(blobs.read(page.blob_key))
    except BlobNotFound:
        return []


def by_id(blobs: BlobStore, where: StoredItems, run_id: str, wanted: str) -> Item | None:
    """The item with this id. Its number tells its block, except in an imported run, which may number in any way."""
    blocks = where.blocks()
    prefix, _, line = wanted.rpartition("_")
    if prefix == f"outputitem_{run_id.removeprefix('evalrun_')}" and line.isdecimal() and len(line) < 10:
        likely = block_of(int(line))
        blocks.sort(key=lambda block: block != likely)
    for block in blocks:
        for item in of_block(blobs, where, block):
            if item["id"] == wanted:
                return item
    return None


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
