"""Rows of tables in memory and of datasets on the Hugging Face hub, for `regraft.convert`.

pandas, datasets and pyarrow are optional, and are imported at their first use.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from regraft._rules.datasets import InvalidDataset, LineError

HUB = "hub:"  # begins the name of a dataset of the hub on the command line, as in hub:openai/gsm8k
BATCH_ROWS = 256  # as Python objects rows take far more memory than in a table
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
UNREADABLE = (ValueError, TypeError, KeyError, OverflowError)  # of values that Python has none for
_INDEX = "__index_level_"  # begins the names of the columns that pandas makes of an index without a name


class ArrowTable(Protocol):
    """A table that Arrow can read: pandas.DataFrame, polars.DataFrame, pyarrow.Table and others."""

    def __arrow_c_stream__(self, requested_schema: Any = None, /) -> Any: ...


class HubTable(Protocol):
    """datasets.Dataset and datasets.IterableDataset."""

    def with_format(self, type: str, /) -> Any: ...


Table = ArrowTable | HubTable | Sequence[Mapping[str, Any]]


def rereadable(table: Table) -> Table:
    """The table, or a pyarrow.Table of it: a stream such as pyarrow.RecordBatchReader can be read once only.

    Raises:
        InvalidDataset: Arrow cannot read it, or pyarrow is missing.
    """
    if not hasattr(table, "__arrow_c_stream__") or hasattr(table, "with_format"):
        return table
    with reading(type(table).__name__):
        import pyarrow

        found = pyarrow.table(table)
        arrow: ArrowTable = found.select([name for name in found.column_names if not name.startswith(_INDEX)])
    return arrow


def table_rows(table: Table) -> Iterator[tuple[int, dict[str, Any]] | LineError]:
    """Yield the rows of a table that `rereadable` has returned, numbered from 1.

    Raises:
        InvalidDataset: it is not a table, has no rows, or a package that reads it is missing.
    """
    has_rows = False
    for row in _rows(table):
        has_rows = True
        yield row
    if not has_rows:
        raise _refused("the table is empty")


def _rows(table: Table) -> Iterator[tuple[int, dict[str, Any]] | LineError]:
    if isinstance(table, Sequence) and not isinstance(table, str | bytes):
        for number, row in enumerate(table, 1):
            yield _listed(number, row)
    elif isinstance(table, Mapping):
        raise _refused(_of_mapping(table))
    elif hasattr(table, "with_format"):
        with reading(type(table).__name__):
            yield from arrow_rows(table.with_format("arrow").iter(batch_size=BATCH_ROWS))
    elif hasattr(table, "to_batches"):
        with reading("table"):
            yield from arrow_rows(table.to_batches())
    else:
        kinds = "pandas.DataFrame (pandas 2.2 or newer), datasets.Dataset, pyarrow.Table or a list of dicts"
        raise _refused(f"{type(table).__name__} is not a table: pass a path, {kinds}")


def _listed(number: int, row: Any) -> tuple[int, dict[str, Any]] | LineError:
    """A row of a list of dicts."""
    if not isinstance(row, Mapping):
        return LineError(number, "is no mapping")
    if (key := next((key for key in row if not isinstance(key, str)), "")) != "":
        return LineError(number, f"has the key {key!r}, which is not a text")
    return number, {name: python_scalar(value) for name, value in row.items()}


def python_scalar(value: Any) -> Any:
    """A number, a truth value or a text of numpy as that of Python; other values as they are."""
    return value.item() if hasattr(value, "dtype") and getattr(value, "shape", None) == () else value


def _of_mapping(table: Mapping[Any, Any]) -> str:
    kind = type(table).__name__
    if not any(hasattr(part, "with_format") for part in table.values()):
        return (
            f"a {kind} is not a table: pass pandas.DataFrame(data) for a dict of columns, or a list of dicts"
        )
    keys = ", ".join(map(repr, table))  # of a datasets.DatasetDict
    return f"a {kind} is not a table: choose one of {keys}, such as data[{next(iter(table))!r}]"


def arrow_rows(batches: Iterable[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of Arrow's record batches or tables, numbered from 1."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for row in batch.slice(start, BATCH_ROWS).to_pylist():
                number += 1
                yield number, row


@contextmanager
def reading(what: str, *, is_file: bool = False) -> Iterator[None]:
    """Name pyarrow where it is missing, damage of a file, and values that Arrow cannot read or Python has none for.

    Such as a column with numbers and texts, or a time in an unknown time zone.
    """
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise _refused(
            f"the {what} needs pyarrow: run `pip install pyarrow`, or save the data as JSONL or CSV"
        ) from None
    damage: tuple[type[Exception], ...] = (ArrowException, OSError) if is_file else ()
    try:
        yield
    except damage as error:
        raise _refused(f"the {what} is damaged: {error}") from None
    except (ArrowException, *UNREADABLE) as error:
        said = "; ".join(map(str, error.args))
        raise _refused(f"Arrow cannot read the {what}: {said}") from None


def from_hub(
    name: str, *, config: str | None = None, split: str = "train", revision: str | None = None
) -> HubTable:
    """Download a split of a dataset of the Hugging Face hub, with the package `datasets`.

    Args:
        name: such as "openai/gsm8k".
        config: a part of a dataset that has several, such as "main".

    Raises:
        InvalidDataset: the package is missing, the hub cannot be reached from this machine, or it has no such
            dataset, config or split; or there is a local file or folder of this name.
    """
    if _NAME.fullmatch(name) is None:
        raise _refused(f"{name!r} is no name of the hub's: write it as OWNER/NAME, such as openai/gsm8k")
    if Path(name).exists():
        raise _refused(
            f"{name} is also a local path, which the package datasets reads in place of the hub's: run the command in "
            "another folder, or convert the local files"
        )
    try:
        import datasets
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError
    except ImportError:
        raise _refused(f"{HUB}{name} needs the package datasets: run `pip install datasets`") from None
    try:
        table: HubTable = datasets.load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as cause:
        is_missing = isinstance(cause, RepositoryNotFoundError | EntryNotFoundError)
        if isinstance(cause, ConnectionError | HfHubHTTPError) and not is_missing:
            raise _refused(
                f"the Hugging Face hub cannot be reached for {name}: {_first_line(cause)}; download the dataset where "
                "it can be reached, and convert the file"
            ) from None
        raise _refused(f"{HUB}{name} cannot be loaded: {_first_line(cause)}") from None
    return table


def _first_line(cause: Exception) -> str:
    lines = str(cause).strip().splitlines()
    return " ".join(line.strip() for line in lines[:3]) or type(cause).__name__


def _refused(message: str) -> InvalidDataset:
    return InvalidDataset([LineError(0, message)])
