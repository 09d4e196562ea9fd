"""SIGTERM of an API process: requests in flight complete, and one that is cut gets 503 with Retry-After."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from core.settings import Settings
from tests.e2e.conftest import ROOT
from tests.servers import reserve_port

pytestmark = pytest.mark.slow

BODY = b"".join(
    b"--x\r\ncontent-disposition: form-data; name=\"%s\"%s\r\n\r\n%s\r\n" % part
    for part in (
        (b"purpose", b"", b"fine-tune"),
        (b"file", b'; filename="rows.jsonl"', b'{"messages": [{"role": "user", "content": "hi"}]}'),
    )
) + b"--x--\r\n"  # fmt: skip


class Api:
    """A process of `regraft-server api`."""

    def __init__(self, folder: Path, redis_url: str, drain: str) -> None:
        self.port = reserve_port()
        self.folder = folder
        settings = {
            "REGRAFT_DATA_DIR": str(folder),
            "REGRAFT_BROKER_URL": redis_url,
            "REGRAFT_PORT": str(self.port),
            "REGRAFT_DRAIN_REQUESTS_SECONDS": drain,
            "REGRAFT_FIRST_KEY": "k" * 32,
        }
        with (folder / "api.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "worker.cli", "api"],
                cwd=ROOT,
                env=os.environ | settings,
                stdout=log,
                stderr=log,
            )
        self._until(lambda: self._status("/readyz") == 200)

    def _status(self, path: str) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=30).status_code
        except httpx.TransportError:
            return 0

    def refuses(self) -> bool:
        """Whether it accepts no more connections: its shutdown has begun."""
        with socket.socket() as knocking:
            return knocking.connect_ex(("127.0.0.1", self.port)) != 0

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self._until(self.refuses)

    def _until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not reached():
            assert self.process.poll() is None, (self.folder / "api.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @contextmanager
    def upload(self) -> Iterator[socket.socket]:
        """An upload of which all but the last ten bytes have been sent."""
        head = (
            "POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer " + "k" * 32 + "\r\n"
            f"content-type: multipart/form-data; boundary=x\r\ncontent-length: {len(BODY)}\r\n"
            "expect: 100-continue\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(head.encode())
            assert connection.recv(200).startswith(b"HTTP/1.1 100")  # the application reads the body
            connection.sendall(BODY[:-10])
            yield connection


def response(connection: socket.socket) -> HTTPResponse:
    read = HTTPResponse(connection)
    read.begin()
    return read


@contextmanager
def running(folder: Path, redis_url: str, drain: str) -> Iterator[Api]:
    api = Api(folder, redis_url, drain)
    try:
        yield api
    finally:
        api.process.kill()
        api.process.wait()


def test_an_upload_in_flight_completes_after_sigterm(tmp_path: Path, redis_url: str) -> None:
    default = str(Settings.model_fields["drain_requests_seconds"].default)
    with running(tmp_path, redis_url, default) as api, api.upload() as connection:
        api.terminate()
        connection.sendall(BODY[-10:])

        assert response(connection).status == 200
        assert api.process.wait(60) == 0
    assert int(default) >= 60, "as long as the longest response of the API"


def test_a_request_that_is_cut_gets_503_with_retry_after(tmp_path: Path, redis_url: str) -> None:
    with running(tmp_path, redis_url, "1") as api, api.upload() as connection:
        api.terminate()
        cut = response(connection)

        assert cut.status == 503
        assert cut.headers["retry-after"] == "1"
        assert cut.headers["x-request-id"]
        assert b"shutting down" in cut.read()
        assert api.process.wait(60) == 0
