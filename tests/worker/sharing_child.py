"""`python -m tests.worker.sharing_child PARENT PROGRESS`: worker.child, killed in the second step of a job's first run.

It is the job with the suffix "killed". A file in the data folder says that it has happened.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker import assemble as real
from worker import child


def assemble(attempt: Any, spec: Any, grader: Any, settings: Any, *others: Any) -> Any:
    scratch, stop_requested, beat, world = others
    if attempt.job.suffix == "killed":
        stop_requested = killed_in_the_second_step(settings.data_dir / "killed", stop_requested)
    return real.assemble(attempt, spec, grader, settings, scratch, stop_requested, beat, world)


def killed_in_the_second_step(mark: Path, stop_requested: Callable[[], bool]) -> Callable[[], bool]:
    """A run asks at the end of each step, before it writes a checkpoint."""
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return stop_requested()

    return ask


if __name__ == "__main__":
    sys.exit(child.main(assemble))
