"""A machine of a group that is not the first: keeps a launcher of ranks, one for each attempt of the first machine.

Imports no torch: it only supervises the process that does (worker/members/launcher.py).
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from worker import forking
from worker.forking import Started
from worker.heartbeat import ProgressFile

log = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0  # longer than the launcher of an ended attempt needs to close its port
LOOK_SECONDS = 1.0


def launcher_command(progress: Path) -> Sequence[str]:
    """Return the command of a launcher, which touches the file `progress`, or its ranks do, for as long as it lives."""
    return [sys.executable, "-m", "worker.members.launcher", str(os.getpid()), str(progress)]


class Member:
    """One launcher, replaced after each attempt, so that no state of a job survives.

    Args:
        limit_seconds: without a sign of life, after which a launcher is killed. It is longer than it waits for the
            other machines of a run.
        pause_seconds: between two launchers.
    """

    def __init__(
        self,
        limit_seconds: float,
        command: Callable[[Path], Sequence[str]] = launcher_command,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self.limit_seconds, self.command, self.pause_seconds = limit_seconds, command, pause_seconds
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
            try:
                with NamedTemporaryFile(prefix="regraft-member-") as file:
                    status = self._run(Path(file.name))
            except OSError as cause:  # no memory, process or descriptor is free
                log.warning("the launcher of ranks could not be started: %s; retrying", cause)
                self._stopping.wait(self.pause_seconds)
                continue
            if status is None:
                log.error(
                    "the launcher of ranks does not end, as in a driver that hangs: restart this machine"
                )
                return  # which ends this process
            if self._stopping.is_set():
                return
            if status != 0:
                log.warning("the launcher of ranks exited with status %d", status)
            self._stopping.wait(self.pause_seconds)

    def _run(self, progress: Path) -> int | None:
        """Start a launcher, and return its exit status; None: it was killed, and has not ended. Raises OSError."""
        # In its own session: this process forwards Ctrl-C of a terminal.
        child = self._child = forking.start(self.command(progress), dict(os.environ))
        if self._stopping.is_set():  # `stop` may have missed the new child
            child.send_signal(signal.SIGTERM)
        watched = ProgressFile(progress)
        while watched.still_for() <= self.limit_seconds:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(LOOK_SECONDS)
        log.warning(
            "the launcher of ranks has given no sign of life for %g s (REGRAFT_HANG_SECONDS and "
            "REGRAFT_PATIENCE_SECONDS) and is killed, with its ranks",
            self.limit_seconds,
        )
        return child.wait() if forking.kill(child) else None
