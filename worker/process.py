"""Conventions between a process and its child: exit statuses, environment, and that the child dies with its parent."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DONE = 0
ENDED = 70  # between rank 0 and its launcher: done, and the launcher ends the other ranks as after any other status
FAILED = 1  # as for any exception; the run has logged the reason
UNSTARTED = 71  # EX_OSERR: the machine lacks what a new process needs; it is queued again at no cost
DRAINED = 75  # EX_TEMPFAIL: checkpointed, to be queued again at no cost
ROLLED_BACK = 83  # the job continues from an earlier checkpoint: queued again at no cost
LOST = 76  # lost the lease; nothing to record
HUNG = 77  # not an exit status: set by the supervisor when it kills a run without progress
PUT_OFF = 79  # this worker cannot run the job; it is queued again, with the reason
RESTS = 81  # as PUT_OFF, and this worker could not run other jobs either for now
GPU_UNUSABLE = 82  # as RESTS, and only an operator can help, so the worker ends after some in a row
ALONE = 80  # the job does not fit beside others, and the run has logged why; this worker runs it alone next
USER_MISTAKE = 78  # EX_CONFIG: the job has failed permanently, with the reason
# Any other status is an infrastructure failure: the supervisor requeues the job a limited number of times.

# A process inside a hung driver ends at no signal.
KILLED_SECONDS = 5.0

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_FORKED_BY = "REGRAFT_FORKED_BY"


def run_within(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """Run a command without input. None: it has not finished in time; it is killed, and left alone if it does not end.

    `subprocess.run` waits for the end of what it kills, which a process inside a hung driver never reaches.
    """
    running = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stdout, stderr = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.kill()
        with suppress(subprocess.TimeoutExpired):
            running.wait(KILLED_SECONDS)
        for pipe in (running.stdout, running.stderr):
            if pipe is not None:
                pipe.close()
        return None
    return subprocess.CompletedProcess(command, running.returncode, stdout, stderr)


@dataclass(frozen=True)
class DeviceSockets:
    """The sockets of jobs that share a device, in a folder of their worker."""

    folder: Path

    @property
    def base(self) -> Path:
        """Of the process that holds the base model (worker/sharing/holder.py)."""
        return self.folder / "base"

    @property
    def turns(self) -> Path:
        """Of the worker, which gives turns (worker/supervisor/turn_server.py)."""
        return self.folder / "turns"


def figures_of(progress: Path) -> Path:
    """Return the metrics file of a run (worker/instruments.py), next to its progress file."""
    return progress.with_name(f"{progress.name}.prom")


def now_of(progress: Path) -> Path:
    """Return the file of what a run is doing (worker/progress.py), next to its progress file."""
    return progress.with_name(f"{progress.name}.now")


def unfinished(file: Path) -> Path:
    """Return the file that is written first and then takes the place of `file`."""
    return file.with_name(f"{file.name}.new")


def quiet_environment() -> dict[str, str]:
    """This process's environment for one whose output is a log: no progress bars, unless the operator asks for them.

    The libraries read these variables when they are imported.
    """
    return {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries without the garbage collector, whose passes take a quarter of that time.

    Later passes leave out the imported objects too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def name_this(name: str) -> None:
    """Show this process as `name`, of which the kernel keeps 15 bytes, in `ps -o comm` and `top` (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def forked_by(server: int, parent: int) -> None:
    """Say in a process that worker/fork_server.py has forked that the server dies with the worker, `parent`.

    In the environment, so that it holds after an exec, too.
    """
    os.environ[_FORKED_BY] = f"{server} {parent}"
    die_with_parent(server)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere the lease's end does it later).

    The parent may have died before we asked, so its number is compared afterwards. A process that was forked for the
    parent is the child of a fork server that dies with it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        return
    if os.environ.get(_FORKED_BY) != f"{os.getppid()} {parent}":
        os._exit(DRAINED)
