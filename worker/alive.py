"""A file that a probe looks at: fresh as long as every thread of the worker is at work."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

EVERY_SECONDS = 5.0


def file_in(data_dir: Path) -> Path:
    return data_dir / "worker.alive"


def tell(file: Path, threads: Sequence[threading.Thread], stop: threading.Event) -> None:
    """Touch `file` every few seconds until `stop`, or until one of the threads has ended.

    A database or broker that is away ends no thread: starting the worker anew would not bring it back.
    """
    while True:
        dead = [thread.name for thread in threads if not thread.is_alive()]
        if dead and not stop.is_set():
            log.error("ended without being asked to: %s. Probes of %s will notice.", ", ".join(dead), file)
        if dead:
            return
        file.touch()
        if stop.wait(EVERY_SECONDS):
            return
