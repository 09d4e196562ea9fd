"""Backups: the database and then the blobs in a folder, and the restore into an empty service.

The blobs are copied after the database: a blob without a row is harmless, a row without its blob cannot be read.
"""

import json
import os
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import URL, Connection, inspect, make_url, text

from core import private
from core.database.engine import Database
from core.database.migrate import backend_of
from core.storage.store import BlobNotFound, BlobStore, FolderBlobs


class BackupFailed(Exception):
    """A backup or a restore cannot be done. The message has the remedy."""


@dataclass(frozen=True)
class BackupManifest:
    """The content of a backup in numbers, written when it is complete.

    Args:
        time: Unix time before the first read.
        backend: "postgresql" or "sqlite".
        rows: Number of rows of each table.
        size: Of all blobs, in bytes.
    """

    time: float
    backend: str
    rows: dict[str, int]
    blobs: int
    size: int

    @classmethod
    def load(cls, folder: Path) -> "BackupManifest":
        """Read that of a backup.

        Raises:
            BackupFailed: the folder has none.
        """
        try:
            return cls(**json.loads(_manifest(folder).read_text()))
        except (OSError, ValueError, TypeError) as cause:
            raise BackupFailed(f"{folder}: it has no complete backup ({cause})") from cause


def back_up(database_url: str, blobs: BlobStore, folder: Path, *, time: float) -> BackupManifest:
    """Copy the database and the blobs into an empty folder, while the service runs.

    Raises:
        BackupFailed: the folder is not empty, or the database cannot be copied.
    """
    private.make_folder(folder)
    if any(folder.iterdir()):
        raise BackupFailed(f"{folder}: it is not empty; name a new folder")
    backend = backend_of(database_url)
    private.make_file(_dump(folder))
    rows = (_copy_sqlite if backend == "sqlite" else _dump_postgres)(database_url, folder)
    number, size = _copy(blobs, FolderBlobs(folder / "blobs"))
    manifest = BackupManifest(time, backend, rows, number, size)
    _manifest(folder).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def restore(folder: Path, database_url: str, blobs: BlobStore) -> BackupManifest:
    """Copy a backup into an empty database and an empty store.

    Raises:
        BackupFailed: one of them is not empty, or is of another kind than the backup.
    """
    manifest = BackupManifest.load(folder)
    if backend_of(database_url) != manifest.backend:
        raise BackupFailed(f"REGRAFT_DATABASE_URL: the backup is of {manifest.backend}")
    if next(iter(blobs.list("")), None) is not None:
        raise BackupFailed(
            "REGRAFT_BLOB_URL: the store has blobs; name an empty folder, or an empty prefix of a bucket"
        )
    _check_empty(database_url)
    _copy(FolderBlobs(folder / "blobs"), blobs)
    if manifest.backend == "sqlite":
        target = _file_of(database_url)
        private.make_folder(target.parent)
        private.make_file(target)
        _copy_file(_dump(folder), target)
    else:
        url, variables = as_variables(database_url)
        _run(
            ["pg_restore", "--no-owner", "--exit-on-error", f"--dbname={url}", str(_dump(folder))], variables
        )
    return manifest


def differences(manifest: BackupManifest, database_url: str, blobs: BlobStore) -> list[str]:
    """Compare the numbers of a restored service with its backup. Returns a sentence for each difference."""
    database = Database(database_url)
    try:
        with database.read() as session:
            rows = _rows(session.connection())
    finally:
        database.close()
    entries = list(blobs.entries(""))
    expected = {f"rows of {table}": number for table, number in manifest.rows.items()}
    expected |= {"blobs": manifest.blobs, "bytes of blobs": manifest.size}
    found = {f"rows of {table}": number for table, number in rows.items()}
    found |= {"blobs": len(entries), "bytes of blobs": sum(entry.size for entry in entries)}
    return [
        f"{name}: {found.get(name, 0)}, and {number} in the backup"
        for name, number in expected.items()
        if found.get(name, 0) != number
    ]


def _dump(folder: Path) -> Path:
    return folder / "database"


def _manifest(folder: Path) -> Path:
    return folder / "manifest.json"


def _copy(source: BlobStore, target: BlobStore) -> tuple[int, int]:
    """Copy all blobs. Returns their number and bytes, without those that are deleted meanwhile."""
    number = size = 0
    for key in source.list(""):
        try:
            chunks = source.open(key)
        except BlobNotFound:
            continue
        size += target.put_stream(key, chunks).size
        number += 1
    return number, size


def _rows(connection: Connection) -> dict[str, int]:
    quote = connection.dialect.identifier_preparer.quote
    tables = sorted(inspect(connection).get_table_names())
    return {table: connection.scalar(text(f"select count(*) from {quote(table)}")) or 0 for table in tables}


def _check_empty(database_url: str) -> None:
    if backend_of(database_url) == "sqlite":
        if _file_of(database_url).exists():
            raise BackupFailed(f"{_file_of(database_url)}: it exists; name a new database, or delete it")
        return
    database = Database(database_url)
    try:
        with database.read() as session:
            if inspect(session.connection()).get_table_names():
                raise BackupFailed("REGRAFT_DATABASE_URL: the database has tables; name an empty one")
    finally:
        database.close()


def _file_of(database_url: str) -> Path:
    return Path(make_url(database_url).database or "")


def _copy_sqlite(database_url: str, folder: Path) -> dict[str, int]:
    source = _file_of(database_url)
    if not source.is_file():
        raise BackupFailed(f"There is no database at {source}.")
    _copy_file(source, _dump(folder))
    database = Database(f"sqlite:///{_dump(folder)}")
    try:
        with database.read() as session:
            return _rows(session.connection())
    finally:
        database.close()


def _copy_file(source: Path, target: Path) -> None:
    """Copy a database of SQLite, also while others write: a plain copy would miss its log."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def _dump_postgres(database_url: str, folder: Path) -> dict[str, int]:
    url, variables = as_variables(database_url)
    database = Database(database_url)
    try:
        with database.read() as session:
            snapshot = session.scalar(
                text("select pg_export_snapshot()")
            )  # the rows counted are those dumped
            options = ["--format=custom", f"--snapshot={snapshot}", f"--file={_dump(folder)}"]
            _run(["pg_dump", *options, f"--dbname={url}"], variables)
            return _rows(session.connection())
    finally:
        database.close()


def as_variables(database_url: str) -> tuple[str, dict[str, str]]:
    """Return the URL for PostgreSQL's own programs, and the variables with its password, which `ps` would show."""
    url = make_url(database_url)
    plain = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    variables = {} if url.password is None else {"PGPASSWORD": str(url.password)}
    return plain.render_as_string(), variables


def _run(command: Sequence[str], variables: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as cause:
        raise BackupFailed(
            f"{command[0]} is not installed; it is in the package postgresql-client, of the server's version or later"
        ) from cause
    if done.returncode:
        raise BackupFailed(f"{command[0]}: {done.stderr.strip()}")
