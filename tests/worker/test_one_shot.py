"""The worker of a Kubernetes Job runs one job and exits with a status that says whether its outcome is recorded."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from core.database.engine import Database
from core.database.tables import Job
from core.settings import Settings
from core.storage.store import FolderBlobs
from tests import factories
from tests.servers import reserve_port
from worker import process
from worker.cli import service
from worker.supervisor.one_shot import NOT_RECORDED, RECORDED, OneShot, claimed_file

DRAINS = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({process.DRAINED}))
open(sys.argv[1], "w")
time.sleep(600)
"""


class Machine:
    """A worker with runs of the given source, which gets the path of a file of its own."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.mark = folder / "started"

    def one_shot(self, source: str = "import sys; sys.exit(75)", claim: str = "", **options: Any) -> OneShot:
        def command(progress: Path) -> Sequence[str]:
            return [sys.executable, "-c", source, str(self.mark)]

        settings = Settings(data_dir=self.folder, claim=claim, reconcile_seconds=0.05, lease_seconds=8.0)
        given: dict[str, Any] = {
            "database": self.database,
            "jobs": 1,
            "idle_seconds": 0.0,
            "command": command,
        }
        return OneShot(settings, blobs=FolderBlobs(self.folder / "blobs"), **given | options)

    def queue(self, jobs: int) -> None:
        with self.database.write() as session:
            project = factories.project(session)
            for _ in range(jobs):
                factories.job(session, project)

    def epochs(self) -> list[tuple[str, int]]:
        """The status of each job, and how often it was claimed."""
        with self.database.read() as session:
            return sorted((job.status, job.epoch) for job in session.query(Job))


@pytest.fixture
def machine(sqlite_database: Database, tmp_path: Path) -> Machine:
    return Machine(sqlite_database, tmp_path)


def test_it_runs_one_job_and_leaves_the_others_to_others(machine: Machine) -> None:
    machine.queue(3)

    assert machine.one_shot().run() == RECORDED
    assert machine.epochs() == [("queued", 0), ("queued", 0), ("queued", 1)]


def test_a_worker_that_was_started_for_one_job_claims_no_other(machine: Machine) -> None:
    machine.queue(3)
    with machine.database.read() as session:
        second = session.query(Job).order_by(Job.seq).all()[1].id

    assert machine.one_shot(claim=second, jobs=2).run() == RECORDED

    with machine.database.read() as session:
        assert [job.epoch for job in session.query(Job).order_by(Job.seq)] == [0, 2, 0]


def test_it_is_ready_once_it_has_claimed_a_job_and_before_that_runs(machine: Machine) -> None:
    machine.queue(1)
    ready = claimed_file(machine.folder)
    source = f"import os, sys; os.path.exists({str(ready)!r}) and open(sys.argv[1], 'w'); sys.exit(75)"

    machine.one_shot(source).run()

    assert machine.mark.exists()


def test_without_a_job_it_is_never_ready_and_exits_with_0(machine: Machine) -> None:
    claimed_file(machine.folder).touch()  # of an earlier process in the same folder

    assert machine.one_shot().run() == RECORDED
    assert not claimed_file(machine.folder).exists()


def test_it_claims_no_job_before_the_group_is_complete(machine: Machine) -> None:
    machine.queue(1)
    seen: list[list[tuple[str, int]]] = []

    def has_members() -> bool:
        seen.append(machine.epochs())
        return len(seen) > 3

    assert machine.one_shot(has_members=has_members).run() == RECORDED
    assert seen[:4] == [[("queued", 0)]] * 4
    assert machine.epochs() == [("queued", 1)]


def test_a_group_that_stays_incomplete_leaves_the_queue_to_others(machine: Machine) -> None:
    machine.queue(1)
    clock = count(0, 400).__next__  # a look every 400 s

    assert machine.one_shot(has_members=lambda: False, clock=clock).run() == NOT_RECORDED
    assert machine.epochs() == [("queued", 0)]


def test_a_crash_is_recorded_too(machine: Machine) -> None:
    machine.queue(1)

    assert machine.one_shot("import sys; sys.exit(3)").run() == RECORDED
    [(status, epoch)] = machine.epochs()
    assert (status, epoch) == ("queued", 1)


def test_a_stop_drains_the_run(machine: Machine) -> None:
    machine.queue(1)
    one_shot = machine.one_shot(DRAINS)
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(one_shot.run()))
    thread.start()
    wait_until(machine.mark.exists)

    one_shot.stop()
    thread.join(60)

    assert ended == [RECORDED]
    assert machine.epochs() == [("queued", 1)]


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_without_a_database_no_job_can_be_claimed(machine: Machine) -> None:
    nowhere = Database("postgresql+psycopg://regraft@127.0.0.1:9/regraft")

    assert machine.one_shot(database=nowhere).run() == NOT_RECORDED


class Leaves(Database):
    """Refuses connections once it has an outcome of this worker."""

    worker: OneShot | None = None

    def write(self) -> AbstractContextManager[Session]:
        if self.worker is not None and self.worker.supervisor.recorded:
            raise OperationalError("SELECT 1", {}, ConnectionRefusedError("connection refused"))
        return super().write()


def test_a_database_that_leaves_before_the_next_claim_has_the_outcome_of_the_job_before(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.queue(2)
    database = Leaves(str(machine.database.engine.url))
    database.worker = machine.one_shot(database=database, jobs=2)

    assert database.worker.run() == RECORDED
    assert machine.epochs() == [("queued", 0), ("queued", 1)]
    assert "was not recorded" not in caplog.text


def test_a_disk_that_takes_no_mark_of_the_claim_loses_no_job(machine: Machine) -> None:
    machine.queue(1)
    machine.folder = machine.folder / "absent"

    assert machine.one_shot().run() == RECORDED
    assert machine.epochs() == [("queued", 1)]


def test_without_a_store_no_job_is_claimed(machine: Machine) -> None:
    machine.queue(1)

    assert machine.one_shot(store_problem=lambda: OSError("refused")).run() == NOT_RECORDED
    assert machine.epochs() == [("queued", 0)]


@pytest.mark.slow
def test_sigterm_during_the_start_claims_no_job(tmp_path: Path) -> None:
    """The blob store of this test answers the process only after the signal was sent."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        environment = os.environ | {
            "REGRAFT_DATA_DIR": str(tmp_path / "data"),
            "REGRAFT_DEVICE": "cpu",
            "REGRAFT_BLOB_URL": "s3://bucket",
            "REGRAFT_S3_ENDPOINT_URL": f"http://127.0.0.1:{store.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        command = ["-c", "from regraft_server import main; raise SystemExit(main())", "worker", "--jobs", "1"]
        started = subprocess.Popen(
            [sys.executable, *command, "--exit-when-idle", "3600"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            connection, _ = store.accept()
            started.send_signal(signal.SIGTERM)
            connection.close()
            store.close()
            _, log = started.communicate(timeout=120)
        finally:
            started.kill()

    assert started.returncode == 0, log
    assert "ran 0 jobs" in log


def test_the_pod_of_a_member_has_metrics_as_all_pods_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    port = reserve_port()
    settings = Settings(nodes=2, node_rank=1, rendezvous="first:29400", host="127.0.0.1", metrics_port=port)
    scraped = []

    def serve_group(settings: Settings) -> int:
        scraped.append(httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text)
        return 0

    monkeypatch.setattr(service, "serve_group", serve_group)

    assert service.run_jobs(settings, jobs=1, idle_seconds=60.0) == 0
    assert "process_resident_memory_bytes" in scraped[0]
