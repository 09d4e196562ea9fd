"""What a worker reports of itself."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from core.database.engine import Database
from core.service import workers
from core.service.workers import Seen
from core.settings import Settings
from core.telemetry import checkup
from core.telemetry.checkup import DoctorResult
from tests.worker.kernel import GIB, FakeKernel
from worker.supervisor.reporter import Reporter
from worker.telemetry import Gpus


class TwoGpus(Gpus):
    """Stands in for nvidia-smi."""

    def _ask(self) -> str:
        return "0, 1024, 143771, 50, NVIDIA H200\n1, [N/A], [N/A], [N/A], NVIDIA H200 MIG 1g.18gb"


class Told(Reporter):
    """Says when it has reported."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.reports: list[bool] = []
        self.reported = {draining: threading.Event() for draining in (False, True)}

    def report(self, *, draining: bool = False) -> None:
        super().report(draining=draining)
        self.reports.append(draining)
        self.reported[draining].set()


def reporter(database: Database, tmp_path: Path) -> Told:
    settings = Settings(data_dir=tmp_path, gpu_class="h200", ranks=2)
    memory = FakeKernel(tmp_path).memory()
    return Told(settings, database, "a/1", TwoGpus(), memory, 3600.0)


def seen(database: Database) -> list[Seen]:
    with database.read() as session:
        return workers.listed(session)


def test_a_worker_reports_its_machine(sqlite_database: Database, tmp_path: Path) -> None:
    reporter(sqlite_database, tmp_path).report()

    [found] = seen(sqlite_database)
    assert (found.worker.gpu_class, found.worker.ranks, found.worker.machines) == ("h200", 2, 1)
    assert found.worker.memory_total_bytes == 10 * GIB
    assert [gpu["memory_used_bytes"] for gpu in found.worker.gpus] == [1 << 30, None]
    assert [gpu["utilization"] for gpu in found.worker.gpus] == [0.5, None]
    assert found.worker.gpus[1]["name"] == "NVIDIA H200 MIG 1g.18gb"


def test_a_worker_reports_what_the_doctor_has_found_on_its_machine(
    sqlite_database: Database, tmp_path: Path
) -> None:
    reporting = reporter(sqlite_database, tmp_path)
    disk = DoctorResult(check="disk", state="ok", text="", remedy="", checked_at=1.0)
    driver = DoctorResult(check="driver", state="failed", text="570.10", remedy="Update it.", checked_at=1.0)
    checkup.keep(tmp_path, socket.gethostname(), [driver, disk])
    checkup.keep(tmp_path, "another", [disk])
    reporting.report()
    mended = disk.model_copy(update={"check": "driver", "checked_at": 2.0})
    checkup.keep(tmp_path, socket.gethostname(), [mended])

    [before] = seen(sqlite_database)
    assert before.worker.findings == [driver.model_dump(), disk.model_dump()]
    reporting.report()
    [after] = seen(sqlite_database)
    assert after.worker.findings == [mended.model_dump(), disk.model_dump()], (
        "checks that did not run again stay"
    )


def test_a_worker_that_is_told_to_stop_drains_until_its_work_has_ended(
    sqlite_database: Database, tmp_path: Path
) -> None:
    stop, ended = threading.Event(), threading.Event()
    reporting = reporter(sqlite_database, tmp_path)
    thread = threading.Thread(target=reporting.run_until, args=(stop, ended))
    thread.start()
    assert reporting.reported[False].wait(30)
    assert [one.status for one in seen(sqlite_database)] == ["idle"]
    stop.set()
    assert reporting.reported[True].wait(30)
    assert [one.status for one in seen(sqlite_database)] == ["draining"]

    ended.set()
    thread.join(30)

    assert (reporting.reports, seen(sqlite_database)) == ([False, True], [])


def test_a_database_that_is_away_ends_no_reports(
    sqlite_database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporting = reporter(sqlite_database, tmp_path)
    with sqlite_database.write() as session:
        session.execute(text("alter table workers rename to gone"))

    reporting.report()
    reporting.end()

    assert caplog.text.count("the database did not answer") == 2
    with sqlite_database.write() as session:
        session.execute(text("alter table gone rename to workers"))
    reporting.report()
    assert [one.status for one in seen(sqlite_database)] == ["idle"]
