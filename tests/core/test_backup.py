"""Backups of SQLite and the addresses of PostgreSQL; tests/e2e/test_restore.py is the drill with all servers."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from core.storage import backup
from core.storage.backup import BackupFailed, BackupManifest, as_variables
from core.storage.store import BlobWriter, FolderBlobs


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """A database in WAL mode, with a table of one row."""
    with closing(sqlite3.connect(tmp_path / "regraft.db")) as connection:
        connection.execute("pragma journal_mode=wal")
        connection.execute("create table files (id text)")
        connection.execute("insert into files values ('file-1')")
        connection.commit()
    return f"sqlite:///{tmp_path / 'regraft.db'}"


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobs:
    store = FolderBlobs(tmp_path / "store")
    store.put_bytes("files/file-1", b"abc")
    return store


class ChangedDuringTheDump(FolderBlobs):
    """A store where one blob is deleted, one grows and one is new once the database is dumped."""

    def __init__(self, root: Path, dump: Path) -> None:
        super().__init__(root)
        self.dump = dump

    def list(self, prefix: str) -> Iterator[str]:
        if self.dump.exists():
            self.delete("files/file-1")
            self.put_bytes("log.txt", b"two lines")
            self.put_bytes("files/file-2", b"def")
        return super().list(prefix)


def test_a_backup_has_the_blobs_that_are_deleted_or_written_while_the_database_is_dumped(
    database_url: str, blobs: FolderBlobs, tmp_path: Path
) -> None:
    """The row of a deleted file is in the dump if it was deleted after that."""
    blobs.put_bytes("log.txt", b"a line")
    folder = tmp_path / "backup"
    changed = ChangedDuringTheDump(tmp_path / "store", folder / "database")

    manifest = backup.back_up(database_url, changed, folder, time=1.0)

    copies = FolderBlobs(folder / "blobs")
    assert {key: copies.read(key) for key in copies.list("")} == {
        "files/file-1": b"abc",
        "files/file-2": b"def",
        "log.txt": b"two lines",
    }
    assert (manifest.blobs, manifest.size) == (3, 15)


@pytest.mark.parametrize("place", ["store", "store/backups/today", "link/today", "other/../store/today"])
def test_a_folder_inside_of_the_store_is_refused_because_it_would_be_copied_into_itself(
    database_url: str, blobs: FolderBlobs, tmp_path: Path, place: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    before = sorted((tmp_path / "store").rglob("*"))

    with pytest.raises(
        BackupFailed, match=r"it is inside of the store .*store, .*name a folder outside of it"
    ):
        backup.back_up(database_url, blobs, tmp_path / place, time=1.0)
    assert sorted((tmp_path / "store").rglob("*")) == before


def test_a_folder_without_a_backup_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(
        BackupFailed, match=r"none: it has no complete backup, because its manifest\.json is missing"
    ):
        BackupManifest.load(tmp_path / "none")


@pytest.mark.parametrize("name", ["a ? in it", "50%20", "a#b"])
def test_a_folder_may_have_characters_that_urls_escape(
    database_url: str, blobs: FolderBlobs, tmp_path: Path, name: str
) -> None:
    manifest = backup.back_up(database_url, blobs, tmp_path / name, time=1.0)
    assert manifest.rows == {"files": 1}

    restored = backup.restore(
        tmp_path / name, f"sqlite:///{tmp_path / 'new.db'}", FolderBlobs(tmp_path / "new")
    )
    assert restored == manifest


def test_a_copy_of_sqlite_needs_no_file_beside_it(
    database_url: str, blobs: FolderBlobs, tmp_path: Path
) -> None:
    """SQLite would write a log and its index next to a database in WAL mode, which a read-only folder refuses."""
    folder = tmp_path / "backup"
    backup.back_up(database_url, blobs, folder, time=1.0)
    backup.restore(folder, f"sqlite:///{tmp_path / 'new.db'}", FolderBlobs(tmp_path / "new"))

    assert sorted(path.name for path in folder.iterdir()) == ["blobs", "database", "manifest.json"]
    with closing(sqlite3.connect(folder / "database")) as copy:
        assert copy.execute("pragma journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize(
    "damage", [{"rows": "many"}, {"rows": {"files": "many"}}, {"blobs": None}, {"time": "yesterday"}]
)
def test_a_manifest_of_wrong_types_is_refused(
    database_url: str, blobs: FolderBlobs, tmp_path: Path, damage: dict[str, object]
) -> None:
    backup.back_up(database_url, blobs, tmp_path / "backup", time=1.0)
    file = tmp_path / "backup/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))

    with pytest.raises(BackupFailed, match="it has no complete backup"):
        BackupManifest.load(tmp_path / "backup")


def test_a_backup_without_its_database_restores_nothing(
    database_url: str, blobs: FolderBlobs, tmp_path: Path
) -> None:
    backup.back_up(database_url, blobs, tmp_path / "backup", time=1.0)
    (tmp_path / "backup/database").unlink()

    with pytest.raises(BackupFailed, match="the backup has lost its database"):
        backup.restore(tmp_path / "backup", f"sqlite:///{tmp_path / 'new.db'}", FolderBlobs(tmp_path / "new"))
    assert not (tmp_path / "new.db").exists()


def test_a_restore_that_failed_can_be_repeated(database_url: str, blobs: FolderBlobs, tmp_path: Path) -> None:
    folder, new = tmp_path / "backup", FolderBlobs(tmp_path / "new")
    backup.back_up(database_url, blobs, folder, time=1.0)
    whole = (folder / "database").read_bytes()
    (folder / "database").write_bytes(b"no database" * 1000)

    with pytest.raises(BackupFailed, match="file is not a database"):
        backup.restore(folder, f"sqlite:///{tmp_path / 'new.db'}", new)
    (folder / "database").write_bytes(whole)

    backup.restore(folder, f"sqlite:///{tmp_path / 'new.db'}", new)
    assert new.read("files/file-1") == b"abc"


class FullStore(FolderBlobs):
    def writer(self, key: str, *, if_absent: bool = False) -> BlobWriter:
        raise OSError("the disk is full")


def test_a_store_that_takes_no_blobs_is_told_with_what_was_restored(
    database_url: str, blobs: FolderBlobs, tmp_path: Path
) -> None:
    backup.back_up(database_url, blobs, tmp_path / "backup", time=1.0)

    with pytest.raises(BackupFailed, match=r"the disk is full\. Empty both before you restore again"):
        backup.restore(tmp_path / "backup", f"sqlite:///{tmp_path / 'new.db'}", FullStore(tmp_path / "new"))


def test_a_row_or_a_table_that_the_backup_does_not_have_is_a_difference(
    database_url: str, blobs: FolderBlobs
) -> None:
    manifest = BackupManifest(1.0, "sqlite", {"jobs": 0}, 1, 3)

    assert backup.differences(manifest, database_url, blobs) == ["rows of files: 1, and 0 in the backup"]


def test_a_password_is_in_no_list_of_processes() -> None:
    """`ps` shows the arguments of all users' programs."""
    for url in (
        "postgresql+psycopg://u:se%40cret@db.example.com:5433/name?sslmode=require",
        "postgresql+psycopg://u@db.example.com:5433/name?sslmode=require&password=se%40cret",
    ):
        connection, variables = as_variables(url)
        assert sorted(connection.split()) == [
            "dbname=name",
            "host=db.example.com",
            "port=5433",
            "sslmode=require",
            "user=u",
        ]
        assert variables == {"PGPASSWORD": "se@cret"}

    with pytest.raises(BackupFailed, match="sslpassword"):
        as_variables("postgresql+psycopg://u@db.example.com/name?sslpassword=secret")


def test_several_hosts_are_written_as_libpq_reads_them() -> None:
    connection, _ = as_variables("postgresql+psycopg://u@/name?host=a:5432&host=b:5433")

    assert sorted(connection.split()) == ["dbname=name", "host=a,b", "port=5432,5433", "user=u"]


def test_an_option_that_libpq_does_not_know_is_refused() -> None:
    with pytest.raises(BackupFailed, match="pool_size"):
        as_variables("postgresql+psycopg://u@db.example.com/name?pool_size=3")
