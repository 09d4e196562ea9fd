"""The real service behind a real socket; what workers would write are rows that the tests write."""

import hashlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from regraft import AsyncRegraft, Regraft

from api.app import create_app
from api.resources.batch_requests import prepare_request
from api.resources.chat import Upstream
from core.database.engine import Database, Work
from core.database.tables import Checkpoint, Job, Project, StepMetric, TunedModel
from core.jobs import events, lifecycle
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from core.storage.store import FolderBlobs
from core.tenancy import keys
from graders.backends import Backends
from tests import factories
from tests.rollout_pages import sample, store_page
from worker.evals.runner import EvalRunner

GRADER: Any = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
ROWS = [{"messages": [{"role": "user", "content": f"{n} + 1?"}], "answer": str(n + 1)} for n in range(4)]


@dataclass
class House:
    """The service, and what a worker does to it."""

    database: Database
    blobs: FolderBlobs
    project: Project
    key: str
    upstream: Upstream
    port: int = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def job(self, **fields: Any) -> str:
        with self.database.write() as session:
            asked = {"body": {"grader": GRADER, "hyperparameters": {"n_epochs": 1, "advanced": {}}}}
            return factories.job(session, self.project, **asked | fields).id

    def say(self, job_id: str, message: str, **more: Any) -> str:
        with self.database.write() as session:
            return events.append(session, job_id, message, **more).id

    def step(self, job_id: str, step: int, total: int, reward: float, **more: Any) -> None:
        data: dict[str, Any] = {"step": step, "total_steps": total, "train_mean_reward": reward}
        data |= {"timing": {"step": {"full_iteration": 1.5, "eval": 0.0}}, **more}
        with self.database.write() as session:
            session.add(StepMetric(job_id=job_id, step=step, epoch=1, data=data))
            events.append(session, job_id, f"Step {step}/{total}", type="metrics", data=data)

    def end(self, job_id: str, status: str, **fields: Any) -> None:
        with self.database.write() as session:
            job = session.query(Job).where(Job.id == job_id).one()
            if status == "cancelled":
                lifecycle.cancel(Work(session), job)
                return
            job.status = status
            for name, value in fields.items():
                setattr(job, name, value)
            events.append(session, job_id, f"now {status}")

    def rollouts(self, job_id: str, step: int, lines: list[dict[str, Any]], *, split: str = "train") -> None:
        """Store samples. A group ends where the members do not rise. Columns of JSON may be given as values."""
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines):
            member, last = line.get("member", number), rows[-1] if rows else None
            rises = last is not None and member > last["member"]
            place = {"group": last["group"] + (not rises) if last is not None else 0, "member": member}
            parsed = {
                key: line[key] for key in ("messages", "item") if isinstance(line.get(key), list | dict)
            }
            rows.append(sample(**place | line | {key: json.dumps(value) for key, value in parsed.items()}))
        with self.database.write() as session:
            session.add(store_page(self.blobs, job_id, step, split, rows))

    def checkpoint(
        self, job_id: str, step: int, reward: float, files: dict[str, bytes], **metrics: Any
    ) -> str:
        prefix = f"projects/{self.project.id}/jobs/{job_id}/attempts/1/checkpoints/step-{step:06d}"
        listed = []
        for name, content in files.items():
            self.blobs.put_bytes(f"{prefix}/{name}", content)
            sha256 = hashlib.sha256(content).hexdigest()
            listed.append({"name": name, "bytes": len(content), "sha256": sha256})
        manifest = {"format": 1, "job": job_id, "step": step, "files": listed}
        self.blobs.put_bytes(f"{prefix}/manifest.json", json.dumps(manifest).encode())
        with self.database.write() as session:
            row = Checkpoint(job_id=job_id, step=step, epoch=1, blob_prefix=prefix, valid_reward=reward)
            row.metrics = {"full_valid_mean_reward": reward, **metrics}
            session.add(row)
            session.flush()
            return row.id

    def tuned(self, name: str) -> None:
        with self.database.write() as session:
            row = TunedModel(name=name, project_id=self.project.id, job_id="ftjob-1", base_model="tiny")
            row.checkpoint_id = "ftckpt_1"
            session.add(row)


@pytest.fixture
def house(sqlite_database: Database, tmp_path: Path) -> Iterator[House]:
    settings = Settings(data_dir=tmp_path, inference_key="between us")
    database, blobs = sqlite_database, FolderBlobs(tmp_path / "blobs")
    with database.write() as session:
        key = keys.bootstrap(session)
        assert key is not None
        project = session.query(Project).one()
    models = {"tiny": BaseModelEntry(hub="regraft/tiny")}
    registry = Registry(models=models, aliases={"o4-mini-2025-04-16": "tiny"})
    app = create_app(settings, database, blobs, registry, Backends.none(), lambda *wake: True)
    house = House(database, blobs, project, key, app.state.upstream)
    with serving(app) as house.port:
        yield house


class serving:
    """An ASGI application on a port of its own, in a thread, for as long as the block runs."""

    def __init__(self, app: Any) -> None:
        self.server = uvicorn.Server(
            uvicorn.Config(
                app, log_level="critical", log_config=None, timeout_graceful_shutdown=1, lifespan="off"
            )
        )
        self.socket = socket.socket()
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self) -> int:
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(64)  # from here on connections wait until the server takes them
        self.thread.start()
        return int(self.socket.getsockname()[1])

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture
def model(house: House) -> Iterator[None]:
    """From now on the house has an inference server. Every second of its answers is right."""
    app = FastAPI()
    turns = itertools.count()

    @app.get("/healthz")
    async def healthy() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        number = int((await request.json())["messages"][0]["content"].split()[0])
        text = str(number + 1) if next(turns) % 2 else "no"
        choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}

    with serving(app) as port:
        house.upstream.url = f"http://127.0.0.1:{port}/v1"
        yield


@pytest.fixture
def client(house: House) -> Iterator[Regraft]:
    with Regraft(base_url=house.base_url, api_key=house.key, max_retries=0) as client:
        yield client


@pytest.fixture
def make_async(house: House) -> Callable[[], AsyncRegraft]:
    return lambda: AsyncRegraft(base_url=house.base_url, api_key=house.key, max_retries=0)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job in a folder with all that it names."""
    folder = tmp_path / "job"
    folder.mkdir()
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "grader.json").write_text(json.dumps(GRADER))
    (folder / "job.toml").write_text(
        'model = "tiny"\ntraining_file = "train.jsonl"\nvalidation_file = "valid.jsonl"\nseed = 7\n'
        'grader = "grader.json"\n[hyperparameters]\nn_epochs = 3\n'
    )
    return folder / "job.toml"


class Proxy:
    """Hands bytes on between a client and a server, and can cut every connection that is open."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for end in self.open:
            end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.open = []

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self.connections += 1
            self.open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass  # cut


@pytest.fixture
def graded_job(house: House) -> str:
    """A job with two stored answers, of which its grader passed the first."""
    made = house.job(status="running")
    answers = [("4", 1.0), ("4!", 0.0)]
    house.rollouts(
        made,
        1,
        [
            {
                "step": 1,
                "split": "train",
                "group": 0,
                "member": member,
                "line": 1,
                "messages": [],
                "item": json.dumps({"answer": "4"}),
                "output_text": text,
                "finish_reason": "stop",
                "completion_tokens": 1,
                "score": score,
            }
            for member, (text, score) in enumerate(answers)
        ],
    )
    return made


@pytest.fixture
def runner(house: House, tmp_path: Path) -> EvalRunner:
    return EvalRunner(
        Settings(data_dir=tmp_path), house.database, house.blobs, Backends({}), "worker/1", prepare_request
    )


@contextmanager
def working(runner: EvalRunner) -> Iterator[None]:
    """A worker that looks for runs all the time."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            runner.run_waiting()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
