"""A real server process with little memory to spare, and a watchdog that asks it for /healthz all the time.

The API alone, on SQLite, with a broker that does not answer: what is attacked here is the process that serves
everybody. Two bounds hold in each test: `BEARABLE_P90` and `BEARABLE` for /healthz, and RSS_SLACK for the memory.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from core.database.audit import operator_of
from core.database.engine import Database, Work
from core.database.tables import Organization, Project
from core.tenancy import keys
from core.tenancy.keys import Scope
from tests.e2e.conftest import ROOT, Server, wait_until_ready
from tests.servers import reserve_port

# The server may map so much more than it has mapped when it is ready.
ADDRESS_SPACE_TO_SPARE = 3 << 29
# Nine of ten answers of /healthz come within a second during an attack. On a shared machine a process may wait for a
# core for longer than that with nobody to blame, so that one answer may take five. What the attacks did before they
# were contained was silence for 20 seconds to for ever, and the end of the process.
BEARABLE_P90, BEARABLE = 1.0, 5.0
# What a server may hold after an attack beyond what it held before it. The attacks took gigabytes.
RSS_SLACK = 300 << 20
STORAGE_BYTES = 30 << 20  # of each project
GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "yes",
    "operation": "eq",
}


@dataclass
class Watchdog:
    """Asks for /healthz again and again, from a thread of its own."""

    url: str
    seconds: list[float] = field(default_factory=list)  # that each answer took; infinity: there was none
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def assert_it_answered(self) -> None:
        slowest = sorted(self.seconds)
        assert slowest, "not one answer"
        assert slowest[-1] <= BEARABLE and slowest[int(0.9 * (len(slowest) - 1))] <= BEARABLE_P90, slowest[
            -10:
        ]

    def _watch(self) -> None:
        with httpx.Client(timeout=30, trust_env=False) as client:
            while True:
                start = time.monotonic()
                try:
                    client.get(self.url).raise_for_status()
                    self.seconds.append(time.monotonic() - start)
                except httpx.HTTPError:
                    self.seconds.append(float("inf"))
                if self._ended.wait(0.02):
                    return


@dataclass
class Attacked:
    """The server, and the keys of two projects."""

    server: Server
    database: Database
    key: str
    read_key: str
    other_key: str
    project_id: str

    def client(self, key: str | None = None, timeout: float = 30) -> httpx.Client:
        return httpx.Client(
            base_url=self.server.base_url,
            headers={"Authorization": f"Bearer {key or self.key}"},
            timeout=timeout,
            trust_env=False,
        )

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.server.process.pid)

    def watchdog(self) -> Watchdog:
        return Watchdog(f"http://127.0.0.1:{self.server.port}/healthz")

    def run(self, grader: dict[str, Any], sample: str = "yes", key: str | None = None, **more: Any) -> Any:
        """Grade one sample with it; the answer's status and body."""
        with self.client(key) as client:
            answer = client.post(
                "/fine_tuning/alpha/graders/run", json={"grader": grader, "model_sample": sample} | more
            )
        return answer.status_code, answer.json()

    def is_up(self) -> bool:
        """Whether it lives and answers at all."""
        with self.client(timeout=10) as client:
            try:
                return client.get(f"http://127.0.0.1:{self.server.port}/healthz").status_code == 200
            except httpx.HTTPError:
                return False

    def serves(self) -> bool:
        """Whether it lives, and an honest request is answered rightly."""
        try:
            status, report = self.run(GRADER)
        except httpx.HTTPError:
            return False
        return self.server.process.poll() is None and (status, report["reward"]) == (200, 1.0)

    def rss(self) -> int:
        return int(self.process.memory_info().rss)


def server_error(judge: BaseHTTPRequestHandler) -> None:
    judge.rfile.read(int(judge.headers["content-length"]))
    judge.send_error(500)


@pytest.fixture(scope="module")
def broken_judge() -> Iterator[str]:
    """The address of a judge that answers everything with 500."""
    handler = type(
        "Broken", (BaseHTTPRequestHandler,), {"do_POST": server_error, "log_message": lambda *_: None}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the server keeps everything: a small disk of its own, if one may be mounted here."""
    folder = tmp_path_factory.mktemp("attacked")
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m", "attacked", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield folder
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Fortress:
    """The server of a module. An attack that ends or stops it fails one test, and the next one gets another."""

    def __init__(self, disk: Path, judge: str) -> None:
        self.disk = disk
        (disk / "models.toml").write_text('[models.tiny]\nhub = "nobody/tiny"\ncontext = 4096\n')
        (disk / "graders.toml").write_text(f'[judges.broken]\nbase_url = "{judge}"\n')
        self.settings = {
            "REGRAFT_DATA_DIR": str(disk),
            "REGRAFT_MODELS_FILE": str(disk / "models.toml"),
            "REGRAFT_GRADERS_FILE": str(disk / "graders.toml"),
            "REGRAFT_BROKER_URL": "redis://127.0.0.1:1/0",
            # Nobody is there either; chat and preview look at what they are sent before they ask.
            "REGRAFT_INFERENCE_URL": "http://127.0.0.1:1/v1",
            "REGRAFT_INFERENCE_KEY": "key",
            "REGRAFT_MIN_FREE_BYTES": "1048576",  # the disk of the test is a small one
            "REGRAFT_DEFAULT_LIMITS": json.dumps({"storage_bytes": STORAGE_BYTES}),
        }
        self.attacked: Attacked | None = None

    def whole(self) -> "Attacked":
        if self.attacked is None or not self.attacked.is_up():
            self.stop()
            self.attacked = self._start()
        return self.attacked

    def stop(self) -> None:
        if self.attacked is not None:
            self.attacked.database.close()
            self.attacked.server.process.kill()
            self.attacked.server.process.wait()

    def _start(self) -> "Attacked":
        port = reserve_port()
        with (self.disk / "server.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "worker.cli", "api"],
                cwd=ROOT,
                env=os.environ | self.settings | {"REGRAFT_PORT": str(port)},
                stdout=log,
                stderr=log,
            )
        server = Server(process, port, self.disk)
        try:
            wait_until_ready(server)
            mapped = psutil.Process(process.pid).memory_info().vms
            # The soft limit alone: its children set limits of their own, and may set higher ones.
            hard = resource.prlimit(process.pid, resource.RLIMIT_AS)[1]
            resource.prlimit(process.pid, resource.RLIMIT_AS, (mapped + ADDRESS_SPACE_TO_SPARE, hard))
            return with_keys(server, Database(f"sqlite:///{self.disk / 'regraft.db'}"))
        except BaseException:
            process.kill()
            raise


@pytest.fixture(scope="module")
def fortress(disk: Path, broken_judge: str) -> Iterator[Fortress]:
    fortress = Fortress(disk, broken_judge)
    yield fortress
    fortress.stop()


@pytest.fixture
def attacked(fortress: Fortress) -> Attacked:
    return fortress.whole()


def with_keys(server: Server, database: Database) -> Attacked:
    with database.write() as session:
        _, project = keys.authenticate(session, server.key)
        others = Organization(name="others")
        session.add(others)
        session.flush()
        other = Project(organization_id=others.id, name="others")
        session.add(other)
        session.flush()

        def new_key(project: Project, scope: Scope) -> str:
            return keys.create_key(Work(session, operator_of(project)), project, scope, scope=scope).token

        return Attacked(
            server,
            database,
            server.key,
            new_key(project, "read"),
            new_key(other, "write"),
            project.id,
        )


@pytest.fixture
def contained(attacked: Attacked) -> Iterator[Attacked]:
    """Everything that holds of any attack: /healthz answers meanwhile; then the server lives, works and is small."""
    assert attacked.serves()
    before = attacked.rss()
    with attacked.watchdog().watching() as watchdog:
        yield attacked
        serves = attacked.serves()
    watchdog.assert_it_answered()
    assert serves
    eventually(lambda: attacked.rss() <= before + RSS_SLACK, 10)


def eventually(holds: Callable[[], bool], seconds: float) -> None:
    """Look until it holds."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        pause.wait(0.01)
