"""The one package that a wheel of the service installs.

Packages named `api`, `core` or `worker` would collide with those of a user's environment. A wheel therefore has them in
this folder (pyproject.toml), and `main` puts the folder on the path of this process and of those that it starts. In a
checkout they are beside it.
"""

import os
import signal
import sys
import threading
from pathlib import Path

INSIDE = Path(__file__).parent
# SIGTERM has come before `worker --jobs` handles it itself. The kernel drops a signal to process 1 of a container that
# has no handler, and the pod would claim a job after it.
TERMINATED = threading.Event()


def main() -> int:
    """`regraft-server`: run one command and return its exit code."""
    if "--jobs" in sys.argv:
        signal.signal(signal.SIGTERM, lambda number, frame: TERMINATED.set())
    if (INSIDE / "worker").is_dir():
        use(INSIDE)
    from worker.cli import main as command

    return command()


def use(folder: Path) -> None:
    """Import from the folder before any other, also in processes that this one starts with its environment."""
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else str(folder)
