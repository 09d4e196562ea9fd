"""Backups: the database and the blobs in a folder, and the restore into an empty service.

The blobs are copied before the database, which keeps those that are deleted meanwhile, and the new ones after it: a
blob without a row is harmless, a row without its blob cannot be read.
"""

import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo
from pydantic import TypeAdapter
from sqlalchemy import Connection, create_engine, inspect, make_url, text

from core import private
from core.database.engine import Database
from core.database.migrate import backend_of
from core.storage.store import BlobNotFound, BlobStore, FolderBlobs
from core.system_errors import file_problem


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
            return TypeAdapter(cls).validate_json(_manifest(folder).read_bytes())
        except FileNotFoundError as cause:
            raise BackupFailed(
                f"{folder}: it has no complete backup, because its {_manifest(folder).name} is missing; name "
                "another folder"
            ) from cause
        except OSError as cause:
            raise BackupFailed(file_problem(cause)) from cause
        except ValueError as cause:
            raise BackupFailed(f"{_manifest(folder)}: it has no complete backup ({cause})") from cause


def back_up(database_url: str, blobs: BlobStore, folder: Path, *, time: float) -> BackupManifest:
    """Copy the database and the blobs into an empty folder, while the service runs.

    Raises:
        BackupFailed: the folder is not empty or is inside of the store, or the database cannot be copied.
    """
    if isinstance(blobs, FolderBlobs) and folder.resolve().is_relative_to(blobs.root.resolve()):
        raise BackupFailed(
            f"{folder}: it is inside of the store {blobs.root}, which would be copied into itself; name a folder "
            "outside of it, on another disk"
        )
    private.make_folder(folder)
    if any(folder.iterdir()):
        raise BackupFailed(f"{folder}: it is not empty; name a new folder")
    backend = backend_of(database_url)
    _check_can_dump(database_url)
    copies = FolderBlobs(folder / "blobs")
    _copy_new(blobs, copies)
    private.make_file(_dump(folder))
    rows = (_copy_sqlite if backend == "sqlite" else _dump_postgres)(database_url, folder)
    _copy_new(blobs, copies)
    number, size = _count(copies)
    manifest = BackupManifest(time, backend, rows, number, size)
    _manifest(folder).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def restore(folder: Path, database_url: str, blobs: BlobStore) -> BackupManifest:
    """Copy a backup into an empty database and an empty store.

    A database that cannot be restored stays empty, and no blob is copied.

    Raises:
        BackupFailed: one of them is not empty, or is of another kind than the backup, or cannot be written.
    """
    manifest = BackupManifest.load(folder)
    if not _dump(folder).is_file():
        raise BackupFailed(f"{_dump(folder)}: the backup has lost its database")
    if backend_of(database_url) != manifest.backend:
        raise BackupFailed(f"REGRAFT_DATABASE_URL: the backup is of {manifest.backend}")
    if next(iter(blobs.list("")), None) is not None:
        raise BackupFailed(
            "REGRAFT_BLOB_URL: the store has blobs; name an empty folder, or an empty prefix of a bucket"
        )
    _check_empty(database_url)
    (_restore_sqlite if manifest.backend == "sqlite" else _restore_postgres)(folder, database_url)
    try:
        _copy_new(FolderBlobs(folder / "blobs"), blobs)
    except Exception as cause:  # of any store's library
        raise BackupFailed(
            f"The database is restored and its blobs are not: {file_problem(cause)}. Empty both before you restore "
            "again"
        ) from cause
    return manifest


def differences(manifest: BackupManifest, database_url: str, blobs: BlobStore) -> list[str]:
    """Compare the numbers of a restored service with its backup. Returns a sentence for each difference."""
    database = Database(database_url)
    try:
        with database.read() as session:
            rows = _rows(session.connection())
    finally:
        database.close()
    number, size = _count(blobs)
    expected = {f"rows of {table}": number for table, number in manifest.rows.items()}
    expected |= {"blobs": manifest.blobs, "bytes of blobs": manifest.size}
    found = {f"rows of {table}": number for table, number in rows.items()}
    found |= {"blobs": number, "bytes of blobs": size}
    return [
        f"{name}: {found.get(name, 0)}, and {expected.get(name, 0)} in the backup"
        for name in sorted(expected.keys() | found.keys())
        if found.get(name, 0) != expected.get(name, 0)
    ]


def _dump(folder: Path) -> Path:
    return folder / "database"


def _manifest(folder: Path) -> Path:
    return folder / "manifest.json"


def _copy_new(source: BlobStore, target: BlobStore) -> None:
    """Copy the blobs that the target does not have, or has with another size, such as logs that grow."""
    known = {entry.key: entry.size for entry in target.entries("")}
    for entry in source.entries(""):
        if known.get(entry.key) == entry.size:
            continue
        with suppress(BlobNotFound):  # deleted meanwhile
            target.put_stream(entry.key, source.open(entry.key))


def _count(blobs: BlobStore) -> tuple[int, int]:
    """The number of blobs, and their bytes."""
    number = size = 0
    for entry in blobs.entries(""):
        number += 1
        size += entry.size
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


def _check_can_dump(database_url: str) -> None:
    """Find what would fail after the long copy of the blobs: a missing or older program, an address, missing rights."""
    if backend_of(database_url) == "sqlite":
        if not _file_of(database_url).is_file():
            raise BackupFailed(f"There is no database at {_file_of(database_url)}.")
        return
    connection, variables = as_variables(database_url)
    _run(["pg_dump", "--schema-only", f"--file={os.devnull}", f"--dbname={connection}"], variables)


def _copy_sqlite(database_url: str, folder: Path) -> dict[str, int]:
    """Copy the database while others write to it: a plain copy would miss its log."""
    source, target = _file_of(database_url), _dump(folder)
    with (
        _named(source, target),
        closing(sqlite3.connect(source)) as database,
        closing(sqlite3.connect(target)) as copy,
    ):
        database.backup(copy)
        copy.execute(
            "pragma journal_mode=delete"
        )  # a copy without a log can be read where nothing can be written
    engine = create_engine("sqlite://", creator=lambda: _opened(target))
    try:
        with engine.connect() as connection:
            return _rows(connection)
    finally:
        engine.dispose()


def _restore_sqlite(folder: Path, database_url: str) -> None:
    source, target = _dump(folder), _file_of(database_url)
    private.make_folder(target.parent)
    private.make_file(target)
    try:
        with (
            _named(source, target),
            closing(_opened(source)) as dump,
            closing(sqlite3.connect(target)) as copy,
        ):
            dump.backup(copy)
    except Exception:
        target.unlink()
        raise


@contextmanager
def _named(source: Path, target: Path) -> Iterator[None]:
    """Name the files in an error of SQLite, which has neither."""
    try:
        yield
    except sqlite3.Error as cause:
        raise BackupFailed(f"{source} cannot be copied to {target}: {cause}") from cause


def _opened(dump: Path) -> sqlite3.Connection:
    """Open a complete copy, also in a read-only folder."""
    return sqlite3.connect(f"{dump.absolute().as_uri()}?immutable=1", uri=True)


# Of a server or a role, any of them would end the snapshot during a long dump.
_NO_TIMEOUTS = text(
    "select set_config(name, '0', true) from pg_settings where name in "
    "('idle_in_transaction_session_timeout', 'transaction_timeout')"
)


def _dump_postgres(database_url: str, folder: Path) -> dict[str, int]:
    target, variables = as_variables(database_url)
    database = Database(database_url)
    try:
        with database.read() as session:
            session.execute(_NO_TIMEOUTS)
            snapshot = session.scalar(
                text("select pg_export_snapshot()")
            )  # the rows counted are those dumped
            options = ["--format=custom", f"--snapshot={snapshot}", f"--file={_dump(folder)}"]
            _run(["pg_dump", *options, f"--dbname={target}"], variables)
            return _rows(session.connection())
    finally:
        database.close()


def _restore_postgres(folder: Path, database_url: str) -> None:
    """Restore in one transaction. The owner and the privileges are those of the new database."""
    target, variables = as_variables(database_url)
    _run(["pg_restore", "--list", str(_dump(folder))], {})  # whether this version can read the dump
    options = ["--no-owner", "--no-privileges", "--exit-on-error", "--single-transaction"]
    _run(["pg_restore", *options, f"--dbname={target}", str(_dump(folder))], variables)


def as_variables(database_url: str) -> tuple[str, dict[str, str]]:
    """Return libpq's connection string, for PostgreSQL's own programs, and the variables with the password.

    `ps` would show a password among the arguments.

    Raises:
        BackupFailed: an option is unknown to libpq, or is a secret that it reads from no variable.
    """
    # SQLAlchemy's own conversion: it takes several hosts as `host=a:1&host=b:2`, and libpq as `host=a,b port=1,2`.
    url = make_url(database_url)
    _, given = url.get_dialect()().create_connect_args(url)
    options = dict(given)
    if "sslpassword" in options:
        raise BackupFailed(
            "REGRAFT_DATABASE_URL: every user could read the sslpassword among the arguments of pg_dump; "
            "use a key without one in a file that only this user can read"
        )
    password = options.pop("password", None)
    try:
        return make_conninfo(**options), {} if password is None else {"PGPASSWORD": str(password)}
    except psycopg.ProgrammingError as cause:
        raise BackupFailed(f"REGRAFT_DATABASE_URL: {cause}") from cause


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
