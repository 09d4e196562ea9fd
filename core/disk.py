"""Room for the database and the blobs: whether an error says that there is none, and how much is left."""

import errno
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from prometheus_client import Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from core.metrics import COUNTED
from core.settings import Settings

REFUSALS = Counter(
    "regraft_storage_refusals",
    "Requests that failed because the database or the blob store was full.",
    registry=COUNTED,
)

_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_PG_DISK_FULL = "53100"
# What S3 look-alikes say; Amazon's has no end.
_FULL_CODES = {"InsufficientStorage", "XMinioStorageFull", "QuotaExceeded", "EntityTooLargeForQuota"}


def is_full(error: BaseException) -> bool:
    """Whether the error says that there is no room: of a folder, of SQLite, of PostgreSQL or of S3."""
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    if isinstance(error, DBAPIError):
        if isinstance(error.orig, sqlite3.Error):
            return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL or (
                "disk is full" in str(error.orig)
            )
        return getattr(error.orig, "sqlstate", None) == _PG_DISK_FULL
    answer: dict[str, Any] = getattr(error, "response", None) or {}  # botocore's ClientError
    if not isinstance(answer, dict):
        return False
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status == 507 or answer.get("Error", {}).get("Code") in _FULL_CODES


def folders(settings: Settings) -> dict[str, Path]:
    """Which folders of this machine hold the database and the blobs; none of a store that is elsewhere."""
    found = {}
    url = make_url(settings.database)
    if url.get_backend_name() == "sqlite" and url.database:
        found["database"] = Path(url.database).parent
    if "://" not in settings.blobs:
        found["blobs"] = Path(settings.blobs)
    elif (parts := urlsplit(settings.blobs)).scheme == "file":
        found["blobs"] = Path(unquote(parts.path))
    return found


class Disks:
    """How much room the local stores have. `least` bytes free are enough."""

    def __init__(self, settings: Settings) -> None:
        self._folders = folders(settings)
        self.least = settings.min_free_bytes

    def problem(self) -> str | None:
        """Which store has less room than it needs; None if all have enough."""
        for store, (free, _) in self._room().items():
            if free < self.least:
                return f"The disk of the {store} has {free} bytes left, fewer than {self.least}."
        return None

    def collect(self) -> Iterable[Metric]:
        free = GaugeMetricFamily(
            "regraft_storage_free_bytes", "Room left on the disk of a local store.", labels=["store"]
        )
        total = GaugeMetricFamily("regraft_storage_total_bytes", "Size of that disk.", labels=["store"])
        for store, (left, size) in self._room().items():
            free.add_metric([store], left)
            total.add_metric([store], size)
        return [free, total]

    def _room(self) -> dict[str, tuple[int, int]]:
        room = {}
        for store, folder in self._folders.items():
            there = next((one for one in (folder, *folder.parents) if one.exists()), None)
            if there is not None:  # it is made with the first blob
                usage = shutil.disk_usage(there)
                room[store] = usage.free, usage.total
        return room
