"""Decide whether an error is temporary (an outage), or would occur again in another try (a mistake).

Work that retries, waits, answers 503 or counts a failure asks `outage`. Loops that only repeat a statement, such as a
heartbeat, repeat it after any error of the database. The tables are here and nowhere else: SQLSTATEs of PostgreSQL,
messages of SQLite, error codes of S3, and error numbers of the system; rights of a folder are in core/storage/store.py.
What an operator can repair while work waits counts as an outage, such as rejected credentials or a missing bucket.
"""

import errno
import os
import re
import socket
import sqlite3
import ssl
import sys
from enum import StrEnum
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoFreeConnection


class Resource(StrEnum):
    """A resource that the service waits for during an outage."""

    DATABASE = "database"
    BLOB_STORE = "blob store"
    DISK = "disk"
    DESCRIPTORS = "file descriptors"
    NAMES = "name server"
    NETWORK = "network"
    MEMORY = "main memory"
    INFERENCE = "inference server"
    GRADER = "grader's server"  # of a judge model or an endpoint


class TemporarilyUnavailable(Exception):
    """Base class of errors that name the resource which is unavailable."""

    resource: Resource


def outage(error: BaseException) -> Resource | None:
    """The resource that is unavailable for a while. None: another try would fail in the same way."""
    if isinstance(error, TemporarilyUnavailable):
        return error.resource
    if isinstance(error, NoFreeConnection):
        return Resource.DATABASE
    if isinstance(error, DBAPIError):
        return _of_database(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD):
        return Resource.MEMORY
    # First S3: some errors of botocore, such as a read time-out, are an OSError without a number as well.
    if (found := _of_s3(error)) is not None:
        return found
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, IncompleteRead):
        return Resource.NETWORK
    if type(error) is RuntimeError and isinstance(error.__context__, OSError) and error.__cause__ is None:
        return _of_system(error.__context__)  # torch.save ends a file that it could not write
    return _of_text(error)


# PostgreSQL: a class (two characters) or a code of its appendix A. A code takes precedence over its class.
_SQLSTATES = {
    "08": Resource.DATABASE,  # connection exceptions
    "28": Resource.DATABASE,  # rejected credentials: they are rotated while jobs run
    "40": Resource.DATABASE,  # serialization failures and deadlocks
    "53": Resource.DATABASE,  # insufficient resources, too many connections
    "53100": Resource.DISK,
    "53200": Resource.MEMORY,
    "55": Resource.DATABASE,  # locks, objects in use
    "57": Resource.DATABASE,  # shutdown, crash, canceled statements
    "58": Resource.DATABASE,  # errors of the server's system
    "25006": Resource.DATABASE,  # read-only: a standby, or a disk that is nearly full
    "25P03": Resource.DATABASE,  # idle-in-transaction timeout
    "25P04": Resource.DATABASE,  # transaction timeout
    "26000": Resource.DATABASE,  # a pooler gave the connection another server: unknown prepared statement
    "42P05": Resource.DATABASE,  # the same: the prepared statement exists
}
# Of "feature not supported", the texts that are about the server's state: a standby, and a plan of an earlier schema.
_UNSUPPORTED, _PASSING_TEXTS = "0A000", ("recovery", "cached plan")
_ANOTHER_SERVER = {"26000", "42P05"}
# SQLite reports nearly every error as operational, a missing table included. These are the starts of its messages,
# which are not translated: a name of ours, such as of a column, may be anywhere else in one.
_SQLITE_TEXTS = {
    "database or disk is full": Resource.DISK,
    "database is locked": Resource.DATABASE,
    "database table is locked": Resource.DATABASE,
    "database schema is locked": Resource.DATABASE,
    "database is busy": Resource.DATABASE,
    "locking protocol": Resource.DATABASE,
    "disk I/O error": Resource.DATABASE,
    "unable to open database": Resource.DATABASE,
    "attempt to write a readonly database": Resource.DATABASE,
    "out of memory": Resource.MEMORY,
}
_ABSENT = re.compile("no such (?:table|column): |table .* has no column named ")


def _of_database(error: DBAPIError) -> Resource | None:
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        return next((found for text, found in _SQLITE_TEXTS.items() if str(cause).startswith(text)), None)
    code = sqlstate(error)
    found = _SQLSTATES.get(code) or _SQLSTATES.get(code[:2])
    if found is not None:
        return found
    if code == _UNSUPPORTED and any(text in str(cause) for text in _PASSING_TEXTS):
        return Resource.DATABASE
    # The client library has no code for a server that it did not reach, or whose connection broke.
    unreached = not code and isinstance(error, OperationalError)
    is_away = error.connection_invalidated or isinstance(error, InterfaceError) or unreached
    return Resource.DATABASE if is_away else None


def sqlstate(error: DBAPIError) -> str:
    """The code of an error of PostgreSQL; empty: the server did not give one."""
    return getattr(error.orig, "sqlstate", None) or ""


def lacks_schema(error: DBAPIError) -> bool:
    """Whether a table or a column does not exist: the database may have the schema of another version."""
    return sqlstate(error) in ("42P01", "42703") or (
        isinstance(error.orig, sqlite3.Error) and _ABSENT.match(str(error.orig)) is not None
    )


def spoils_connection(error: DBAPIError) -> bool:
    """Whether this connection meets the same error again, although another one may not: it must be replaced."""
    return sqlstate(error) in _ANOTHER_SERVER or leads_to_standby(error)


def leads_to_standby(error: DBAPIError) -> bool:
    """Whether the server of the connection is read-only, so that all connections to it must be replaced."""
    code = sqlstate(error)
    return code == "25006" or (code == _UNSUPPORTED and _of_database(error) is not None)


# Codes of S3 for credentials that are wrong or expired, or signed by a clock that is.
REJECTED = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
# The service may not do this. The number if the response has no body, as that of a HEAD request.
DENIED = frozenset({"AccessDenied", "403"})
# Amazon S3 is never full; others are.
_FULL = frozenset(
    {"InsufficientStorage", "XMinioStorageFull", "QuotaExceeded", "EntityTooLargeForQuota", "507"}
)
# Codes about one object or one request. All others are about the bucket, its settings or its region, the credentials
# or the load, and an operator or time repairs them; NoSuchUpload is of an upload that the store lost, and of which
# another try begins a new one.
_ABOUT_THE_OBJECT = frozenset(
    {
        "404",
        "412",
        "416",
        "EntityTooLarge",
        "EntityTooSmall",
        "InvalidObjectState",
        "InvalidRange",
        "KeyTooLongError",
        "MetadataTooLarge",
        "NoSuchKey",
        "PreconditionFailed",
    }
)


def s3_code(error: Any) -> str:
    """The code in a response of S3; that of its status if it has no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _of_s3(error: BaseException) -> Resource | None:
    if "botocore" not in sys.modules:
        return None
    from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError
    from botocore.parsers import ResponseParserError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = s3_code(error)
        if status == 507 or code in _FULL:
            return Resource.DISK
        return None if code in _ABOUT_THE_OBJECT else Resource.BLOB_STORE
    if isinstance(error, ParamValidationError):
        return None
    # No response, or one that is not S3's.
    return Resource.BLOB_STORE if isinstance(error, BotoCoreError | ResponseParserError) else None


_ERRNOS = {
    errno.ENOSPC: Resource.DISK,
    errno.EDQUOT: Resource.DISK,
    errno.EMFILE: Resource.DESCRIPTORS,
    errno.ENFILE: Resource.DESCRIPTORS,
    errno.ENOMEM: Resource.MEMORY,
    errno.EAGAIN: Resource.MEMORY,  # of a new thread or process
    errno.EIO: Resource.BLOB_STORE,
    errno.EROFS: Resource.BLOB_STORE,  # remounted after an error
    errno.ESTALE: Resource.BLOB_STORE,
    errno.ENOTCONN: Resource.BLOB_STORE,  # the process of a FUSE mount has ended
    errno.ENOLCK: Resource.BLOB_STORE,  # of NFS, while its lock manager restarts
    errno.EHOSTUNREACH: Resource.NETWORK,
    errno.ENETUNREACH: Resource.NETWORK,
    errno.EHOSTDOWN: Resource.NETWORK,
    errno.ENETDOWN: Resource.NETWORK,
    errno.ENETRESET: Resource.NETWORK,
    errno.EADDRNOTAVAIL: Resource.NETWORK,  # all ports for outgoing connections are taken
    errno.ENOBUFS: Resource.MEMORY,  # of a socket
}
# What Python says instead of EAGAIN when the system gives it no thread.
_NO_THREAD = "can't start new thread"


def _of_system(error: OSError) -> Resource | None:
    if isinstance(error, socket.gaierror):
        return Resource.NAMES
    # Those of the stores have other classes. The numbers of OpenSSL are not those of the system.
    if isinstance(error, ConnectionError | TimeoutError | ssl.SSLError):
        return Resource.NETWORK
    if error.errno is not None:
        return _ERRNOS.get(error.errno)
    if isinstance(error, FileNotFoundError):
        return _of_unopened(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return (
        None if cause is None else outage(cause)
    )  # transformers says in its own words that a file was not read


# What safetensors says of every file that it could not open, whatever the reason.
_UNOPENED = re.compile(r"No such file or directory: (.+)", re.DOTALL)


def _of_unopened(error: FileNotFoundError) -> Resource | None:
    """The resource of an error of safetensors that hides the system's own: if the file is there, open it once more."""
    path = _UNOPENED.fullmatch(str(error))
    if path is None or not Path(path[1]).exists():
        return None
    try:
        os.close(os.open(path[1], os.O_RDONLY))
    except OSError as reason:
        return _of_system(reason)
    return Resource.DESCRIPTORS  # by now it can be opened


# How Rust's standard library ends the text of an error of the system, and torch that of a file that it maps.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_TORCH_ERROR = re.compile(r"unable to (?:open|mmap|stat|allocate|resize) .*\((\d+)\)$", re.DOTALL)


def _of_text(error: BaseException) -> Resource | None:
    """The resource of an error of safetensors, tokenizers or torch, which has the error number only in its text."""
    if type(error) is RuntimeError:
        number = _TORCH_ERROR.match(str(error))
    elif type(error) is Exception or type(error).__module__.split(".")[0] in ("safetensors", "tokenizers"):
        number = _OS_ERROR.search(str(error))
    else:
        number = None
    return None if number is None else _ERRNOS.get(int(number[1]))
