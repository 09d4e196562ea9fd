"""Task names and wake-ups: the part of Celery that the API uses.

A message only says "look for work"; the database row is the source of truth. A lost message delays the work until the
reconciler repeats it; a duplicate has no effect.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Collection
from typing import Any

from celery import Celery
from kombu import Queue

from core.database.engine import Send
from core.settings import Settings

VALIDATE = "regraft.validate_next"
RUN = "regraft.run_next"
EVAL = "regraft.eval_next"
DEFAULT_QUEUE = "default"

log = logging.getLogger(__name__)


def gpu_queue(gpu_class: str) -> str:
    return f"gpu.{gpu_class}"


def open_celery(broker_url: str, gpu_class: str) -> Celery:
    """The Celery application of API and workers: JSON only, no results, early acks, no prefetch."""
    if broker_url == "memory://":
        broker_url = "memory://localhost"  # avoids the client's warning about a missing host
    app = Celery("regraft", broker=broker_url)
    options: dict[str, Any] = {"polling_interval": 0.05}
    if broker_url.startswith("redis"):
        options = {
            "global_keyprefix": "regraft:",
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 25,
        }
    app.conf.update(
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        # A wake-up needs no redelivery: acknowledged before the work starts, it is never delivered twice because a job
        # exceeds the visibility timeout.
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=broker_url.startswith("redis"),
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        # Celery's default, 100, ends a worker's consumer after about 50 minutes, and no job starts after the outage.
        broker_connection_max_retries=None,
        # kombu's default accepts any certificate. An option in the URL, such as ?ssl_cert_reqs=none, has precedence.
        broker_use_ssl={"ssl_cert_reqs": ssl.CERT_REQUIRED} if broker_url.startswith("rediss://") else None,
        broker_transport_options=options,
        task_default_queue=DEFAULT_QUEUE,
        task_create_missing_queues=True,
        task_queues=[Queue(DEFAULT_QUEUE), Queue(gpu_queue(gpu_class))],
    )
    return app


def unread_queues(settings: Settings) -> frozenset[str]:
    """The queues that no worker reads now, where messages would only pile up."""
    return frozenset(map(gpu_queue, settings.hardware.pod_classes))


def sender(app: Celery, unread: Callable[[], Collection[str]] = frozenset) -> Send:
    """A Send that never raises: the announced state is durable, and the reconciler repeats the wake-up.

    Args:
        unread: returns the queues to which nothing is sent.
    """

    def send(task: str, queue: str, about: str = "") -> bool:
        # The task takes no arguments; Flower and Celery's events show this text as its arguments.
        shown = {"argsrepr": f"({about})"} if about else {}
        try:
            if queue in unread():  # reads a file, which may be invalid now
                return True
            app.send_task(task, queue=queue, retry=False, ignore_result=True, **shown)
            return True
        except Exception as cause:  # each broker client has its own exceptions
            log.warning("could not send %s(%s) to %s (%r); the reconciler will", task, about, queue, cause)
            return False

    return send


class WakeUps:
    """Sends wake-ups from a background thread, so that no caller waits for an unavailable broker.

    Duplicates of a queued wake-up are dropped. Those queued at exit are lost, and the reconciler sends them; so is one
    whose `send` raises.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[tuple[str, str], str] = {}  # in order of arrival, with what the first was about
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __call__(self, task: str, queue: str, about: str = "") -> bool:
        with self._changed:
            self._waiting.setdefault((task, queue), about)
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="wake-ups", daemon=True)
                try:
                    thread.start()
                except RuntimeError as cause:  # the system has no other thread now; the next call tries again
                    log.warning("could not send %s(%s) to %s (%s)", task, about, queue, cause)
                    return False
                self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                task, queue = next(iter(self._waiting))
                about = self._waiting.pop((task, queue))
            try:
                self._send(task, queue, about)
            except Exception:
                log.exception("could not send %s(%s) to %s; the reconciler will", task, about, queue)
