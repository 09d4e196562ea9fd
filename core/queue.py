"""Task names and wake-ups: all that the API knows of Celery.

A message only says "look for work"; the row is the truth. Losing one costs the seconds until the reconciler
sends it again, getting one twice costs nothing.
"""

import logging
import ssl
import threading
from typing import Any

from celery import Celery
from kombu import Queue

from core.db import Send

VALIDATE = "regraft.validate_next"
RUN = "regraft.run_next"
DEFAULT_QUEUE = "default"

log = logging.getLogger(__name__)


def gpu_queue(gpu_class: str) -> str:
    return f"gpu.{gpu_class}"


def open_celery(broker_url: str, gpu_class: str) -> Celery:
    """The Celery application both sides use: JSON only, no results, early acks, no prefetch."""
    if broker_url == "memory://":
        broker_url = "memory://localhost"  # without a host the client warns that it will assume this one
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
        # A wake-up needs no redelivery: acknowledged before the work starts, it can never be handed out twice
        # because a job ran longer than a visibility timeout.
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=broker_url.startswith("redis"),
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        # Left alone, kombu takes any certificate. What the URL itself says, as ?ssl_cert_reqs=none, goes before this.
        broker_use_ssl={"ssl_cert_reqs": ssl.CERT_REQUIRED} if broker_url.startswith("rediss://") else None,
        broker_transport_options=options,
        task_default_queue=DEFAULT_QUEUE,
        task_create_missing_queues=True,
        task_queues=[Queue(DEFAULT_QUEUE), Queue(gpu_queue(gpu_class))],
    )
    return app


def sender(app: Celery) -> Send:
    """Send that never fails its caller: what it announces is already durable, and will be announced again."""

    def send(task: str, queue: str) -> bool:
        try:
            app.send_task(task, queue=queue, retry=False, ignore_result=True)
            return True
        except Exception as cause:  # a broker client raises whatever its library raises
            log.warning("could not send %s to %s (%r); the reconciler will", task, queue, cause)
            return False

    return send


class WakeUps:
    """Sends wake-ups from a thread of its own, so that no caller waits for a broker that is away.

    A wake-up that already waits is not queued again: one of a kind says as much as two. What is left when the process
    ends is lost, and the reconciler sends it.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[tuple[str, str], None] = {}  # in the order in which they came
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __call__(self, task: str, queue: str) -> bool:
        with self._changed:
            self._waiting[task, queue] = None
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wake-ups", daemon=True)
                self._thread.start()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                wake = next(iter(self._waiting))
                del self._waiting[wake]
            self._send(*wake)
