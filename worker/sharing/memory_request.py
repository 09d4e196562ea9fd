"""Ask the inference process of the same machine for the memory of idle models.

A job that lacks memory touches a file, and the inference process looks at its time of change. Both have the folder, and
the name of the machine is in the name of the file: the folder may be on a volume of several machines.
"""

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from core.private import make_folder
from core.settings import Settings


@dataclass(frozen=True)
class MemoryRequest:
    """The request of any job on this machine for memory of the device."""

    file: Path

    @classmethod
    def of(cls, settings: Settings, host: str | None = None) -> Self:
        return cls(settings.data_dir.resolve() / "memory-requests" / f"memory-{host or socket.gethostname()}")

    def make(self) -> None:
        """Ask. A folder that cannot be written is none that an inference process here reads."""
        with suppress(OSError):
            make_folder(self.file.parent)
            self.file.touch(mode=0o600)

    def last(self) -> int:
        """When it was made last, in nanoseconds; 0: never."""
        try:
            return self.file.stat().st_mtime_ns
        except OSError:
            return 0


class MemoryRequests:
    """Sees each request once; not those before it began to read."""

    def __init__(self, request: MemoryRequest) -> None:
        self._request, self._seen = request, request.last()

    def is_new(self) -> bool:
        last = self._request.last()
        is_new, self._seen = last != self._seen, last
        return is_new
