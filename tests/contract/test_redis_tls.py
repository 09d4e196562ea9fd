"""Redis behind TLS, with a certificate that a test makes: by each of the service's clients."""

import asyncio
import itertools
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kombu import pools

from api.http.rate_limits import RedisRates
from core.jobs.queue import DEFAULT_QUEUE, RUN, open_celery, sender
from core.settings import Settings
from tests.certificates import self_signed
from worker.cli import service
from worker.cli.parser import UsageError
from worker.supervisor.consumer import Consumer

PATIENCE = 60.0
HOST = "localhost"  # the only name in the certificate


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a self-signed certificate of HOST and its key."""
    return self_signed(tmp_path_factory.mktemp("tls") / "redis.pem", HOST)


@pytest.fixture(scope="module")
def tls_port(redis_url: str, certificate: Path) -> Iterator[int]:
    """The port of a TLS terminator before Redis: the packaged Redis is built without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    loop, upstream = asyncio.new_event_loop(), urlsplit(redis_url)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with closing(target):
            while piece := await source.read(1 << 16):
                target.write(piece)
                await target.drain()

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(upstream.hostname, upstream.port)
        await asyncio.gather(pump(source, requests), pump(answers, target), return_exceptions=True)

    opening = asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    server = loop.run_until_complete(opening)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE)
    server.close()


@pytest.fixture(autouse=True)
def no_shared_connection() -> Iterator[None]:
    """kombu keeps connections for the process, by address: the next test would use a verified one."""
    yield
    pools.reset()


def url_of(port: int, certificate: Path, host: str, options: str) -> str:
    return f"rediss://{host}:{port}/0{options.format(ca=certificate)}"


def takes(url: str) -> Iterator[bool]:
    """Whether the limiter counts a request in Redis, for a minute: a busy machine may miss its timeout of 0.1 s."""
    hours = itertools.count(step=3600.0)
    rates = RedisRates.at(url, clock=lambda: next(hours))
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield rates.take("proj_tls", 1000).tokens < 1000


@pytest.mark.parametrize(
    ("host", "options"),
    [
        (HOST, "?ssl_ca_certs={ca}"),
        (HOST, "?ssl_cert_reqs=none"),
        ("127.0.0.1", "?ssl_ca_certs={ca}&ssl_check_hostname=false"),
    ],
)
def test_every_client_speaks_tls_with_a_redis_that_the_url_trusts(
    tls_port: int, certificate: Path, host: str, options: str
) -> None:
    url = Settings(broker_url=url_of(tls_port, certificate, host, options)).broker_url
    arrived = threading.Event()
    celery = open_celery(url, "cpu")

    def run_next() -> None:
        arrived.set()

    celery.task(name=RUN, shared=False)(run_next)
    consumer = Consumer(celery, [DEFAULT_QUEUE])
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        assert sender(open_celery(url, "cpu"))(RUN, DEFAULT_QUEUE)
        assert arrived.wait(PATIENCE)
    finally:
        consumer.stop()
        thread.join(PATIENCE)
        consumer.stopped()

    assert any(takes(url))


@pytest.mark.parametrize(
    ("host", "options", "reason"),
    [
        (HOST, "", "self-signed certificate"),
        ("127.0.0.1", "?ssl_ca_certs={ca}", "IP address mismatch"),
    ],
)
def test_no_client_speaks_with_a_redis_that_the_url_does_not_trust(
    tls_port: int, certificate: Path, host: str, options: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = url_of(tls_port, certificate, host, options)

    assert not sender(open_celery(url, "cpu"))(RUN, DEFAULT_QUEUE)
    assert reason in caplog.text
    caplog.clear()
    assert not any(itertools.takewhile(lambda counted: reason not in caplog.text, takes(url)))
    assert reason in caplog.text


def test_a_file_of_certificates_that_cannot_be_read_is_named_at_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    settings = Settings(broker_url=f"rediss://{HOST}:6379/0?ssl_ca_certs={missing}")

    with pytest.raises(UsageError, match=f"REGRAFT_BROKER_URL: ssl_ca_certs names {missing}"):
        service.require_broker(settings)
