"""Faults of blob stores and of a database: each ends in success, or in a wait that ends when the fault ends."""

import itertools
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from sqlalchemy import make_url, text

from core.database.engine import Database
from core.outages import Resource, outage
from core.retry import RetryPolicy
from core.settings import Settings
from core.storage.self_test import self_test
from core.storage.store import (
    BlobExists,
    BlobNotFound,
    BlobStore,
    FailedCleanups,
    FolderBlobs,
    NotDeleted,
    NotTheStore,
    S3Blobs,
)
from tests.proxies import AFTER_BREAK, ALL_S3_MODES, RESET, SILENT, S3Proxy, TcpProxy
from tests.servers import Postgres, ReplicatedPostgres, SeaweedFS

# In these, a store without what the fault takes away is used without it.
WORK_WITHOUT = {
    "no conditional put (501)",
    "no conditional put (400)",
    "no conditional completion (501)",
    "no conditional completion (400)",
    "no bulk delete (501)",
    "no bulk delete (400)",
    "bulk delete without Content-MD5",
    "odd ETags",
}


@pytest.fixture
def proxy(seaweed: SeaweedFS) -> Iterator[S3Proxy]:
    proxy = S3Proxy(seaweed.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def store(proxy: S3Proxy, seaweed: SeaweedFS) -> S3Blobs:
    """A new client of a bucket that has a blob."""
    return store_at(proxy.endpoint, seaweed)


def store_at(endpoint: str, seaweed: SeaweedFS, bucket: str | None = None) -> S3Blobs:
    # One attempt and a short time-out, so that a failure costs no time.
    config = Config(retries={"total_max_attempts": 1}, read_timeout=1)
    client = boto3.Session(seaweed.access_key, seaweed.secret_key).client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", config=config
    )
    return S3Blobs(bucket or seaweed.new_bucket(), client=client, sleep=lambda seconds: None)


class Fault:
    """Waits by counting, and repairs the proxy at the third wait."""

    def __init__(self, repair: Callable[[], None]) -> None:
        self.waits = 0
        self.resources: list[str] = []
        self._repair = repair

    def wait(self, seconds: float) -> None:
        self.waits += 1
        if self.waits == 3:
            self._repair()

    def retry(self) -> RetryPolicy:
        return RetryPolicy(600.0, self.resources.append, wait=self.wait)


def used(store: BlobStore) -> None:
    """Call every method of a store. What is deleted is left to the sweep if it cannot be."""
    large = [b"x" * (6 << 20), b"y" * (6 << 20)]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "a")
        file.write_bytes(b"first")
        store.put_file("new/a", file)
        store.download("new/a", Path(name, "b"), sha256=sha256(b"first").hexdigest())
    store.put_stream("new/large", large)
    writer = store.writer("new/b")
    writer.write(b"second")
    writer.commit()
    assert store.read("new/a") == b"".join(store.open("new/a")) == b"first"
    assert store.size("new/a") == 5
    assert store.url("new/a").endswith("new/a")
    assert {entry.key for entry in store.entries("new/")} == {*store.list("new/")} >= {"new/a", "new/b"}
    store.put_bytes(f"new/{os.urandom(4).hex()}", b"exclusive", if_absent=True)
    store.put_stream(f"new/{os.urandom(4).hex()}", large, if_absent=True)
    store.abort_stale_uploads(0.0)
    store.delete("new/b")
    store.discard("new/a")
    with suppress(NotDeleted):
        store.delete_many(["new/a", "new/large"])
    with suppress(NotDeleted):
        store.delete_prefix("new/")
    store.discard_prefix("new/")


class Calls:
    """A store whose methods are noted as they are called."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.store, name)


def test_the_faults_below_meet_every_method_of_a_store(tmp_path: Path) -> None:
    calls: Any = Calls(FolderBlobs(tmp_path))

    used(calls)

    public = {name for kind in (BlobStore, FolderBlobs, S3Blobs) for name in vars(kind) if name[0] != "_"}
    assert calls.names == public


@pytest.mark.parametrize("mode", ALL_S3_MODES)
def test_a_fault_of_the_blob_store_is_survived_or_waited_for(
    proxy: S3Proxy, store: S3Blobs, mode: str
) -> None:
    proxy.mode = mode
    fault = Fault(proxy.repair)

    fault.retry()(partial(used, store))

    assert (fault.waits == 0) is (mode in WORK_WITHOUT)
    assert proxy.failed


@pytest.mark.parametrize("mode", AFTER_BREAK)
def test_a_download_goes_on_with_no_bytes_of_another_place(proxy: S3Proxy, store: S3Blobs, mode: str) -> None:
    data = bytes(range(30))
    store.put_bytes("a", data)
    proxy.mode = mode
    chunks = store.open("a", chunk_size=5)

    assert b"".join(itertools.islice(chunks, 3)) == data[:15]
    with pytest.raises(NotTheStore, match=r"'a' has no (ETag|Content-Range 'bytes 15-29/30')"):
        next(chunks)
    assert proxy.failed == 1


def test_a_missing_bucket_does_not_mean_that_a_blob_was_deleted(seaweed: SeaweedFS, proxy: S3Proxy) -> None:
    store = store_at(proxy.endpoint, seaweed, bucket="never-created")

    with pytest.raises(Exception, match="NoSuchBucket") as missing:
        store.size("a")

    assert outage(missing.value) is Resource.BLOB_STORE


def test_a_blob_that_was_deleted_from_an_existing_bucket_is_not_found(store: S3Blobs) -> None:
    with pytest.raises(BlobNotFound):
        store.size("a")


def test_a_store_without_conditional_completion_of_uploads_keeps_an_existing_blob(
    proxy: S3Proxy, store: S3Blobs
) -> None:
    store.put_bytes("a", b"first")
    proxy.mode = "no conditional completion (501)"

    with pytest.raises(BlobExists):
        store.put_stream("a", [b"x" * (6 << 20), b"y" * (6 << 20)], if_absent=True)

    assert store.read("a") == b"first"


@pytest.mark.parametrize(
    "mode", ["no bulk delete (501)", "no bulk delete (400)", "bulk delete without Content-MD5"]
)
def test_a_store_without_bulk_deletion_deletes_one_by_one_and_is_asked_once(
    proxy: S3Proxy, store: S3Blobs, mode: str
) -> None:
    proxy.mode = mode
    for _ in range(2):
        for number in range(3):
            store.put_bytes(f"old/{number}", b"x")
        assert store.delete_prefix("old/") == 3

    assert list(store.list("old/")) == []
    assert proxy.failed == 1


def test_a_clean_up_without_the_right_to_delete_is_counted_and_left_to_the_sweep(
    proxy: S3Proxy, store: S3Blobs
) -> None:
    store.put_bytes("old/a", b"x")
    counted = FailedCleanups.count
    proxy.mode = "no right to delete"

    store.discard("old/a")

    assert FailedCleanups.count == counted + 1
    assert list(store.list("old/")) == ["old/a"]


@pytest.mark.parametrize("mode", [RESET, SILENT, "overloaded", "no bucket"])
def test_a_wait_that_outlasts_the_patience_raises_the_last_error(
    proxy: S3Proxy, store: S3Blobs, mode: str
) -> None:
    proxy.mode = mode
    times = itertools.count(step=250.0)
    policy = RetryPolicy(600.0, print, clock=lambda: next(times), wait=lambda seconds: None)

    with pytest.raises(Exception, match=r"timeout|closed|SlowDown|NoSuchBucket") as error:
        policy(lambda: store.read("a"))

    assert outage(error.value) is Resource.BLOB_STORE


# A folder.

USER = 54321  # root, as which tests may run, has every right
# The path in the folder, and its mode.
FOLDER_MODES = {
    "no rights": (".", 0o000),
    "no right to write": ("tmp", 0o500),
    "no right to put": ("objects", 0o500),
    "no right to list": ("objects/old", 0o300),
    "no right to get": ("objects/old/a", 0o000),
    "no rights to the objects": ("objects", 0o000),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a user who is not root; the test runs as that user."""
    with tempfile.TemporaryDirectory() as name:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(name, USER, USER)
            os.seteuid(USER)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)


@pytest.mark.parametrize("mode", FOLDER_MODES)
def test_missing_rights_to_a_folder_are_waited_for(folder: Path, mode: str) -> None:
    store = FolderBlobs(folder)
    store.put_bytes("old/a", b"old")
    path, rights = FOLDER_MODES[mode]
    usual = (folder / path).stat().st_mode
    (folder / path).chmod(rights)
    fault = Fault(lambda: (folder / path).chmod(usual))

    def use() -> None:
        used(store)
        assert list(store.list("old/")) == ["old/a"]
        assert store.read("old/a") == b"old"

    fault.retry()(use)

    assert fault.waits == 3


def test_a_folder_without_rights_is_refused_at_the_start_by_its_setting(folder: Path) -> None:
    store = FolderBlobs(folder)
    store.put_bytes("old/a", b"old")
    (folder / "tmp").chmod(0o500)

    assert self_test(store, "new").setting(Settings()) == "REGRAFT_BLOB_URL"


def test_a_file_that_may_not_be_deleted_keeps_no_other(folder: Path) -> None:
    store = FolderBlobs(folder)
    for key in ("a/1", "b/1", "c/1"):
        store.put_bytes(key, b"x")
    (folder / "objects/b").chmod(0o500)

    with pytest.raises(NotDeleted):
        store.delete_many(["a/1", "b/1", "c/1"])

    assert list(store.list("")) == ["b/1"]


# PostgreSQL.


@pytest.fixture
def line(postgres: Postgres) -> TcpProxy:
    return TcpProxy(partial(connected, postgres.new_database()))


def connected(url: str) -> socket.socket:
    host = make_url(url).query["host"]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{host}/.s.PGSQL.5432")
    return connection


@pytest.fixture
def database(line: TcpProxy) -> Iterator[Database]:
    database = Database(f"postgresql+psycopg://postgres@127.0.0.1:{line.port}/postgres")
    yield database
    database.close()


def asked(database: Database) -> int:
    with database.write() as session:
        return int(session.scalar(text("select 1")))


def test_connections_that_were_cut_are_replaced(line: TcpProxy, database: Database) -> None:
    assert asked(database) == 1
    line.cut()

    assert Fault(lambda: None).retry()(partial(asked, database)) == 1


@pytest.mark.parametrize("fault", ["down", "silent"])
def test_a_database_that_does_not_answer_is_waited_for(
    line: TcpProxy, database: Database, fault: str
) -> None:
    assert asked(database) == 1
    over = threading.Event()
    started = threading.Event()

    def fail() -> None:
        with getattr(line, fault)():
            started.set()
            over.wait()

    failing = threading.Thread(target=fail)
    failing.start()
    started.wait()

    def repair() -> None:
        over.set()
        failing.join()

    waiting = Fault(repair)
    if fault == "silent":  # a client waits on the connection itself
        threading.Timer(0.5, repair).start()
    answer = waiting.retry()(partial(asked, database))
    repair()

    assert answer == 1
    assert waiting.waits > 0


@pytest.fixture
def pair(postgres: Postgres) -> Iterator[ReplicatedPostgres]:
    pair = postgres.new_pair()
    yield pair
    pair.stop()


def test_a_failover_to_a_standby_is_waited_for_and_loses_nothing(pair: ReplicatedPostgres) -> None:
    database = Database(pair.url)
    with database.write() as session:
        session.execute(text("create table kept as select 1 as number"))

    def count() -> int:
        with database.write() as session:
            session.execute(text("insert into kept values (2)"))
            return int(session.scalar(text("select count(*) from kept")))

    pair.fail_over()
    counted = Fault(lambda: None).retry()(count)
    database.close()

    assert counted == 2
