"""All weights of a policy as files, for the vLLM engines of its job.

The files lose their names as soon as they are written. Engines open them as /proc/PID/fd/N, an engine that is restarted
later too. The kernel removes them with the next weights or with this process, however it ends.
"""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from graders.sandbox import folders
from worker.model import memory

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "regraft-weights-"


class WholeWeights(Protocol):
    """A policy all of whose weights are trained (worker/model/full.py)."""

    @property
    def weights_version(self) -> int:
        """Differs whenever the weights may have changed. At least 1."""
        ...

    def write_weights(self, folder: Path) -> None:
        """Write them as safetensors files, by the names that transformers saves them under."""
        ...


class PublishedWeights:
    """The weights of a policy as they were when `publish` was last called."""

    def __init__(self, policy: WholeWeights, parent: str | None = None) -> None:
        """`parent`: the folder that they are written in; default: that of temporary files."""
        self.version = 0  # none yet
        self._policy = policy
        self._parent = parent
        self._files = ExitStack()
        self.paths: tuple[str, ...] = ()

    def publish(self) -> None:
        """Write the current weights, unless they are the published ones."""
        version = self._policy.weights_version
        if version == self.version:
            return
        self.close()
        with folders.private(PREFIX, self._parent) as folder:
            self._policy.write_weights(folder)
            files = [self._files.enter_context(file.open("rb")) for file in sorted(folder.iterdir())]
        self.paths = tuple(f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files)
        self.version = version

    def close(self) -> None:
        """Remove the files."""
        self._files.close()
        self.version, self.paths = 0, ()


def parent_for(size: int, device: str, reserved: int = 0, shared: Path = SHARED_MEMORY) -> str | None:
    """Return the folder for files of `size` bytes together: /dev/shm beside a GPU where both it and main memory have
    room for twice as much, or else None, the folder of temporary files.

    Args:
        reserved: bytes of main memory that others are going to take.
    """
    if device == "cpu" or not shared.is_dir():
        return None
    has_room = min(shutil.disk_usage(shared).free, memory.available("cpu") - reserved) >= 2 * size
    return str(shared) if has_room else None
