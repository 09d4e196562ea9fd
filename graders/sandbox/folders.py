"""Folders for temporary files, locked, so that the next process can remove those that a killed one has left."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from graders.sandbox import scratch

_PREFIX = "regraft-graders-"
_ATTEMPTS = 100  # to lock a new folder before another process does


@dataclass(frozen=True)
class Folder:
    """A folder whose lock this process holds until `remove` or its end."""

    path: str
    _lock: int

    @classmethod
    def claim(cls, parent: str | None = None, prefix: str = _PREFIX) -> Folder:
        """Create a locked folder, after removing those with this prefix that killed processes have left.

        Raises OSError: the file system has no locks, or its files do not belong to those who create them.
        """
        for left in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
            if (abandoned := _locked(str(left))) is not None:
                scratch.remove(str(left))
                os.close(abandoned)
        for _ in range(_ATTEMPTS):
            path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            if (lock := _locked(path)) is not None:  # None if another process considers it abandoned
                Path(path).chmod(0o711)  # a process with a separate user must reach its scratch folder
                return cls(path, lock)
            scratch.remove(path)
        raise OSError(f"folders in {parent or tempfile.gettempdir()} cannot be locked: set another TMPDIR")

    def remove(self) -> None:
        scratch.remove(self.path)
        os.close(self._lock)


@contextmanager
def private(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """A folder for this user alone during the context. If the process is killed, the next call removes it."""
    folder = Folder.claim(parent, prefix)
    try:
        yield Path(tempfile.mkdtemp(dir=folder.path))
    finally:
        folder.remove()


def _locked(folder: str) -> int | None:
    """Lock a folder and return its descriptor; None if another process holds the lock or another user owns it."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(opened).st_uid == os.geteuid() and os.path.samestat(os.fstat(opened), os.lstat(folder)):
            return opened
    except OSError:
        pass
    os.close(opened)
    return None


def make(parent: str | None = None) -> str:
    """Create a scratch folder and return its path."""
    return tempfile.mkdtemp(prefix="grader-", dir=parent)
