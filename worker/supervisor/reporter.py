"""Reports of this worker to the database, by which operators see it (core/service/workers.py)."""

import logging
import socket
import threading
from importlib.metadata import version

from sqlalchemy.exc import SQLAlchemyError

from core.database.engine import Database
from core.service import workers
from core.service.workers import Report
from core.settings import Settings
from core.telemetry import checkup
from core.telemetry.silence import REPORT_SECONDS
from worker.supervisor.killed import KernelMemory
from worker.telemetry import Gpus

log = logging.getLogger(__name__)


class Reporter:
    """Reports the worker while it runs, and removes it when it has stopped. An unreachable database is retried."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        name: str,
        gpus: Gpus,
        memory: KernelMemory,
        every_seconds: float = REPORT_SECONDS,
    ) -> None:
        self.settings = settings
        self.database = database
        self.name = name
        self.gpus = gpus
        self.memory = memory
        self.every_seconds = every_seconds
        self._begun = False

    def run_until(self, stop: threading.Event, ended: threading.Event) -> None:
        """Report until `ended`; from `stop` on, as draining."""
        while not ended.is_set():
            try:
                self.report(draining=stop.is_set())
            except (
                Exception
            ):  # of a driver or of the kernel's files; without reports the worker would be "silent"
                log.exception("the worker could not be reported; retrying")
            (ended if stop.is_set() else stop).wait(self.every_seconds)
        self.end()

    def report(self, *, draining: bool = False) -> None:
        """Report the worker once. Best effort: the next report is another chance."""
        used, total = self.memory.use()
        host = socket.gethostname()
        worker = Report(
            name=self.name,
            host=host,
            gpu_class=self.settings.gpu_class,
            version=version("regraft-server"),
            machines=self.settings.nodes,
            ranks=self.settings.ranks,
            gpus=self.gpus.read(),
            memory_used_bytes=used,
            memory_total_bytes=total,
            draining=draining,
            findings=[one.model_dump() for one in checkup.found(self.settings.data_dir, host)],
        )
        try:
            with self.database.write() as session:
                (workers.report if self._begun else workers.begin)(session, worker)
            self._begun = True
        except SQLAlchemyError as cause:
            log.warning("the database did not answer: %s", cause)

    def end(self) -> None:
        """Remove the worker. Best effort: its row says that it is silent, and goes after a day."""
        try:
            with self.database.write() as session:
                workers.end(session, self.name)
        except SQLAlchemyError as cause:
            log.warning("the database did not answer: %s", cause)
