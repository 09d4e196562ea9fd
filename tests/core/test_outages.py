"""The tables that decide whether an error passes by itself, tried on what real servers and libraries raise."""

import errno
import socket
import sqlite3
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
)
from botocore.parsers import ResponseParserError
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as NoFreeConnection

from core.database.engine import Database
from core.outages import Resource, outage
from core.storage.store import BlobNotFound, StoreEmpty
from tests.servers import Postgres

DATABASE, STORE, DISK = Resource.DATABASE, Resource.BLOB_STORE, Resource.DISK
SQLSTATES = {
    **dict.fromkeys(
        """08000 08003 08006 08001 08004 08P01 25006 25P03 25P04 26000 28000 28P01 40001 40P01 42P05 53000 53300 53400
        55000 55006 55P03 57000 57014 57P01 57P02 57P03 57P04 57P05 58000 58030 58P01""".split(),
        DATABASE,
    ),
    "53100": DISK,
    "53200": Resource.MEMORY,
    **dict.fromkeys("0A000 22001 22P05 23505 25P02 42501 42601 42P01 42703 54000 54001 XX000 XX001".split()),
}


@pytest.fixture
def server(postgres: Postgres) -> Iterator[Database]:
    database = Database(postgres.new_database())
    yield database
    database.close()


def raised(database: Database, code: str, message: str = "injected") -> DBAPIError:
    """What the client raises for an error of the server."""
    failing = f"do $$ begin raise exception '{message}' using errcode = '{code}'; end $$"
    with pytest.raises(DBAPIError) as error, database.write() as session:
        session.execute(text(failing))
    return error.value


def backend(database: Database) -> int:
    with database.write() as session:
        return session.scalars(text("select pg_backend_pid()")).one()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("code", "expected"), SQLSTATES.items())
def test_each_error_code_of_postgresql_passes_or_does_not(
    server: Database, code: str, expected: Resource | None
) -> None:
    assert outage(raised(server, code)) is expected


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("25006", "cannot execute UPDATE in a read-only transaction"),
        ("0A000", "cannot set transaction read-write mode during recovery"),
        ("0A000", "cached plan must not change result type"),
        ("26000", 'prepared statement "_pg3_0" does not exist'),
        ("42P05", 'prepared statement "_pg3_0" already exists'),
    ],
)
def test_a_connection_that_leads_to_the_wrong_server_is_replaced(
    server: Database, code: str, message: str
) -> None:
    before = backend(server)

    assert outage(raised(server, code, message)) is DATABASE

    assert backend(server) != before


def test_a_connection_with_a_mistake_of_ours_is_kept(server: Database) -> None:
    before = backend(server)

    raised(server, "42601")

    assert backend(server) == before


def s3(code: str, status: int = 400) -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (s3("SlowDown", 503), STORE),
        (s3("InternalError", 500), STORE),
        (s3("AccessDenied", 403), STORE),
        (s3("403", 403), STORE),
        (s3("ExpiredToken"), STORE),
        (s3("NoSuchBucket", 404), STORE),
        (s3("PermanentRedirect", 301), STORE),
        (s3("AuthorizationHeaderMalformed"), STORE),
        (s3("MethodNotAllowed", 405), STORE),
        (s3("BadDigest"), STORE),
        (s3("XMinioStorageFull", 507), DISK),
        (s3("QuotaExceeded", 403), DISK),
        (s3("NoSuchKey", 404), None),
        (s3("404", 404), None),
        (s3("PreconditionFailed", 412), None),
        (s3("EntityTooLarge"), None),
        (EndpointConnectionError(endpoint_url="s3"), STORE),
        (IncompleteReadError(actual_bytes=1, expected_bytes=2), STORE),
        (NoCredentialsError(), STORE),
        (ResponseParserError("<html>"), STORE),
        (ParamValidationError(report="Bucket"), None),
        (StoreEmpty(), STORE),
        (BlobNotFound("a"), None),
        (OSError(errno.ENOSPC, "full"), DISK),
        (OSError(errno.EDQUOT, "quota"), DISK),
        (OSError(errno.EROFS, "read-only"), STORE),
        (OSError(errno.EMFILE, "Too many open files"), Resource.DESCRIPTORS),
        (OSError(errno.ENFILE, "Too many open files in system"), Resource.DESCRIPTORS),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Resource.MEMORY),
        (MemoryError(), Resource.MEMORY),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), Resource.NAMES),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), Resource.NAMES),
        (ConnectionResetError("cut"), STORE),
        (TimeoutError(), STORE),
        (FileNotFoundError(errno.ENOENT, "gone"), None),
        (PermissionError(errno.EACCES, "no"), None),
        (NoFreeConnection(), DATABASE),
        (OperationalError("", {}, psycopg.OperationalError("connection refused")), DATABASE),
        (OperationalError("", {}, sqlite3.OperationalError("database is locked")), DATABASE),
        (OperationalError("", {}, sqlite3.OperationalError("unable to open database file")), DATABASE),
        (OperationalError("", {}, sqlite3.OperationalError("database or disk is full")), DISK),
        (OperationalError("", {}, sqlite3.OperationalError("no such table: jobs")), None),
        (IntegrityError("", {}, sqlite3.IntegrityError("UNIQUE constraint failed")), None),
        (ValueError("a mistake"), None),
    ],
    ids=repr,
)
def test_each_error_names_the_resource_that_is_unavailable_or_none(
    error: Exception, expected: Resource | None
) -> None:
    assert outage(error) is expected
