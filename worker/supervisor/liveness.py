"""A heartbeat file for liveness probes, touched while every thread of the worker is alive."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

EVERY_SECONDS = 5.0


def file_in(data_dir: Path) -> Path:
    return data_dir / "worker.alive"


def touch_while_alive(file: Path, threads: Sequence[threading.Thread], stop: threading.Event) -> bool:
    """Touch `file` every few seconds until `stop`, or until one of the threads has ended. Returns whether none has.

    Threads survive an unreachable database or broker, because a restart of the worker would not fix it.
    """
    while True:
        dead = [thread.name for thread in threads if not thread.is_alive()]
        if dead and not stop.is_set():
            log.error(
                "threads exited unexpectedly: %s. The heartbeat file %s is no longer updated.",
                ", ".join(dead),
                file,
            )
            return False
        if dead:
            return True
        try:
            file.touch()
        except OSError as cause:  # a full disk; the probe sees the age of the file
            log.warning("the heartbeat file %s cannot be written: %s", file, cause)
        if stop.wait(EVERY_SECONDS):
            return True
