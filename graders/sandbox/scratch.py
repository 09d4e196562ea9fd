"""Measure and empty a grade's writable folder. Runs on both sides of the sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

MAX_ENTRIES = 1024


def is_over(folder: str, limit: int) -> bool:
    """Return whether a folder has more than `limit` bytes or MAX_ENTRIES entries, or cannot be fully listed."""
    pending, size, entries = [folder], 0, 0
    try:
        while pending:
            for entry in _listed(pending.pop()):
                entries += 1
                with suppress(FileNotFoundError):  # the grade is modifying the folder
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                if entries > MAX_ENTRIES or size > limit:
                    return True
    except OSError:
        return True
    return False


def _listed(folder: str) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


def empty(folder: str) -> None:
    """Delete the contents of a folder. Flattens the tree while deleting, so that it may be deeper than PATH_MAX.

    Raises:
        OSError: An entry could not be deleted.
    """
    moved = 0
    while below := _folders(folder):
        for path in below:
            for deeper in _folders(path):
                moved += 1
                deeper.chmod(0o700)  # renaming a folder requires write permission on it
                deeper.rename(_free_name(folder, moved))
            path.rmdir()


def remove(folder: str) -> None:
    """Delete a folder and its contents, except for entries that cannot be deleted."""
    with suppress(OSError):
        empty(folder)
        Path(folder).rmdir()


def _folders(folder: str | Path) -> list[Path]:
    """Delete everything but folders in a folder, and return those."""
    Path(folder).chmod(0o700)
    entries = list(os.scandir(folder))
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            Path(entry.path).unlink()
    return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _free_name(folder: str, number: int) -> Path:
    names = (Path(folder, f".moved-{number}-{attempt}") for attempt in count())
    return next(name for name in names if not os.path.lexists(name))
