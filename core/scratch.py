"""Folders that are filled beside their final place and then renamed."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".part-"
# No download or conversion of a model takes as long.
ABANDONED_SECONDS = 24 * 3600.0


@contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """A new hidden folder in `root`, which is removed at the end unless it was renamed.

    Also removes those of processes that were killed.
    """
    root.mkdir(parents=True, exist_ok=True)
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another process was faster
            if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix=PREFIX))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
