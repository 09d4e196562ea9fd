"""Wake-ups arrive whatever Redis answers, and work starts without them."""

import math
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from api.resources.batch_requests import prepare_request
from core.jobs import lifecycle
from core.jobs.queue import RUN, gpu_queue, open_celery, sender
from core.settings import Settings
from graders.backends import Backends
from tests.servers import reserve_port
from tests.worker.conftest import Bench
from worker.supervisor.app import WorkerService
from worker.supervisor.consumer import Consumer
from worker.supervisor.reconciler import Reconciler
from worker.supervisor.supervisor import Supervisor
from worker.supervisor.woken import WokenLoop

# What Redis answers to a blocked BRPOP, or to the next one: of a failover, a full disk, a changed password or ACL, a
# full memory, a cluster, a script that does not end, a restart, and a limit of clients.
REPLIES = [
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    "UNBLOCKED client unblocked via CLIENT UNBLOCK",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "READONLY You can't write against a read only replica.",
    "NOREPLICAS Not enough good replicas to write.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "NOAUTH Authentication required.",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "NOPERM this user has no permissions to run the 'brpop' command",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "MOVED 3999 127.0.0.1:6381",
    "ASK 3999 127.0.0.1:6381",
    "CLUSTERDOWN The cluster is down",
    "CROSSSLOT Keys in request don't hash to the same slot",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    "ERR max number of clients reached",
    "ERR unknown command 'BRPOP'",
]


class Upstream:
    """A connection to the server, and whether the server has closed it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.closed = connection, threading.Event()


class RedisProxy:
    """Forwards connections to a Redis server, and answers a blocked BRPOP in its place on request."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        proxy = self
        # The clients whose BRPOP waits for a message, with their connections to the server.
        self._blocked: dict[socket.socket, Upstream] = {}
        self._changed = threading.Condition()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(upstream) as connection:
                    server = Upstream(connection)
                    threading.Thread(target=proxy.pump, args=[server, self.request], daemon=True).start()
                    proxy.forward(self.request, server)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"redis://127.0.0.1:{self.server.server_address[1]}/0"

    def forward(self, client: socket.socket, server: Upstream) -> None:
        while data := receive(client):
            with self._changed:  # `answer` must find no BRPOP that the server has yet to receive
                try:
                    server.connection.sendall(data)
                except OSError:
                    break
                if b"BRPOP" in data:
                    self._blocked[client] = server
                    self._changed.notify_all()
        with self._changed:
            self._blocked.pop(client, None)

    def pump(self, server: Upstream, client: socket.socket) -> None:
        while data := receive(server.connection):
            with self._changed:
                self._blocked.pop(client, None)  # it was answered
            try:
                client.sendall(data)
            except OSError:
                break
        server.closed.set()

    def answer(self, error: str) -> bool:
        """Answer the next BRPOP that waits with this error. False: no client sent one in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._blocked, 60):
                return False
            client, server = self._blocked.popitem()
        # Redis must not hand the next message to this BRPOP. It has forgotten it once it has closed its side.
        server.connection.shutdown(socket.SHUT_WR)
        if not server.closed.wait(60):
            return False
        client.sendall(f"-{error}\r\n".encode())
        return True

    @contextmanager
    def serving(self) -> Iterator[None]:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            self.server.shutdown()
            self.server.server_close()


def receive(from_: socket.socket) -> bytes:
    try:
        return from_.recv(65536)
    except OSError:
        return b""


@pytest.fixture
def proxy(redis_url: str) -> Iterator[RedisProxy]:
    address = urlsplit(redis_url)
    assert address.hostname is not None and address.port is not None
    made = RedisProxy((address.hostname, address.port))
    with made.serving():
        yield made


@contextmanager
def consuming(url: str, on_run: Callable[[], Any]) -> Iterator[Consumer]:
    celery = open_celery(url, "cpu")
    celery.task(name=RUN, shared=False)(on_run)
    consumer = Consumer(celery, [gpu_queue("cpu")], first_pause=0.01, max_pause=0.05)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        yield consumer
    finally:
        consumer.stop()
        thread.join()
        consumer.stopped()


def test_after_every_error_reply_of_redis_the_next_wake_up_arrives(redis_url: str, proxy: RedisProxy) -> None:
    arrived = threading.Semaphore(0)
    send = sender(open_celery(redis_url, "cpu"))

    def run_next() -> None:
        arrived.release()

    with consuming(proxy.url, run_next):
        for reply in REPLIES:
            assert proxy.answer(reply), f"no consumer waits for a message, before {reply}"
            assert send(RUN, gpu_queue("cpu"))
            assert arrived.acquire(timeout=60), f"no wake-up arrived after {reply}"


class Recorded(Supervisor):
    """Counts the calls, and runs nothing."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.asked = threading.Semaphore(0)

    def run_waiting(self, most: float = math.inf) -> int:
        self.asked.release()
        return 0


def test_a_worker_starts_queued_jobs_while_its_broker_is_unreachable(bench: Bench) -> None:
    with lifecycle.fenced(bench.database, bench.claim) as (session, job):
        lifecycle.release(session, job)
    settings = Settings(
        data_dir=bench.tmp_path, broker_url=f"redis://127.0.0.1:{reserve_port()}/0", reconcile_seconds=0.05
    )
    worker = WorkerService(settings, bench.database, bench.blobs, Backends({}), prepare_request)
    worker.supervisor = supervisor = Recorded(settings, bench.database, bench.blobs)
    worker.start()
    try:
        assert supervisor.asked.acquire(timeout=60)  # at its start
        assert supervisor.asked.acquire(timeout=60)  # the reconciler found the job
    finally:
        worker.stop()


class Ended(Reconciler):
    """Its thread ends at once, as by a fault that nothing foresaw."""

    def run_until(self, stop: threading.Event) -> None:
        return


def stops_itself(worker: WorkerService) -> bool:
    """Whether the worker ends without being told to, with a status that says that it failed."""
    ended = threading.Event()
    worker.start(on_failure=ended.set)
    try:
        has_ended = ended.wait(60)
    finally:
        worker.stop()
    return has_ended and worker.failed


def test_a_worker_whose_thread_has_ended_stops_itself_with_a_status(bench: Bench) -> None:
    settings = Settings(data_dir=bench.tmp_path)
    worker = WorkerService(settings, bench.database, bench.blobs, Backends({}), prepare_request)
    worker.supervisor = Recorded(settings, bench.database, bench.blobs)
    worker.reconciler = Ended(settings, bench.database, bench.blobs, worker.send)
    assert stops_itself(worker)


def test_a_worker_with_a_run_that_does_not_end_stops_itself_with_a_status(bench: Bench) -> None:
    settings = Settings(data_dir=bench.tmp_path)
    worker = WorkerService(settings, bench.database, bench.blobs, Backends({}), prepare_request)
    worker.supervisor = Recorded(settings, bench.database, bench.blobs)
    worker.supervisor.has_lost_device = True
    assert stops_itself(worker)


def test_work_that_fails_is_logged_and_done_again_at_the_next_wake_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls, stop = threading.Semaphore(0), threading.Event()

    def work() -> None:
        calls.release()
        raise RuntimeError("the database does not answer")

    loop = WokenLoop("runs", work)
    thread = threading.Thread(target=loop.run_until, args=[stop])
    thread.start()
    for _ in range(2):
        loop.wake()
        assert calls.acquire(timeout=60)
    stop.set()
    loop.wake()
    thread.join(60)

    assert not thread.is_alive()
    assert "the thread runs failed" in caplog.text
