"""Delete files and folders that other processes may be reading: rename first, then remove."""

import shutil
import uuid
from contextlib import suppress
from pathlib import Path

PREFIX = ".gone-"


def set_aside(path: Path) -> None:
    """Rename it, so that no process reads a part of it while it is removed. Raises OSError other than its absence."""
    with suppress(FileNotFoundError):  # another process has removed it
        path.rename(path.parent / f"{PREFIX}{uuid.uuid4().hex}")


def remove_set_aside(folder: Path) -> None:
    """Remove what was set aside in this folder, also by processes that were killed meanwhile."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process has removed it, or owns it
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
