"""Folders and files that only the user of the service can read. The modes of existing ones are not changed."""

import os
from contextlib import suppress
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Create the folder with mode 0700 if missing; missing parents get the default mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_file(file: Path) -> None:
    """Create an empty file with mode 0600 if missing.

    Raises:
        OSError: the file cannot be created.
    """
    # O_EXCL also avoids opening an existing file: closing any descriptor of a database releases the locks on it.
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
