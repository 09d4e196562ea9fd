"""What a run that is under way has logged so far, put where the job's owner can read it (core/joblogs.py)."""

import os
import threading
from collections.abc import Callable
from typing import IO

from core import joblogs, logs


class LiveLog:
    """Hands the end of a growing log to `put` every so often, if there is more of it.

    In a thread of its own: a store that hangs holds up neither the run nor its lease. `put` must not raise.
    """

    def __init__(self, log: IO[bytes], put: Callable[[str], None], every_seconds: float) -> None:
        # A descriptor of its own: the other is closed with the run, and its number may then be another file's.
        self._file = os.dup(log.fileno())
        self._put = put
        self._every_seconds = every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more. What has begun goes on."""
        self._over.set()

    def join(self) -> None:
        """Wait for that, so that nothing comes after a last put of the caller's own."""
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
    """The last MOST_BYTES of an open file, without terminal codes. By pread: who writes it shares its offset."""
    size = os.fstat(file).st_size
    end = os.pread(file, joblogs.MOST_BYTES, max(0, size - joblogs.MOST_BYTES))
    return logs.cleaned(end.decode(errors="replace"))
