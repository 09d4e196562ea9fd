from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI
from sqlalchemy import update
from starlette.testclient import TestClient

from api.app import create_app
from api.http.rate_limits import LocalRates
from api.pipelines.driver import PipelineDriver
from core.database.audit import operator_of
from core.database.engine import Database, Work
from core.database.tables import Organization, Pipeline, Project
from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from core.tenancy import keys, tenants
from core.tenancy.keys import Scope
from core.tenancy.limits import Limits
from graders.backends import Backends
from tests import factories
from tests.hardware import hardware_file
from tests.watched_blobs import WatchedBlobs

MODELS = {
    "tiny": BaseModelEntry(hub="regraft/tiny"),
    "org/large": BaseModelEntry(hub="org/large", gpu_class="h200"),
}
# Routes that take the key of an episode only, which tests/api/test_episodes.py tries.
OF_EPISODES = "/v1/regraft/episodes/"
ALIASES = {"o4-mini-2025-04-16": "tiny"}
# Between two looks at what runs in the background: looks without a pause would take the processor from it.
POLL_SECONDS = 0.05


@dataclass
class Clock:
    """Time that passes when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class House:
    """A whole service but for the network, with two projects that must not know of each other."""

    app: FastAPI
    portal: BlockingPortal
    database: Database
    blobs: WatchedBlobs
    project: Project
    key: str
    other_key: str
    folder: Path
    clock: Clock
    sent: list[tuple[str, str]] = field(default_factory=list)

    def limit(self, **limits: Any) -> None:
        """From the next request on the first project may use no more than this."""
        with self.database.write() as session:
            tenants.set_limits(Work(session), session.get_one(Project, self.project.id), Limits(**limits))

    def new_key(self, scope: Scope) -> str:
        """Another key of the first project."""
        with self.database.write() as session:
            return keys.create_key(Work(session), self.project, scope, scope=scope).token

    def key_id(self) -> str:
        """Of the first project's first key."""
        with self.database.read() as session:
            return keys.authenticate(session, self.key)[0].id

    def client(self, key: str | None = None) -> TestClient:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        client = TestClient(self.app, headers=headers, raise_server_exceptions=False)
        # As in a server, one event loop has all requests: those that wait for each other would not wake up in two.
        client.portal = self.portal
        return client


@contextmanager
def open_house(database: Database, folder: Path) -> Iterator[House]:
    """Put it together around an empty, migrated database."""
    settings = Settings(data_dir=folder, max_upload_bytes=1 << 20)
    blobs = WatchedBlobs(folder / "blobs")
    sent: list[tuple[str, str]] = []
    with database.write() as session:
        key = keys.bootstrap(session)
        assert key is not None
        _, project = keys.authenticate(session, key)
        other_key = second_project(session)
    registry = Registry(models=MODELS, aliases=ALIASES)
    clock = Clock()
    app = create_app(
        settings,
        database,
        blobs,
        registry,
        Backends.none(),
        factories.noting(sent),
        LocalRates(clock),
    )
    with start_blocking_portal() as portal:
        yield House(app, portal, database, blobs, project, key, other_key, folder, clock, sent)


@pytest.fixture
def house(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> Iterator[House]:
    with open_house(request.getfixturevalue(f"{database_kind}_database"), tmp_path) as house:
        yield house


def second_project(session: Any) -> str:
    organization = Organization(name="others")
    session.add(organization)
    session.flush()
    project = Project(organization_id=organization.id, name="others")
    session.add(project)
    session.flush()
    return keys.create_key(Work(session, operator_of(project)), project, "theirs").token


@pytest.fixture
def priced(house: House) -> TestClient:
    """A client of the same house, where a GPU-second costs a cent."""
    settings = house.app.state.service.settings.model_copy(
        update={"hardware_file": hardware_file(house.folder, price_per_gpu_second=0.01, currency="EUR")}
    )
    registry = Registry(models=MODELS)
    house.app = create_app(
        settings, house.database, house.blobs, registry, Backends.none(), lambda *wake: True
    )
    return house.client(house.key)


@pytest.fixture
def api(house: House) -> TestClient:
    """A client with the key of the first project."""
    return house.client(house.key)


def uploaded(
    api: TestClient,
    content: bytes = b'{"messages": []}\n',
    name: str = "train.jsonl",
    purpose: str = "fine-tune",
) -> str:
    """Upload a small training file and return its id."""
    answer = api.post("/v1/files", data={"purpose": purpose}, files={"file": (name, content)})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def created_job(api: TestClient, request: dict[str, Any]) -> dict[str, Any]:
    answer = api.post("/v1/fine_tuning/jobs", json=request)
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    return job


@pytest.fixture
def upload(api: TestClient) -> Callable[..., str]:
    return partial(uploaded, api)


GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


def request_of(api: TestClient, reinforcement: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """What creates a job; pass fields to change, `reinforcement` to change what is inside the method."""
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER} | (reinforcement or {})}
    files = {"training_file": uploaded(api), "validation_file": uploaded(api, name="valid.jsonl")}
    return {"model": "tiny", "method": method} | files | fields


@pytest.fixture
def job_request(api: TestClient) -> Callable[..., dict[str, Any]]:
    return partial(request_of, api)


@pytest.fixture
def create_job(api: TestClient) -> Callable[..., dict[str, Any]]:
    return lambda **fields: created_job(api, request_of(api, **fields))


async def advance_next(driver: PipelineDriver) -> bool:
    """Advance the pipeline that was looked at longest ago; False: none is due."""
    claimed = await driver.claim_next()
    if claimed is not None:
        await driver.advance(*claimed)
    return claimed is not None


@pytest.fixture
def advance(house: House) -> Callable[[], None]:
    """Advance each running pipeline, even if a process has just done so."""

    def advance() -> None:
        driver = PipelineDriver(house.app.state.service)  # a test may have replaced it
        with house.database.write() as session:
            session.execute(update(Pipeline).values(next_run_at=0.0))
        while house.portal.call(advance_next, driver):
            pass

    return advance
