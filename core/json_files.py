"""Small JSON files: what a worker or the doctor has learned, for later jobs and for the API."""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

T = TypeVar("T", bound=BaseModel)

log = logging.getLogger(__name__)


class JsonFiles(Generic[T]):
    """One file for each value, in a folder that need not exist.

    Processes of several users and versions share the folder, and its contents can be computed again. So no method
    raises an error of the disk, and a file that is damaged or of another version is logged and counts as missing.
    """

    def __init__(self, folder: Path, of: type[T]) -> None:
        self.folder = folder
        self._of = of

    def read(self, *key: str) -> T | None:
        return self._read(self._path(*key))

    def under(self, first: str) -> Iterator[T]:
        """The values of all keys that begin with this part and have another."""
        for path in self.folder.glob(f"{_short(first)}-*.json"):
            if (value := self._read(path)) is not None:
                yield value

    def write(self, value: T, *key: str) -> None:
        """Write the file, or replace it: it exists as a whole or not at all. Processes of other users can read it."""
        path = self._path(*key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, scratch = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(value.model_dump_json())
                Path(scratch).chmod(0o644)
                Path(scratch).replace(path)
            finally:
                Path(scratch).unlink(missing_ok=True)
        except OSError as cause:
            log.warning("%s is not stored: %s", path, cause)

    def delete(self, *key: str) -> None:
        with contextlib.suppress(OSError):
            self._path(*key).unlink()

    def _path(self, *key: str) -> Path:
        return self.folder / f"{'-'.join(map(_short, key))}.json"

    def _read(self, path: Path) -> T | None:
        try:
            return self._of.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as cause:
            _report_ignored(path, type(cause).__name__)
            return None


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _report_ignored(path: Path, cause: str) -> None:
    """Log it once in a process: the API reads the files for each request."""
    log.warning("%s is ignored (%s), and will be computed again", path, cause)
