"""Upload the log of a running job, for its owner to read (core/jobs/run_logs.py)."""

import errno
import os
import threading
from collections.abc import Callable
from typing import IO

from core.jobs import run_logs
from core.telemetry import logs


class LiveLog:
    """Passes the end of a growing log to `put` periodically, if it has grown.

    Uses its own thread, so that a store that hangs blocks neither the run nor its lease. `put` must not raise.
    """

    def __init__(self, log: IO[bytes], put: Callable[[str], None], every_seconds: float) -> None:
        """Start. Raises OSError: no descriptor or thread is free."""
        # Own descriptor: the run closes the other one, and its number may be reused for another file.
        self._file = os.dup(log.fileno())
        self._put = put
        self._every_seconds = every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as cause:  # of Python, for any reason of the system
            os.close(self._file)
            raise OSError(errno.EAGAIN, str(cause)) from cause

    def stop(self) -> None:
        """Stop scheduling uploads; one in flight completes."""
        self._over.set()

    def join(self) -> None:
        """Wait for the upload in flight, so that the caller's own last upload is final."""
        self._thread.join()

    def _follow(self) -> None:
        told = 0
        try:
            while not self._over.wait(self._every_seconds):
                size = os.fstat(self._file).st_size
                if size != told:
                    self._put(end_of(self._file))
                    told = size
        finally:
            os.close(self._file)


def end_of(file: int) -> str:
    """The last MAX_BYTES of an open file, without terminal codes. Uses pread, because the writer shares its offset."""
    size = os.fstat(file).st_size
    end = os.pread(file, run_logs.MAX_BYTES, max(0, size - run_logs.MAX_BYTES))
    return logs.cleaned(end.decode(errors="replace"))
