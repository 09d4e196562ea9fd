"""Every blob that a row refers to is read against what was stored; the rest is listed."""

import errno
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from core.database.engine import Database
from core.database.tables import Checkpoint, File
from core.storage import fsck
from core.storage.fsck import StorageProblem
from core.storage.store import FolderBlobs, StoreEmpty
from tests import factories

FUTURE = 4e9


@pytest.fixture
def store(database: Database, tmp_path: Path) -> FolderBlobs:
    blobs = FolderBlobs(tmp_path / "blobs")
    with database.write() as session:
        project = factories.project(session)
        for name in ("a", "b"):
            info = blobs.put_bytes(f"projects/p/files/{name}", name.encode() * 100)
            factories.file(session, project, id=name, blob_key=info.key, bytes=info.size, sha256=info.sha256)
    return blobs


def findings(database: Database, blobs: "FolderBlobs | DeletesOnRead | BadSector") -> list[Any]:
    return list(fsck.check(database, blobs, orphans_older_than=FUTURE))


def test_a_whole_store_has_no_findings(database: Database, store: FolderBlobs) -> None:
    assert findings(database, store) == []


@pytest.mark.both_databases
def test_each_problem_is_named_with_its_owner(database: Database, store: FolderBlobs) -> None:
    key = "projects/p/files/"
    store.put_bytes(key + "a", b"A" + b"a" * 99)
    store.delete(key + "b")
    store.put_bytes(key + "c", b"left over")

    assert findings(database, store) == [
        StorageProblem("damaged", "a", key + "a"),
        StorageProblem("missing", "b", key + "b"),
        StorageProblem("orphaned", "", key + "c"),
    ]


def test_every_file_of_a_checkpoint_is_read(database: Database, store: FolderBlobs) -> None:
    manifest = b'{"format": 1, "files": [{"name": "w", "bytes": 3, "sha256": "%s"}]}'
    with database.write() as session:
        job = factories.job(session, factories.project(session))
        session.add(Checkpoint(id="ftckpt_1", job_id=job.id, step=1, epoch=1, blob_prefix="projects/p/ck"))
    store.put_bytes("projects/p/ck/w", b"abc")
    store.put_bytes("projects/p/ck/manifest.json", manifest % hashlib.sha256(b"abc").hexdigest().encode())
    assert findings(database, store) == []

    store.put_bytes("projects/p/ck/w", b"abd")
    assert findings(database, store) == [StorageProblem("damaged", "ftckpt_1", "projects/p/ck/w")]

    store.put_bytes("projects/p/ck/manifest.json", b"{")
    assert findings(database, store) == [StorageProblem("damaged", "ftckpt_1", "projects/p/ck/manifest.json")]


class DeletesOnRead(FolderBlobs):
    """Another process deletes a file and a checkpoint, with their blobs, while the first blob is read."""

    def __init__(self, root: Path, delete_rows: Callable[..., None]) -> None:
        super().__init__(root)
        self.delete_rows = delete_rows

    def open(self, key: str, **options: int) -> Iterator[bytes]:
        self.delete_rows()
        return super().open(key, **options)


@pytest.mark.both_databases
def test_what_is_deleted_during_the_check_is_no_finding(
    database: Database, store: FolderBlobs, tmp_path: Path
) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session))
        session.add(Checkpoint(id="ftckpt_1", job_id=job.id, step=1, epoch=1, blob_prefix="projects/p/ck"))

    def delete_rows() -> None:
        with database.write() as session:
            session.query(Checkpoint).delete()
            session.query(File).filter(File.id == "b").delete()
        store.delete("projects/p/files/b")

    assert findings(database, DeletesOnRead(tmp_path / "blobs", delete_rows)) == []


@pytest.mark.both_databases
def test_the_rows_are_read_twice_however_many_findings_there_are(
    database: Database, store: FolderBlobs
) -> None:
    """Reading them for every finding would take hours where a whole store is missing."""
    for entry in list(store.list("")):
        store.delete(entry)
    store.put_bytes("projects/p/other", b"x")
    statements = []
    event.listen(database.engine, "before_cursor_execute", lambda *call: statements.append(call[2]))

    assert [finding.problem for finding in fsck.damaged(database, store)] == ["missing", "missing"]
    assert sum("FROM files" in statement for statement in statements) == 2


def test_an_empty_store_is_another_one_and_nothing_is_missing_from_it(
    database: Database, store: FolderBlobs, tmp_path: Path
) -> None:
    with pytest.raises(StoreEmpty):
        findings(database, FolderBlobs(tmp_path / "not mounted"))


class BadSector(FolderBlobs):
    """A disk that cannot read what lies under these names."""

    def read(self, key: str) -> bytes:
        if key.endswith("manifest.json"):
            raise OSError(errno.EIO, "Input/output error")
        return super().read(key)


def test_a_manifest_that_the_disk_cannot_read_is_damaged(
    database: Database, store: FolderBlobs, tmp_path: Path
) -> None:
    with database.write() as session:
        job = factories.job(session, factories.project(session))
        session.add(Checkpoint(id="ftckpt_1", job_id=job.id, step=1, epoch=1, blob_prefix="projects/p/ck"))

    assert findings(database, BadSector(tmp_path / "blobs")) == [
        StorageProblem("damaged", "ftckpt_1", "projects/p/ck/manifest.json")
    ]
