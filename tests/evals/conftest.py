"""The service with a runner of evals, an inference server that repeats its prompt, a judge and a foreign model."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from openai import OpenAI
from starlette.testclient import TestClient

from api.app import create_app
from api.http.rate_limits import LocalRates
from api.resources.batch_requests import prepare_request
from core.database.engine import Database, Work
from core.database.tables import EvalRun, Project
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from core.storage.store import FolderBlobs
from core.tenancy import keys, tenants
from core.tenancy.limits import Limits
from graders.backends import Backends
from graders.judge.judges import JudgeModel
from tests import factories
from tests.api.conftest import second_project
from tests.evals.servers import ChatServer, chat_server, verdict
from worker.evals.runner import EvalRunner

SCHEMA = {
    "type": "object",
    "properties": {"question": {"type": "string"}, "answer": {"type": "string"}},
    "required": ["question", "answer"],
}
CONFIG: Any = {"type": "custom", "item_schema": SCHEMA, "include_sample_schema": True}
EXACT: Any = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
JUDGED: Any = {
    "type": "label_model",
    "name": "polite",
    "model": "judge",
    "input": [{"role": "user", "content": "Is {{sample.output_text}} polite?"}],
    "labels": ["yes", "no"],
    "passing_labels": ["yes"],
}
PROMPT = {"type": "template", "template": [{"role": "user", "content": "{{item.question}}"}]}


def row(number: int, answer: str | None = None) -> dict[str, Any]:
    return {"item": {"question": f"q{number}", "answer": f"q{number}" if answer is None else answer}}


def completions(count: int, **more: Any) -> Any:
    """A data source of `count` rows, to which the echoing model has the right answer."""
    content = [row(number) for number in range(count)]
    source = {"type": "file_content", "content": content}
    return {"type": "completions", "source": source, "model": "tiny", "input_messages": PROMPT} | more


@dataclass
class House:
    """The service without its network and its worker's thread: a test runs the worker when it wants to."""

    app: Any
    portal: Any
    settings: Settings
    database: Database
    blobs: FolderBlobs
    backends: Backends
    project: Project
    key: str
    other_key: str
    model: ChatServer
    judge: ChatServer
    foreign: ChatServer
    sent: list[tuple[str, str]]

    def client(self, key: str) -> TestClient:
        client = TestClient(
            self.app, headers={"Authorization": f"Bearer {key}"}, raise_server_exceptions=False
        )
        client.portal = self.portal
        return client

    def openai(self, key: str | None = None) -> OpenAI:
        key = key or self.key
        return OpenAI(
            api_key=key, base_url="http://testserver/v1", http_client=self.client(key), max_retries=0
        )

    def runner(self) -> EvalRunner:
        return EvalRunner(
            self.settings, self.database, self.blobs, self.backends, "worker/1", prepare_request
        )

    def work(self) -> int:
        """Work on all queued runs."""
        runner = self.runner()
        count = 0
        while (claim := runner.claim()) is not None:
            runner.run(claim)
            count += 1
        return count

    def row(self, run_id: str) -> EvalRun:
        with self.database.read() as session:
            return session.query(EvalRun).where(EvalRun.id == run_id).one()

    def limit(self, **limits: Any) -> None:
        with self.database.write() as session:
            tenants.set_limits(Work(session), session.get_one(Project, self.project.id), Limits(**limits))


@pytest.fixture
def house(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> Iterator[House]:
    with open_house(request.getfixturevalue(f"{database_kind}_database"), tmp_path) as house:
        yield house


@pytest.fixture
def second_house(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Another installation."""
    folder = tmp_path_factory.mktemp("second")
    database = Database(f"sqlite:///{shutil.copy(migrated_sqlite, folder / 'regraft.db')}")
    with open_house(database, folder) as house:
        yield house
    database.close()


@contextmanager
def open_house(database: Database, tmp_path: Path) -> Iterator[House]:
    with ExitStack() as stack:
        model = stack.enter_context(chat_server(lambda body: str(body["messages"][-1]["content"])))
        judge = stack.enter_context(chat_server(lambda body: verdict("yes")))
        foreign = stack.enter_context(chat_server(lambda body: "wrong"))
        models = tmp_path / "models.toml"
        models.write_text('[models.tiny]\nhub = "regraft/tiny"\n')
        settings = Settings(
            data_dir=tmp_path,
            models_file=models,
            inference_url=model.url,
            inference_key="secret",
            eval_concurrency=4,
        )
        backends = Backends(
            judges={"judge": JudgeModel(judge.url)},
            models={"gpt-foreign": JudgeModel(foreign.url, "their key", served_as="gpt-4o")},
        )
        blobs = FolderBlobs(tmp_path / "blobs")
        sent: list[tuple[str, str]] = []
        with database.write() as session:
            key = keys.bootstrap(session)
            assert key is not None
            _, project = keys.authenticate(session, key)
            other_key = second_project(session)
        registry = Registry(models={"tiny": BaseModelEntry(hub="regraft/tiny")})
        app = create_app(
            settings,
            database,
            blobs,
            registry,
            backends,
            factories.noting(sent),
            LocalRates(),
        )
        portal = stack.enter_context(start_blocking_portal())
        yield House(
            app,
            portal,
            settings,
            database,
            blobs,
            backends,
            project,
            key,
            other_key,
            model,
            judge,
            foreign,
            sent,
        )


@pytest.fixture
def client(house: House) -> OpenAI:
    return house.openai()


@pytest.fixture
def new_eval(client: OpenAI) -> Callable[..., Any]:
    def new_eval(*criteria: dict[str, Any], **more: Any) -> Any:
        fields: dict[str, Any] = {
            "name": "geography",
            "data_source_config": CONFIG,
            "testing_criteria": list(criteria) or [EXACT],
        }
        return client.evals.create(**fields | more)

    return new_eval


@pytest.fixture(autouse=True)
def own_event_loop() -> Iterator[None]:
    """A runner starts loops of its own."""
    yield
    asyncio.set_event_loop(None)
