"""Samples sorted by a column. A few columns rank the whole selection; only one page of it is read."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from core.database.tables import RolloutPage
from core.results import rollouts
from core.results.prefetch import ahead
from core.results.rollout_filters import Wanted
from core.results.rollouts import SCHEMA, Matches, OpenPage, Row, SamplePosition
from core.storage.store import BlobStore

SortColumn = Literal["score", "advantage", "centered_reward", "completion_tokens"]
_EMPTY = pa.table({name: pa.array([], pa.int32()) for name in ("page", "part", "row", "group", "member")})


def page_of(
    blobs: BlobStore,
    pages: Sequence[RolloutPage],
    wanted: Wanted,
    *,
    by: SortColumn,
    descending: bool,
    after: SamplePosition | None,
    limit: int | None,
) -> list[Row]:
    """The first `limit` (None: all) matching samples after `after`, by a column and then by position; nulls come last.

    Raises:
        KeyError: `after` is not among the matching samples.
    """
    matches = _matches(blobs, pages, wanted, by)
    # The sort is stable, so that equal samples stay in the order of their places.
    keys = [("is_missing", "ascending"), (by, "descending" if descending else "ascending")]
    order = pc.sort_indices(matches, sort_keys=keys)
    start = 0 if after is None else pc.index(order, _row(matches, pages, after)).as_py() + 1
    shown = matches.select(StoredAt._fields).take(order.slice(start, limit))
    places = [StoredAt(**place) for place in shown.to_pylist()]
    rows = _read(blobs, pages, places)
    return [rows[place] for place in places if place in rows]  # retention may have deleted some since


class StoredAt(NamedTuple):
    """The location of a sample: the index of its page, of the part in it, and of the row in that."""

    page: int
    part: int
    row: int


def _matches(blobs: BlobStore, pages: Sequence[RolloutPage], wanted: Wanted, by: SortColumn) -> pa.Table:
    """The matching samples by position: where each is stored, its group and member, and its value."""
    number_of = {(page.step, page.split): number for number, page in enumerate(pages)}

    def places(opened: OpenPage, matches: Matches) -> list[pa.Table]:
        number = number_of[opened.page.step, opened.page.split]
        return [
            _places(opened.part(part, ["group", "member", by]), number, part, mask) for part, mask in matches
        ]

    tables = [_EMPTY.append_column(by, pa.array([], SCHEMA.field(by).type))]
    for found in rollouts.map_pages(blobs, pages, wanted, places):
        tables += found
    whole = pa.concat_tables(tables)
    return whole.append_column("is_missing", pc.is_null(whole[by]))


def _places(samples: pa.Table, page: int, part: int, mask: Any) -> pa.Table:
    """The samples that match, with their places."""
    place = [pa.repeat(pa.scalar(number, pa.int32()), samples.num_rows) for number in (page, part)]
    place.append(pa.array(range(samples.num_rows), pa.int32()))
    table = pa.table([*place, *samples.columns], [*StoredAt._fields, *samples.column_names])
    return table if mask is None else table.filter(mask)


def _row(matches: pa.Table, pages: Sequence[RolloutPage], after: SamplePosition) -> pa.Scalar:
    """The row of the cursor."""
    numbers = [n for n, page in enumerate(pages) if (page.step, page.split) == (after.step, after.split)]
    place = {"page": numbers[0] if numbers else -1, "group": after.group, "member": after.member}
    same = [pc.equal(matches[name], value) for name, value in place.items()]
    found = pc.index(pc.and_(pc.and_(same[0], same[1]), same[2]), True).as_py()
    if found < 0:
        raise KeyError(after.id)
    return pa.scalar(found, pa.uint64())


def _read(blobs: BlobStore, pages: Sequence[RolloutPage], places: Sequence[StoredAt]) -> dict[StoredAt, Row]:
    """The samples at these places; without those that retention has deleted since."""

    def read(number: int) -> list[tuple[StoredAt, Row]]:
        opened = rollouts.open_page(blobs, pages[number])
        found: list[tuple[StoredAt, Row]] = []
        try:
            for part in range(opened.parts):
                here = sorted(place for place in places if (place.page, place.part) == (number, part))
                if here and opened.part(part, ["group"]).num_rows:
                    table = opened.take(part, [place.row for place in here])
                    found += zip(here, rollouts.records(table), strict=True)
        finally:
            opened.close()
        return found

    numbers = sorted({place.page for place in places})
    return {place: row for rows in ahead(read, numbers, lambda rows: None) for place, row in rows}
