"""The Celery app of the worker: three thin tasks, and a thread-pool worker that runs them.

The same worker runs inside `regraft-server up` on memory:// and alone as `regraft-server worker` on Redis. It
uses threads because its tasks only watch child processes or read files (docs/adr/0002).
"""

import logging
import threading
from collections.abc import Callable

from celery.worker import state

from core.database.engine import Database, Send
from core.evals.batches import Prepare
from core.jobs.queue import DEFAULT_QUEUE, EVAL, RUN, VALIDATE, gpu_queue, open_celery, sender
from core.outbound.http import Outgoing
from core.settings import Settings
from core.storage.store import BlobStore
from core.telemetry.metrics import MetricsCollector
from graders.backends import Backends
from worker.evals.runner import EvalRunner
from worker.model import capacity
from worker.supervise import liveness, sharing
from worker.supervise.deliveries import Deliveries
from worker.supervise.reconciler import Reconciler
from worker.supervise.reporter import Reporter
from worker.supervise.supervisor import Supervisor
from worker.supervise.telemetry import Gpus
from worker.supervise.validation import validate_next

log = logging.getLogger(__name__)


class WorkerService:
    """Runs all components of a worker machine: tasks, supervisor, reconciler and webhooks.

    `start` and `stop` are the whole use.
    """

    def __init__(
        self, settings: Settings, database: Database, blobs: BlobStore, backends: Backends, prepare: Prepare
    ) -> None:
        self.settings = settings
        self.celery = open_celery(settings.broker_url, settings.gpu_class)
        self.send: Send = sender(self.celery)
        self.supervisor = Supervisor(settings, database, blobs)
        self.evals = EvalRunner(settings, database, blobs, backends, self.supervisor.owner, prepare)
        self.reconciler = Reconciler(settings, database, blobs, self.send)
        self.deliveries = Deliveries(database, Outgoing(settings.private_hosts))
        gpus = Gpus()
        self.figures: tuple[MetricsCollector, ...] = (self.supervisor.runs, gpus)
        self.reporter = Reporter(settings, database, self.supervisor.owner, gpus, self.supervisor.memory)
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._reporting: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._consumer = None
        self._register(database, blobs, backends)

    def _register(self, database: Database, blobs: BlobStore, backends: Backends) -> None:
        def run_next() -> None:
            self.supervisor.run_waiting()
            self.supervisor.keep_spare()

        def validate_files() -> None:
            # One message may stand for many jobs, so loop until none is left.
            while not self._stopping.is_set():
                wakes = validate_next(self.settings, database, blobs, backends, self.supervisor.owner)
                if wakes is None:
                    return
                for wake in wakes:
                    self.send(*wake)

        self.celery.task(name=RUN)(run_next)
        self.celery.task(name=VALIDATE)(validate_files)
        self.celery.task(name=EVAL)(self.evals.wake)

    def start(self) -> None:
        capacity.note(self.settings)
        if self.settings.jobs_per_worker > 1 and (reason := sharing.never(self.settings)):
            log.warning("REGRAFT_JOBS_PER_WORKER has no effect: %s", reason)
        self._consumer = self.celery.WorkController(
            # One thread for the run and one for validation, so that a long job does not delay validation.
            pool="threads",
            concurrency=2,
            queues=[DEFAULT_QUEUE, gpu_queue(self.settings.gpu_class)],
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
            loglevel="WARNING",
        )
        self._thread("celery", self._consume)
        self._thread("reconciler", lambda: self.reconciler.run_until(self._stopping))
        self._thread("deliveries", lambda: self.deliveries.run_until(self._stopping))
        at_work = tuple(self._threads)
        file = liveness.file_in(self.settings.data_dir)
        self._thread("alive", lambda: liveness.tell(file, at_work, self._stopping))
        # Not among the threads of the work: it says that the worker drains until they have ended.
        self._reporting = threading.Thread(
            target=lambda: self.reporter.run_until(self._stopping, self._stopped),
            name="reporter",
            daemon=True,
        )
        self._reporting.start()
        self.supervisor.keep_spare()
        self.reconciler.run_once()

    def _consume(self) -> None:
        assert self._consumer is not None
        self._consumer.start()

    def stop(self) -> None:
        """Drain: the run in progress writes a checkpoint and its job is queued again. Blocks until all threads exit."""
        self._stopping.set()
        self.supervisor.stop()
        self.evals.stop()
        # The consumer's own thread checks this flag every second or two and stops itself, also while it reconnects to
        # the broker. With Redis, `stop` must not be called from here: closing the connection reads the reply that the
        # other thread is about to read, and waits for it forever if that one was faster.
        state.should_stop = 0
        try:
            if self._consumer is not None and not self._consumer.use_eventloop:
                self._consumer.stop()
            for thread in self._threads:
                thread.join()
        finally:
            state.should_stop = None
            self._stopped.set()
            if self._reporting is not None:
                self._reporting.join()

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
