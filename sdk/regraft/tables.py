"""Rows of tables in memory and of datasets on the Hugging Face hub, for `regraft.convert`.

pandas, datasets and pyarrow are optional, and are imported at their first use.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from regraft._rules.datasets import InvalidDataset, LineError

HUB = "hub:"  # begins the name of a dataset of the hub on the command line, as in hub:openai/gsm8k
BATCH_ROWS = 256  # as Python objects rows take far more memory than in a table
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_INDEX = "__index_level_"  # begins the names of the columns that pandas makes of an index without a name


class ArrowTable(Protocol):
    """A table that Arrow can read: pandas.DataFrame, polars.DataFrame, pyarrow.Table and others."""

    def __arrow_c_stream__(self, requested_schema: Any = None, /) -> Any: ...


class HubTable(Protocol):
    """datasets.Dataset and datasets.IterableDataset."""

    def with_format(self, type: str, /) -> Any: ...


Table = ArrowTable | HubTable | Sequence[Mapping[str, Any]]


def table_rows(table: Table) -> Iterator[tuple[int, dict[str, Any]] | LineError]:
    """Yield the rows of a table, numbered from 1.

    Raises:
        InvalidDataset: it is not a table, or a package that reads it is missing.
    """
    if isinstance(table, Sequence) and not isinstance(table, str | bytes):
        for number, row in enumerate(table, 1):
            yield (number, dict(row)) if isinstance(row, Mapping) else LineError(number, "is no mapping")
    elif isinstance(table, Mapping):  # datasets.DatasetDict is one
        keys = ", ".join(map(repr, table))
        raise _refused(
            f"a {type(table).__name__} is not a table: choose one of {keys}, such as data['train']"
        )
    elif hasattr(table, "with_format"):
        yield from arrow_rows(table.with_format("arrow").iter(batch_size=BATCH_ROWS))
    elif hasattr(table, "__arrow_c_stream__"):
        yield from arrow_rows(_batches(table))
    else:
        kinds = "pandas.DataFrame (pandas 2.2 or newer), datasets.Dataset, pyarrow.Table or a list of dicts"
        raise _refused(f"{type(table).__name__} is not a table: pass a path, {kinds}")


def arrow_rows(batches: Iterable[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of Arrow's record batches or tables, numbered from 1."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for row in batch.slice(start, BATCH_ROWS).to_pylist():
                number += 1
                yield number, row


def _batches(table: ArrowTable) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, RecordBatchReader
    except ImportError:
        raise _refused(f"a {type(table).__name__} needs pyarrow: run `pip install pyarrow`") from None
    try:
        for batch in RecordBatchReader.from_stream(table):
            yield batch.select([name for name in batch.schema.names if not name.startswith(_INDEX)])
    except ArrowException as error:  # such as a column with numbers and texts
        said = "; ".join(map(str, error.args))
        raise _refused(f"Arrow cannot read the {type(table).__name__}: {said}") from None


def from_hub(
    name: str, *, config: str | None = None, split: str = "train", revision: str | None = None
) -> HubTable:
    """Download a split of a dataset of the Hugging Face hub, with the package `datasets`.

    Args:
        name: such as "openai/gsm8k".
        config: a part of a dataset that has several, such as "main".

    Raises:
        InvalidDataset: the package is missing, the hub cannot be reached from this machine, or it has no such
            dataset, config or split.
    """
    if _NAME.fullmatch(name) is None:
        raise _refused(f"{name!r} is no name of the hub's: write it as OWNER/NAME, such as openai/gsm8k")
    try:
        import datasets
    except ImportError:
        raise _refused(f"{HUB}{name} needs the package datasets: run `pip install datasets`") from None
    try:
        table: HubTable = datasets.load_dataset(name, config, split=split, revision=revision)
    except ConnectionError as cause:
        raise _refused(
            f"the Hugging Face hub cannot be reached for {name}: {_first_line(cause)}; download the dataset where "
            "it can be reached, and convert the file"
        ) from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as cause:
        raise _refused(f"{HUB}{name} cannot be loaded: {_first_line(cause)}") from None
    return table


def _first_line(cause: Exception) -> str:
    lines = str(cause).strip().splitlines()
    return " ".join(line.strip() for line in lines[:3]) or type(cause).__name__


def _refused(message: str) -> InvalidDataset:
    return InvalidDataset([LineError(0, message)])
