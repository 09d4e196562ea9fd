"""Hardware files of tests."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.hardware import GpuClass

_numbers = itertools.count()


def hardware_file(folder: Path, classes: dict[str, GpuClass] | None = None, **price: Any) -> Path:
    """Write a file with these classes, and with `price_per_gpu_second` and `currency`."""
    tables = {name: known.model_dump(exclude_unset=True) for name, known in (classes or {}).items()}
    return written(folder, "\n".join([*_values(price), *_tables("gpu_classes", tables)]) + "\n")


def written(folder: Path, text: str) -> Path:
    """A file of its own, because one that changes is read again only after a second."""
    file = folder / f"hardware-{next(_numbers)}.toml"
    file.write_text(text)
    return file


def _values(table: dict[str, Any]) -> Iterator[str]:
    """JSON writes strings, numbers and booleans as TOML does."""
    return (f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict))


def _tables(path: str, tables: dict[str, Any]) -> Iterator[str]:
    for name, table in tables.items():
        if isinstance(table, dict):
            yield f"[{path}.{json.dumps(name)}]"
            yield from _values(table)
            yield from _tables(f"{path}.{json.dumps(name)}", table)
