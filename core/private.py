"""Folders and files that only the user of the service may read. The modes of what exists already are not changed."""

import os
from contextlib import suppress
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make the folder with mode 0700 if it is not there; folders above it that are missing get the usual mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_file(file: Path) -> None:
    """Make an empty file with mode 0600 if it is not there.

    Raises:
        OSError: it is not there, and cannot be made.
    """
    # O_EXCL also keeps a file that exists closed: closing any descriptor of a database releases the locks on it.
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
