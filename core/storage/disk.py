"""Free disk space of the database and the blobs."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import make_url

from core.outages import Resource, outage
from core.settings import Settings
from core.telemetry.metrics import COUNTED
from core.units import GIB


class Refusals:
    """How often this process met a disk, a database or a blob store that was full, as a metric."""

    count = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def collect(self) -> Iterable[Metric]:
        text = (
            "Requests, and waits of a worker's work, because a disk, the database or the blob store was full."
        )
        yield CounterMetricFamily(self._name, text, Refusals.count)


COUNTED.register(Refusals("regraft_storage_refusals"))


def count_refusal(resource: Resource | None) -> None:
    """Count an outage where it happens, if it is one of a full disk."""
    Refusals.count += resource is Resource.DISK


def folders(settings: Settings) -> dict[str, Path]:
    """The local folders of the database and the blobs; none for remote stores."""
    found = {}
    url = make_url(settings.database)
    if url.get_backend_name() == "sqlite" and url.database:
        found["database"] = Path(url.database).parent
    if "://" not in settings.blobs:
        found["blobs"] = Path(settings.blobs)
    elif (parts := urlsplit(settings.blobs)).scheme == "file":
        found["blobs"] = Path(unquote(parts.path))
    return found


class NoRoom(OSError):
    """A file that is written does not fit on its disk now. The message has the sizes, and no path."""

    def __init__(self, cause: OSError, folder: Path, setting: str, needed: int | None) -> None:
        usage = shutil.disk_usage(_existing(folder) or Path("/"))
        self.is_too_large = needed is not None and needed > usage.total
        files = "The files" if needed is None else f"Files of {needed / GIB:.1f} GiB"
        super().__init__(
            cause.errno,
            f"{files} do not fit on the worker's disk of {usage.total / GIB:.1f} GiB, of which "
            f"{usage.free / GIB:.1f} GiB are free. Have the operator free space or set {setting} to a larger disk.",
        )

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def writing_to(folder: Path, setting: str, needed: int | None = None) -> Iterator[None]:
    """Raise a full disk as NoRoom.

    Args:
        setting: that decides which disk has `folder`.
        needed: the bytes of all files; None: unknown.
    """
    try:
        yield
    except OSError as cause:
        if outage(cause) is not Resource.DISK or isinstance(cause, NoRoom):
            raise
        raise NoRoom(cause, folder, setting, needed) from cause


def require_room(folder: Path, setting: str, needed: int) -> None:
    """Raise NoRoom if files of `needed` bytes do not fit on the disk of `folder`, as `writing_to` describes them."""
    usage = shutil.disk_usage(_existing(folder) or Path("/"))
    if needed > usage.free:
        raise NoRoom(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder, setting, needed)


class Disks:
    """Free space of the local stores. `least` is the minimum in bytes."""

    def __init__(self, settings: Settings) -> None:
        self._folders = folders(settings)
        self.least = settings.min_free_bytes

    def problem(self) -> str | None:
        """Describe the store with too little free space; None if all have enough."""
        for store, (free, _) in self._room().items():
            if free < self.least:
                return f"The disk of the {store} has {free} bytes left, fewer than {self.least}."
        return None

    def collect(self) -> Iterable[Metric]:
        free = GaugeMetricFamily(
            "regraft_storage_free_bytes", "Free bytes on the disk of a local store.", labels=["store"]
        )
        total = GaugeMetricFamily(
            "regraft_storage_total_bytes", "Total bytes of the disk of a local store.", labels=["store"]
        )
        for store, (left, size) in self._room().items():
            free.add_metric([store], left)
            total.add_metric([store], size)
        return [free, total]

    def _room(self) -> dict[str, tuple[int, int]]:
        room = {}
        for store, folder in self._folders.items():
            if (there := _existing(folder)) is not None:  # created with the first blob
                usage = shutil.disk_usage(there)
                room[store] = usage.free, usage.total
        return room


def _existing(folder: Path) -> Path | None:
    """The folder, or the nearest one above it that exists."""
    return next((one for one in (folder, *folder.parents) if one.exists()), None)
