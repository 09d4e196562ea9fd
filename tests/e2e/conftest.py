"""A live `regraft-server up` in a process of its own, on a tiny model, talked to by the official client."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from sqlalchemy import select

from core.database.engine import Database, Work
from core.database.tables import Organization
from core.settings import Settings
from core.tenancy import keys, tenants
from tests.servers import reserve_port
from tests.tiny import make_tiny_model
from worker.cli import main

ROOT = Path(__file__).parents[2]
# Between two looks at a job. Each costs the service and the client a part of the processor that the job runs on.
POLL_SECONDS = 0.5

Export = Callable[..., tuple[int, str]]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    project_key: str = ""  # empty: that of the first project

    @property
    def key(self) -> str:
        return self.project_key or (self.folder / "api_key").read_text().strip()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **options: Any) -> OpenAI:
        given: dict[str, Any] = {"base_url": self.base_url, "api_key": self.key, "max_retries": 0}
        return OpenAI(**given | options)

    def with_new_project(self, name: str) -> "Server":
        """The same service, as an operator whose key is of a new project sees it."""
        database = Database(Settings(data_dir=self.folder).database)
        with database.write() as session:
            work, organization = Work(session), session.scalars(select(Organization)).one()
            project = tenants.create_project(work, organization, name)
            key = keys.create_key(work, project, name, scope="operator").token
        database.close()
        return replace(self, project_key=key)

    def stop(self) -> int:
        """Ctrl-C, as a terminal sends it; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


def start_server(folder: Path, model: Path, *, judge: Path | None = None, **environment: str) -> Server:
    """Start a server with one tiny model, or two, and wait until it answers."""
    models = {"tiny": model} | ({"judge": judge} if judge else {})
    tables = (f'[models.{n}]\npath = "{p}"\ndtype = "float32"\ncontext = 128\n' for n, p in models.items())
    return launch(folder, "".join(tables), **environment)


def launch(folder: Path, models: str, **environment: str) -> Server:
    """Start a server with the registry `models`, TOML, and wait until it answers; its log is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    registry = folder / "models.toml"
    registry.write_text(models)
    port = reserve_port()
    settings = {
        "REGRAFT_DATA_DIR": str(folder),
        "REGRAFT_MODELS_FILE": str(registry),
        "REGRAFT_PORT": str(port),
        # Answers of three tokens are nearly all cut off, which is not what these tests are about.
        "REGRAFT_WARNINGS": '{"truncated_share": null, "length_factor": null, "kl_jump": null}',
        "REGRAFT_TORCH_THREADS": "1",
        "REGRAFT_RECONCILE_SECONDS": "0.5",
    }
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.cli", "up"],
            cwd=ROOT,
            env=os.environ | settings | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = Server(process, port, folder)
    try:
        wait_until_ready(server)
    except BaseException:  # also of a test that took too long: the server would run beside all others
        process.kill()
        raise
    return server


def wait_until_ready(server: Server) -> None:
    import select

    while server.process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/readyz", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            select.select([], [], [], 0.1)
    raise AssertionError((server.folder / "server.log").read_text()[-3000:])


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    """`regraft-server export` on the stores of a service: its status and what it says of errors.

    In this process, because another one would import torch anew.
    """

    def run(service: Server, job: str, folder: Path, *options: str) -> tuple[int, str]:
        monkeypatch.setenv("REGRAFT_DATA_DIR", str(service.folder))
        monkeypatch.setenv("REGRAFT_MODELS_FILE", str(service.folder / "models.toml"))
        try:
            status, why = main(["export", job, "-o", str(folder), *options]), ""
        except SystemExit as ended:  # with a status, or with a text that Python prints
            status, why = (ended.code, "") if isinstance(ended.code, int) else (1, str(ended.code))
        return status, capsys.readouterr().err + why

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("server"), tiny_model)
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


def patient(client: OpenAI) -> OpenAI:
    """A client that retries, as OpenAI's own does, while the inference server starts and loads the model."""
    return client.with_options(max_retries=20)


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
