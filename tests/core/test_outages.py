"""The tables that decide whether an error passes by itself, tried on what real servers and libraries raise."""

import errno
import os
import shutil
import socket
import sqlite3
import ssl
from collections.abc import Callable, Iterator
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import psycopg
import pytest
import torch
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
)
from botocore.parsers import ResponseParserError
from peft import load_peft_weights
from safetensors import SafetensorError
from safetensors.torch import load_file
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as NoFreeConnection

from core import model_templates
from core.database.engine import Database
from core.outages import Resource, outage
from core.registry import BaseModelEntry
from core.scratch import scratch_folder
from core.storage.store import BlobExists, BlobNotFound, NotTheStore, StoreEmpty, WriteNotFound
from tests.descriptors import no_free_descriptor
from tests.servers import Postgres
from tests.tiny import make_tiny_model
from worker.model.capacity import config_of
from worker.model.policy import generation_config_of, load_weights, reading
from worker.refusals import MachineLacks, starting_later
from worker.training.trainable_weights import save_state

DATABASE, STORE, DISK = Resource.DATABASE, Resource.BLOB_STORE, Resource.DISK
NETWORK = Resource.NETWORK
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
        (s3("NoSuchUpload", 404), STORE),
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
        (BlobExists("a"), None),
        (WriteNotFound("a"), STORE),
        (NotTheStore("a", "ETag"), STORE),
        (OSError(errno.ENOSPC, "full"), DISK),
        (OSError(errno.EDQUOT, "quota"), DISK),
        (OSError(errno.EROFS, "read-only"), STORE),
        (OSError(errno.EMFILE, "Too many open files"), Resource.DESCRIPTORS),
        (OSError(errno.ENFILE, "Too many open files in system"), Resource.DESCRIPTORS),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Resource.MEMORY),
        (MemoryError(), Resource.MEMORY),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), Resource.NAMES),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), Resource.NAMES),
        (ConnectionResetError("cut"), NETWORK),
        (TimeoutError(), NETWORK),
        (IncompleteRead(b"ha", 2), NETWORK),
        (ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol"), NETWORK),
        (ssl.SSLError(ssl.SSL_ERROR_SYSCALL, "some I/O error occurred"), NETWORK),
        (ssl.SSLCertVerificationError(1, "certificate verify failed: certificate has expired"), NETWORK),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), NETWORK),
        (OSError(errno.ENETDOWN, "Network is down"), NETWORK),
        (OSError(errno.EHOSTDOWN, "Host is down"), NETWORK),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), NETWORK),
        (OSError(errno.ENOBUFS, "No buffer space available"), Resource.MEMORY),
        (OSError(errno.ENOLCK, "No locks available"), STORE),
        (RuntimeError("can't start new thread"), Resource.MEMORY),
        (RuntimeError("another"), None),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), Resource.MEMORY),
        (FileNotFoundError(errno.ENOENT, "gone"), None),
        (PermissionError(errno.EACCES, "no"), None),
        (NoFreeConnection(), DATABASE),
        (OperationalError("", {}, psycopg.OperationalError("connection refused")), DATABASE),
        (OperationalError("", {}, sqlite3.OperationalError("database is locked")), DATABASE),
        (OperationalError("", {}, sqlite3.OperationalError("unable to open database file")), DATABASE),
        (OperationalError("", {}, sqlite3.OperationalError("database or disk is full")), DISK),
        (OperationalError("", {}, sqlite3.OperationalError("no such table: jobs")), None),
        (OperationalError("", {}, sqlite3.OperationalError("no such column: full_rows_locked")), None),
        (IntegrityError("", {}, sqlite3.IntegrityError("CHECK constraint failed: is_full")), None),
        (IntegrityError("", {}, sqlite3.IntegrityError("UNIQUE constraint failed")), None),
        (ValueError("a mistake"), None),
    ],
    ids=repr,
)
def test_each_error_names_the_resource_that_is_unavailable_or_none(
    error: Exception, expected: Resource | None
) -> None:
    assert outage(error) is expected


def test_a_full_disk_is_an_outage_in_the_words_of_every_library_that_writes_weights() -> None:
    """safetensors and tokenizers are written in Rust, and have the number in the text of their own exceptions."""
    text = "Error while serializing: I/O error: No space left on device (os error 28)"

    assert [outage(kind(text)) for kind in (SafetensorError, Exception)] == [DISK, DISK]
    assert outage(SafetensorError("Error while deserializing header: header too small")) is None
    assert outage(ValueError(text)) is None, "an error whose message contains such a number is no outage"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device is always full here")
def test_the_state_of_a_trainer_that_meets_a_full_disk_is_an_outage(tmp_path: Path) -> None:
    full = tmp_path / "trainer.pt"
    full.symlink_to("/dev/full")

    with pytest.raises((RuntimeError, OSError), match=r"No space|unexpected pos") as error:
        save_state({"weight": torch.zeros(100_000)}, full)

    assert outage(error.value) is DISK


def load_the_file(folder: Path) -> object:
    return load_file(folder / "model.safetensors")


def load_the_model(folder: Path) -> object:
    return load_weights(BaseModelEntry(path=folder, dtype="float32", context=128), folder, "cpu")


def load_an_adapter(folder: Path) -> object:
    file = folder / "adapter_model.safetensors"
    if not file.exists():
        shutil.copy(folder / "model.safetensors", file)
    return load_peft_weights(str(folder), device="cpu")


@pytest.mark.parametrize("free", [0, 1])
@pytest.mark.parametrize("load", [load_the_file, load_the_model, load_an_adapter])
def test_a_model_that_is_read_without_free_descriptors_is_not_to_blame(
    load: Callable[[Path], object], free: int, tmp_path: Path
) -> None:
    """safetensors says that a file does not exist, whatever kept it from opening it; torch maps the file anew."""
    folder = make_tiny_model(tmp_path / "tiny")
    load(folder)  # and so imports what it needs

    with pytest.raises((OSError, RuntimeError)) as error, no_free_descriptor(but=free):
        load(folder)

    assert outage(error.value) is Resource.DESCRIPTORS


def test_a_model_whose_files_cannot_be_read_for_a_moment_does_not_get_other_stop_tokens_or_another_template(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    for read in (
        lambda: generation_config_of(folder),
        lambda: model_templates.files_of(BaseModelEntry(path=folder), tmp_path),
        lambda: config_of(BaseModelEntry(path=folder)),
    ):
        assert read() is not None
        with pytest.raises(OSError, match="Too many open files") as error, no_free_descriptor():
            read()
        assert outage(error.value) is Resource.DESCRIPTORS


def test_a_file_that_does_not_exist_is_no_outage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        load_file(tmp_path / "model.safetensors")

    assert outage(error.value) is None


def test_an_error_without_a_number_is_what_led_to_it() -> None:
    error = OSError("Can't load the configuration")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")

    assert outage(error) is DISK


def test_a_full_disk_is_no_fault_of_the_model_that_is_converted(tmp_path: Path) -> None:
    full = SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(MachineLacks), starting_later(), reading(tmp_path, "GGUF file"):
        raise full


def test_a_scratch_folder_does_not_outlast_an_error_or_a_killed_process(tmp_path: Path) -> None:
    killed, busy = tmp_path / ".part-killed", tmp_path / ".part-busy"
    for folder in (killed, busy):
        folder.mkdir()
    os.utime(killed, (0.0, 0.0))

    def convert() -> None:
        with scratch_folder(tmp_path) as scratch:
            (scratch / "model.safetensors").touch()
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        convert()

    assert list(tmp_path.iterdir()) == [busy]
