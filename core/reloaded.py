"""A value that is read from files, and read again when one of them has changed: a ConfigMap is updated in place."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from core.outages import outage

T = TypeVar("T")

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0  # between two looks at the files


class Reloaded(Generic[T]):
    """Reads the value at once, and again after a change of the files. Files that became invalid change nothing.

    Args:
        load: reads the value. Its exceptions are those of the constructor; later ones are logged.
        files: those that it reads. None: a file that is not configured.
    """

    def __init__(
        self,
        load: Callable[[], T],
        files: Sequence[Path | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._files = [file for file in files if file is not None]
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._versions()
        self._looked_at = clock()
        self._value = load()

    def __call__(self) -> T:
        with self._lock:
            if self._clock() - self._looked_at >= EVERY_SECONDS:
                self._looked_at = self._clock()
                self._look()
            return self._value

    def _look(self) -> None:
        versions = self._versions()
        if versions == self._seen:
            return
        try:
            self._value = self._load()
        except Exception as cause:
            log.error("the earlier content of a changed file stays in force: %s", cause)
            if _passes(cause):
                return  # this version can be read later
            # An operator's mistake; the next version of the file is another chance.
        else:
            log.info("read anew: %s", ", ".join(map(str, self._files)))
        self._seen = versions

    def _versions(self) -> list[tuple[int, int, int] | None]:
        return [_version(file) for file in self._files]


def _passes(error: BaseException | None) -> bool:
    """Whether an outage is the cause, which the loader may have wrapped in an error about the file."""
    return error is not None and (outage(error) is not None or _passes(error.__cause__))


def _version(file: Path) -> tuple[int, int, int] | None:
    """None: the file is missing."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def current(value: T | Reloaded[T]) -> T:
    """The value of now."""
    return value() if isinstance(value, Reloaded) else value
