"""How the broker is reached."""

import socket
import ssl
import threading
from functools import partial
from pathlib import Path

import pytest

from core.hardware import GpuClass
from core.jobs.queue import RUN, WakeUps, gpu_queue, open_celery, sender, unread_queues
from core.settings import Settings
from tests.hardware import hardware_file


@pytest.mark.parametrize(
    ("url", "checked"),
    [
        ("rediss://redis.example.com:6379/0", ssl.CERT_REQUIRED),
        ("rediss://redis.example.com:6379/0?ssl_cert_reqs=none", ssl.CERT_NONE),
    ],
)
def test_the_certificate_of_an_encrypted_broker_is_checked_unless_its_url_says_otherwise(
    url: str, checked: ssl.VerifyMode
) -> None:
    """kombu's own default is to check none, and to warn."""
    with open_celery(url, "cpu").connection() as connection:
        assert connection.ssl == {"ssl_cert_reqs": checked}


@pytest.mark.parametrize("url", ["redis://redis.example.com:6379/0", "memory://"])
def test_a_broker_without_encryption_is_asked_for_none(url: str) -> None:
    with open_celery(url, "cpu").connection() as connection:
        assert not connection.ssl


def test_a_worker_reconnects_to_its_broker_however_long_that_is_gone() -> None:
    """Celery's own default ends the worker's consumer after 100 attempts, about 50 minutes."""
    assert open_celery("redis://redis.example.com:6379/0", "cpu").conf.broker_connection_max_retries is None


def test_a_wake_up_shows_the_id_of_its_job_and_passes_no_arguments() -> None:
    """Flower and Celery's events show it; the task itself looks for work."""
    app = open_celery("memory://", "shown")
    assert sender(app)(RUN, gpu_queue("shown"), "ftjob-1")

    with app.connection() as connection:
        message = connection.default_channel.basic_get(gpu_queue("shown"), no_ack=True)

    assert message.headers["argsrepr"] == "(ftjob-1)"
    assert message.payload[:2] == [[], {}]


def test_nothing_is_sent_to_the_queue_of_a_class_that_kubernetes_jobs_run(tmp_path: Path) -> None:
    """No worker reads it, so the messages of weeks would fill the memory of Redis."""
    classes = {"silent": GpuClass(in_kubernetes_jobs=True), "read": GpuClass()}
    settings = Settings(hardware_file=hardware_file(tmp_path, classes))
    app = open_celery("memory://", "silent")
    send = sender(app, partial(unread_queues, settings))
    assert send(RUN, gpu_queue("silent")) and send(RUN, gpu_queue("read"))

    with app.connection() as connection:
        channel = connection.default_channel
        messages = {name: channel.basic_get(gpu_queue(name), no_ack=True) for name in classes}

    assert messages["silent"] is None
    assert messages["read"] is not None


class Broker:
    """Takes a wake-up when it is let, and keeps what it got."""

    def __init__(self) -> None:
        self.asked, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.got: list[tuple[str, str]] = []
        self.all = threading.Event()

    def __call__(self, task: str, queue: str, about: str = "") -> bool:
        self.asked.release()
        assert self.let.acquire(timeout=30)
        self.got.append((task, queue))
        if task == "last":
            self.all.set()
        return True


def test_nobody_waits_for_a_broker_and_what_waits_twice_is_sent_once() -> None:
    broker = Broker()
    wake_up = WakeUps(broker)

    wake_up("run", "gpu.cpu")
    assert broker.asked.acquire(timeout=30)  # the first is on its way, and the broker does not take it
    for task in ("validate", "validate", "run", "validate", "last"):
        wake_up(task, "default")
    assert broker.got == []

    for _ in range(4):
        broker.let.release()
    assert broker.all.wait(30)
    assert broker.got == [("run", "gpu.cpu"), *((task, "default") for task in ("validate", "run", "last"))]


class Failing(Broker):
    """Raises for each wake-up but the last."""

    def __call__(self, task: str, queue: str, about: str = "") -> bool:
        sent = super().__call__(task, queue, about)
        if task != "last":
            raise RuntimeError("a mistake of a client of a broker")
        return sent


def test_a_wake_up_that_cannot_be_sent_does_not_keep_the_next_from_being_sent() -> None:
    broker = Failing()
    broker.let.release(2)
    wake_up = WakeUps(broker)

    wake_up("run", "gpu.cpu")
    wake_up("last", "default")

    assert broker.all.wait(30)


def test_a_hardware_file_that_has_become_invalid_is_no_error_of_a_wake_up(tmp_path: Path) -> None:
    (tmp_path / "hardware.toml").write_text("[classes")
    settings = Settings(hardware_file=tmp_path / "hardware.toml")
    send = sender(open_celery("memory://", "cpu"), partial(unread_queues, settings))

    assert not send(RUN, gpu_queue("cpu"))


def test_a_broker_that_accepts_no_connection_delays_nobody() -> None:
    """Its port is there and nothing answers: the client's own patience is half a minute."""
    returned = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        send = sender(open_celery(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", "cpu"))
        sending = threading.Event()

        def watched(task: str, queue: str, about: str = "") -> bool:
            sending.set()
            sent = send(task, queue, about)
            returned.set()
            return sent

        WakeUps(watched)("run", "gpu.cpu")

        assert sending.wait(30)
        assert not returned.is_set()
