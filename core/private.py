"""Folders and files that only the user of the service can read. The modes of existing ones are not changed."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Create the folder with mode 0700 if missing; missing parents get the default mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_new_file(file: Path, text: str) -> None:
    """Create a file with mode 0600 and all of its content at once: a killed process leaves no part of it.

    Raises:
        FileExistsError: the file exists. It is not changed.
        OSError: the file cannot be created.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.link(temporary, file)  # which, unlike a rename, replaces nothing
    finally:
        temporary.unlink(missing_ok=True)


def make_file(file: Path) -> None:
    """Create an empty file with mode 0600 if missing.

    Raises:
        OSError: the file cannot be created.
    """
    # O_EXCL also avoids opening an existing file: closing any descriptor of a database releases the locks on it.
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
