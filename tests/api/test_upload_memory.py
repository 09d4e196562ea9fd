"""A real server: what memory an upload takes, and what a client sees whose upload is refused half way."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

MEBIBYTE = 1 << 20

SERVER = """
import sys
import uvicorn
from pathlib import Path
from api.app import create_app
from core.tenancy import keys
from core.storage.store import FolderBlobs
from core.database.engine import Database
from core.database.migrate import upgrade
from core.registry import Registry
from core.settings import Settings
from graders.backends import Backends

folder, descriptor, most = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
settings = Settings(data_dir=folder, max_upload_bytes=most)
upgrade(settings.database)
database = Database(settings.database)
with database.write() as session:
    print(keys.bootstrap(session), flush=True)
blobs = FolderBlobs(folder / "blobs")
app = create_app(settings, database, blobs, Registry(models={}), Backends.none(), lambda task, queue, about="": True)
uvicorn.run(app, fd=descriptor, log_level="warning")
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], httpx.Client]]]:
    """Start a server; returns its process and a client that has a key."""
    started: list[subprocess.Popen[str]] = []

    def serve(most_bytes: int) -> tuple[subprocess.Popen[str], httpx.Client]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            # It listens before the process starts, so that nobody has to wait for the server to be up.
            server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(tmp_path), str(listening.fileno()), str(most_bytes)],
                pass_fds=[listening.fileno()],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
        started.append(server)
        assert server.stdout is not None
        key = server.stdout.readline().strip()
        headers = {"Authorization": f"Bearer {key}"}
        return server, httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", headers=headers, timeout=120)

    yield serve
    for server in started:
        server.terminate()
        server.wait(30)
        assert server.stdout is not None
        server.stdout.close()


def form(size: int) -> Iterator[bytes]:
    yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
    yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="big.jsonl"\r\n\r\n'
    line = b'{"messages": [{"role": "user", "content": "' + b"x" * 1000 + b'"}]}\r\n'
    block = (line * (MEBIBYTE // len(line) + 1))[:MEBIBYTE]
    for _ in range(size // MEBIBYTE):
        yield block
    yield b"\r\n--b--\r\n"


def upload(client: httpx.Client, size: int) -> httpx.Response:
    return client.post(
        "/files", content=form(size), headers={"content-type": "multipart/form-data; boundary=b"}
    )


def peak_memory(pid: int) -> int:
    """The most the process has ever held, in bytes: Linux keeps count, so nobody has to sample."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_large_upload_never_lies_in_memory(
    serve: Callable[..., tuple[subprocess.Popen[str], httpx.Client]],
) -> None:
    server, client = serve(512 * MEBIBYTE)
    upload(client, MEBIBYTE)  # what the first one loads is no cost of a large one
    before = peak_memory(server.pid)

    answer = upload(client, 512 * MEBIBYTE)

    assert answer.json()["bytes"] == 512 * MEBIBYTE
    assert peak_memory(server.pid) - before < 64 * MEBIBYTE


def test_a_client_that_sends_too_much_gets_to_read_why(
    serve: Callable[..., tuple[subprocess.Popen[str], httpx.Client]],
) -> None:
    """It is still sending when it is refused. Closing the connection there would hide the answer from it."""
    _, client = serve(2 * MEBIBYTE)

    answer = upload(client, 4 * MEBIBYTE)

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


def test_a_client_with_a_wrong_key_gets_to_read_that(
    serve: Callable[..., tuple[subprocess.Popen[str], httpx.Client]],
) -> None:
    _, client = serve(8 * MEBIBYTE)
    client.headers["Authorization"] = "Bearer nonsense"

    assert upload(client, 8 * MEBIBYTE).status_code == 401


def test_a_client_that_hangs_up_leaves_nothing_behind(
    serve: Callable[..., tuple[subprocess.Popen[str], httpx.Client]], tmp_path: Path
) -> None:
    server, client = serve(8 * MEBIBYTE)

    def hang_up() -> Iterator[bytes]:
        for block in form(2 * MEBIBYTE):
            yield block
            if len(block) == MEBIBYTE:
                raise ConnectionError

    with pytest.raises(ConnectionError):
        client.post("/files", content=hang_up(), headers={"content-type": "multipart/form-data; boundary=b"})

    assert upload(client, MEBIBYTE).status_code == 200
    assert len(client.get("/files").json()["data"]) == 1
    client.close()
    server.terminate()  # which waits for what is under way
    server.wait(30)
    assert len([path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]) == 1
