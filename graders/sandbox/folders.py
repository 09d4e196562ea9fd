"""The parent folder of a service's scratch folders, locked, so that the next service can remove abandoned ones."""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from graders.sandbox import scratch

_PREFIX = "regraft-graders-"


@dataclass(frozen=True)
class Folder:
    """The parent of a pool's scratch folders. The service holds its lock until it exits."""

    path: str
    _lock: int

    @classmethod
    def claim(cls, parent: str | None = None, prefix: str = _PREFIX) -> Folder:
        """Create a locked folder, after removing those with this prefix that killed processes have left."""
        for left in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
            if (abandoned := _locked(str(left))) is not None:
                scratch.remove(str(left))
                os.close(abandoned)
        while True:
            path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            if (lock := _locked(path)) is not None:  # None if another service considers it abandoned
                Path(path).chmod(0o711)  # a process with a separate user must reach its scratch folder
                return cls(path, lock)

    def remove(self) -> None:
        scratch.remove(self.path)
        os.close(self._lock)


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
