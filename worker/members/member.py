"""A machine of a group that is not the first: keeps a launcher of ranks, one for each attempt of the first machine.

Imports no torch: it only supervises the process that does (worker/members/launcher.py).
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from worker import forking
from worker.forking import Started

log = logging.getLogger(__name__)

RESTART_SECONDS = 2.0  # longer than the launcher of an ended attempt needs to close its port


def launcher_command() -> Sequence[str]:
    return [sys.executable, "-m", "worker.members.launcher", str(os.getpid())]


class Member:
    """One launcher, replaced after each attempt, so that no state of a job survives."""

    def __init__(self, command: Callable[[], Sequence[str]] = launcher_command) -> None:
        self.command = command
        self._stopping = threading.Event()
        self._child: Started | None = None
        self.thread = threading.Thread(target=self._keep, name="member", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Stop without blocking. A launcher that waits for a run exits at once, one in a run with the run."""
        self._stopping.set()
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def _keep(self) -> None:
        while not self._stopping.is_set():
            # In its own session: this process forwards Ctrl-C of a terminal.
            try:
                self._child = forking.start(self.command(), dict(os.environ))
            except OSError as cause:  # no memory, process or descriptor is free
                log.warning("the launcher of ranks could not be started: %s; retrying", cause)
                self._stopping.wait(RESTART_SECONDS)
                continue
            if self._stopping.is_set():  # `stop` may have missed the new child
                self._child.send_signal(signal.SIGTERM)
            status = self._child.wait()
            if self._stopping.is_set():
                return
            if status != 0:
                log.warning("the launcher of ranks exited with status %d", status)
            self._stopping.wait(RESTART_SECONDS)
