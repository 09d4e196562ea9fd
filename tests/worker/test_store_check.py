"""The start does with the blob store what the service will do, and names the setting to change."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from core.settings import Settings
from worker.cli import service
from worker.cli.parser import UsageError

DENIED = (403, "AccessDenied")
PUT, GET, HEAD, DELETE = "PUT", "GET", "HEAD", "POST"  # the last is DeleteObjects


class FakeS3(ThreadingHTTPServer):
    """One bucket in memory, which answers the methods of `faults` with a status and a code."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.faults: dict[str, tuple[int, str]] = {}
        self.without_checksums = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: FakeS3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *parts: object) -> None:
        """Nothing on the terminal."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.server.faults.get(self.command)
        if self.server.without_checksums and any(name.startswith("x-amz-checksum") for name in self.headers):
            fault = (400, "InvalidArgument")
        if fault is not None:
            status, code = fault
            self.answer(status, f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode())
        elif self.command == "PUT":
            self.server.objects[self.path] = (body, self.headers.get("x-amz-meta-sha256", ""))
            self.answer(200, etag='"1"')
        elif self.command == "POST":
            self.server.objects.clear()
            self.answer(200, b"<DeleteResult/>")
        elif self.path not in self.server.objects:  # as of the bucket, which boto3 asks for its region
            self.answer(404)
        else:
            stored, sha256 = self.server.objects[self.path]
            self.answer(200, stored, etag='"1"', x_amz_meta_sha256=sha256)

    do_PUT = do_GET = do_HEAD = do_POST = handle_request


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server = FakeS3()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def settings_of(fake: FakeS3, **more: str) -> Settings:
    options = {"blob_url": "s3://bucket", "s3_endpoint_url": fake.url, "s3_region": "us-east-1"} | more
    return Settings.model_validate(options)


def test_a_store_that_does_everything_keeps_nothing_of_the_check(
    fake: FakeS3, caplog: pytest.LogCaptureFixture
) -> None:
    service.check_store(settings_of(fake))

    assert (fake.objects, caplog.text) == ({}, "")


@pytest.mark.parametrize(
    ("method", "fault", "setting", "action"),
    [
        (PUT, DENIED, "REGRAFT_BLOB_URL", "puts"),
        (GET, DENIED, "REGRAFT_BLOB_URL", "gets"),
        (HEAD, (403, ""), "REGRAFT_BLOB_URL", "heads"),
        (PUT, (405, "MethodNotAllowed"), "REGRAFT_BLOB_URL", "puts"),
        (PUT, (301, "PermanentRedirect"), "REGRAFT_S3_REGION", "puts"),
        (PUT, (400, "AuthorizationHeaderMalformed"), "REGRAFT_S3_REGION", "puts"),
        (PUT, (501, "NotImplemented"), "REGRAFT_S3_CHECKSUMS=when_required", "puts"),
        (PUT, (400, "InvalidArgument"), "REGRAFT_S3_CHECKSUMS=when_required", "puts"),
    ],
)
def test_a_store_that_refuses_what_the_service_does_ends_the_start(
    fake: FakeS3, method: str, fault: tuple[int, str], setting: str, action: str
) -> None:
    fake.faults[method] = fault

    with pytest.raises(UsageError, match=rf"^{setting}: s3://bucket refuses the service, which {action} "):
        service.check_store(settings_of(fake))


def test_the_setting_that_is_named_for_a_store_without_checksums_is_the_right_one(fake: FakeS3) -> None:
    fake.without_checksums = True

    with pytest.raises(UsageError, match="REGRAFT_S3_CHECKSUMS=when_required"):
        service.check_store(settings_of(fake))
    service.check_store(settings_of(fake, s3_checksums="when_required"))


@pytest.mark.parametrize("fault", [(503, "SlowDown"), (404, "NoSuchBucket"), (507, "StorageFull")])
def test_a_store_that_may_recover_delays_no_start(
    fake: FakeS3, fault: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    fake.faults[PUT] = fault

    service.check_store(settings_of(fake))

    assert "the blob store s3://bucket does not respond" in caplog.text


def test_a_store_that_deletes_nothing_is_a_warning(fake: FakeS3, caplog: pytest.LogCaptureFixture) -> None:
    fake.faults[DELETE] = DENIED

    service.check_store(settings_of(fake))

    assert "deletes no objects" in caplog.text


def test_a_folder_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("a file")

    with pytest.raises(UsageError, match=r"^REGRAFT_BLOB_URL: .* refuses the service, which puts an object"):
        service.check_store(Settings(blob_url=str(tmp_path)))
