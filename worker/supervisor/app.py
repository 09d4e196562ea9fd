"""The Celery app of the worker: three thin tasks, and the threads that they wake.

The same worker runs inside `regraft-server up` on memory:// and alone as `regraft-server worker` on Redis. It
uses threads because its tasks only watch child processes or read files (docs/adr/0002).

A task only wakes the thread that does the work. So a consumer that fails is replaced while a job runs, and the
reconciler starts queued work without a message.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial

from core.database.engine import Database, Send
from core.evals.batches import Prepare
from core.jobs.queue import DEFAULT_QUEUE, EVAL, RUN, VALIDATE, gpu_queue, open_celery, sender, unread_queues
from core.outbound.http import Outgoing
from core.reloaded import Reloaded, current
from core.settings import Settings
from core.storage.store import BlobStore
from core.telemetry.metrics import MetricsCollector
from graders.backends import Backends
from worker import forking
from worker.evals.runner import EvalRunner
from worker.model import capacity
from worker.supervisor import liveness, sharing
from worker.supervisor.consumer import Consumer
from worker.supervisor.deliveries import Deliveries
from worker.supervisor.reconciler import Reconciler
from worker.supervisor.reporter import Reporter
from worker.supervisor.supervisor import Supervisor
from worker.supervisor.validation import validate_next
from worker.supervisor.woken import LoopEnded, WokenLoop
from worker.telemetry import Gpus

log = logging.getLogger(__name__)


class WorkerService:
    """Runs all components of a worker machine: tasks, supervisor, reconciler and webhooks.

    `start` and `stop` are the whole use.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        blobs: BlobStore,
        backends: Backends | Reloaded[Backends],
        prepare: Prepare,
        has_members: Callable[[], bool] = lambda: True,
    ) -> None:
        """`has_members`: as for the supervisor."""
        self.settings, self.database, self.blobs, self.backends = settings, database, blobs, backends
        self.celery = open_celery(settings.broker_url, settings.gpu_class)
        self.send: Send = sender(self.celery, partial(unread_queues, settings))
        self.supervisor = Supervisor(settings, database, blobs, has_members=has_members)
        self.evals = EvalRunner(settings, database, blobs, backends, self.supervisor.owner, prepare)
        self.runs = WokenLoop("runs", self._run_jobs)
        self.validations = WokenLoop("validations", self._validate_files)
        # By task, and what a message of it does. Each returns at once.
        wakes = {RUN: self.runs.wake, VALIDATE: self.validations.wake, EVAL: self.evals.wake}
        for task, wake in wakes.items():
            self.celery.task(name=task, shared=False)(wake)
        self.reconciler = Reconciler(settings, database, blobs, self.send, wake=lambda task: wakes[task]())
        self.deliveries = Deliveries(database, Outgoing(settings.private_hosts))
        gpus = Gpus()
        self.collectors: tuple[MetricsCollector, ...] = (self.supervisor.runs, gpus)
        self.reporter = Reporter(settings, database, self.supervisor.owner, gpus, self.supervisor.memory)
        self.consumer = Consumer(self.celery, [DEFAULT_QUEUE, gpu_queue(settings.gpu_class)])
        self.failed = False
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._reporting: threading.Thread | None = None
        self._threads: list[threading.Thread] = []

    def _run_jobs(self) -> None:
        self.supervisor.run_waiting()
        if self.supervisor.has_lost_device:
            raise LoopEnded("this worker has lost its device")

    def _validate_files(self) -> None:
        # One message may stand for many jobs, so loop until none is left.
        while not self._stopping.is_set():
            wakes = validate_next(
                self.settings,
                self.database,
                self.blobs,
                current(self.backends),
                self.supervisor.owner,
                stopping=self._stopping,
            )
            if wakes is None:
                return
            for wake in wakes:
                self.send(*wake)

    def start(self, on_failure: Callable[[], object] = lambda: None) -> None:
        """Start all threads.

        Args:
            on_failure: called once, in a thread, if one of them has ended before `stop`. `failed` is true then: no
                thread is meant to, so the caller stops the worker and exits with a status for its supervisor.
        """
        capacity.note(self.settings)
        forking.warm()  # before there is a job, because imports take most of the time to the first sample
        if self.settings.jobs_per_worker > 1 and (reason := sharing.never(self.settings)):
            log.warning("REGRAFT_JOBS_PER_WORKER has no effect: %s", reason)
        self._thread("celery", self.consumer.run)
        for loop in (self.runs, self.validations):
            self._thread(loop.name, partial(loop.run_until, self._stopping))
        self._thread("reconciler", lambda: self.reconciler.run_until(self._stopping))
        self._thread("deliveries", lambda: self.deliveries.run_until(self._stopping))
        at_work = tuple(self._threads)
        file = liveness.file_in(self.settings.data_dir)

        def watch() -> None:
            if not liveness.touch_while_alive(file, at_work, self._stopping):
                self.failed = True
                on_failure()

        self._thread("alive", watch)
        # Not among the threads of the work: it says that the worker drains until they have ended.
        self._reporting = threading.Thread(
            target=lambda: self.reporter.run_until(self._stopping, self._stopped),
            name="reporter",
            daemon=True,
        )
        self._reporting.start()
        self.runs.wake()
        self.reconciler.run_once()

    def stop(self) -> None:
        """Drain: the run in progress writes a checkpoint and its job is queued again. Blocks until all threads exit."""
        self._stopping.set()
        self.supervisor.stop()
        self.evals.stop()
        for loop in (self.runs, self.validations):
            loop.wake()
        self.consumer.stop()
        try:
            for thread in self._threads:
                thread.join()
        finally:
            self.consumer.stopped()
            self._stopped.set()
            if self._reporting is not None:
                self._reporting.join()

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
