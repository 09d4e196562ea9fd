"""What a process and its child agree on: exit statuses, environment, and that the child never outlives its parent."""

import ctypes
import os
import signal
import sys
from pathlib import Path

DONE = 0
FAILED = 1  # as of any exception; the run has said in words what is missing
DRAINED = 75  # EX_TEMPFAIL: checkpointed, to be queued again at no cost
LOST = 76  # the job is no longer this run's; there is nothing to write
HUNG = 77  # never the child's own: the supervisor's word for a run that it killed because it got nowhere
PUT_OFF = 79  # this worker cannot run the job; it is queued again, and says why
USER_MISTAKE = 78  # EX_CONFIG: the job has failed for good, and says why
# Anything else is the infrastructure's fault: the supervisor queues the job again, a limited number of times.

_PR_SET_PDEATHSIG = 1


def figures_of(progress: Path) -> Path:
    """Where a run writes what it counts (worker/observed.py): beside the file by which it shows its progress."""
    return progress.with_name(f"{progress.name}.prom")


def quiet_environment() -> dict[str, str]:
    """This process's environment for one whose output is a log: no progress bars, unless the operator asks for them.

    The libraries read these variables when they are imported.
    """
    return {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere the lease's end does it later).

    The parent may have died before we asked, so its number is compared afterwards.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(DRAINED)
