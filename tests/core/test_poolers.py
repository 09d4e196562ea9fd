"""A pooled connection keeps nothing of its last use: neither between our own transactions nor behind a pooler."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import make_url, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from core.database.engine import Database
from core.database.migrate import is_ready, upgrade
from core.database.tables import Organization
from tests import factories
from tests.servers import Postgres, reserve_port

# psycopg prepares a statement that is used for the sixth time.
REPEATS = 12


@pytest.fixture
def on_postgres(postgres: Postgres) -> Iterator[Database]:
    database = Database(postgres.new_database())
    yield database
    database.close()


def test_a_connection_that_has_read_respects_a_server_that_accepts_no_writes(on_postgres: Database) -> None:
    with on_postgres.read() as session:
        session.execute(text("select 1"))
    assert on_postgres.accepts_writes()
    with on_postgres.write() as session:  # as ALTER DATABASE does for new connections
        session.execute(text("set session characteristics as transaction read only"))
    with on_postgres.read() as session:
        session.execute(text("select 1"))

    assert not on_postgres.accepts_writes()
    with pytest.raises(DBAPIError, match="read-only transaction"), on_postgres.write() as session:
        session.execute(text("create table anything ()"))


@pytest.mark.parametrize("options", [{}, {"prepare_threshold": "0"}])
def test_no_statement_is_prepared(postgres: Postgres, options: dict[str, str]) -> None:
    """A URL option cannot switch it on either; psycopg took its text for a number."""
    url = make_url(postgres.new_database()).update_query_dict(options)
    database = Database(url.render_as_string(hide_password=False))
    with database.read() as session:
        for number in range(REPEATS):
            session.execute(text("select :number"), {"number": number})
        prepared = session.scalar(text("select count(*) from pg_prepared_statements"))
    database.close()

    assert prepared == 0


@pytest.fixture
def pgbouncer(postgres: Postgres, tmp_path: Path) -> Iterator[str]:
    """The URL of a migrated database behind pgbouncer in transaction mode, with two server connections."""
    program = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
    if program is None:
        pytest.skip("pgbouncer is not installed")
    url = postgres.new_database()
    upgrade(url)
    server, port = make_url(url), reserve_port()
    upstream = f"host={server.query['host']} port={server.port or 5432} dbname={server.database}"
    (tmp_path / "users.txt").write_text(f'"{server.username}" "{server.password or ""}"\n')
    (tmp_path / "pgbouncer.ini").write_text(
        f"[databases]\nregraft = {upstream} user={server.username}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
        f"auth_file = {tmp_path / 'users.txt'}\npool_mode = transaction\ndefault_pool_size = 2\n"
    )
    sockets = Path(str(server.query["host"]))
    as_user = ["-u", sockets.owner()] if os.geteuid() == 0 else []  # it refuses to run as root
    for file in (tmp_path, *tmp_path.iterdir()):
        file.chmod(0o755)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [program, *as_user, str(tmp_path / "pgbouncer.ini")], stdout=log, stderr=log
        )
    through = f"postgresql+psycopg://{server.username}@127.0.0.1:{port}/regraft"
    try:
        wait_for(through, process, tmp_path / "log")
        yield through
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    database, deadline = Database(url), time.monotonic() + 60
    while True:
        try:
            with database.read() as session:
                session.execute(text("select 1"))
            database.close()
            return
        except OperationalError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


def test_transactions_succeed_behind_pgbouncer_in_transaction_mode(pgbouncer: str) -> None:
    database = Database(pgbouncer)

    def use(number: int) -> str:
        with database.write() as session:
            created = factories.organization(session).id
        with database.read() as session:
            return session.scalars(select(Organization.id).where(Organization.id == created)).one()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(use, range(20 * REPEATS)))
    database.close()

    assert len(set(found)) == 20 * REPEATS


def test_a_schema_is_migrated_through_pgbouncer(pgbouncer: str) -> None:
    upgrade(pgbouncer)  # takes its lock and finds nothing to do

    database = Database(pgbouncer)
    with database.engine.connect() as connection:
        assert is_ready(connection)
    database.close()
