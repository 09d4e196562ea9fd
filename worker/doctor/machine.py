"""Checks of main memory, shared memory, disks and the sandbox."""

import fcntl
import os
import tempfile
from pathlib import Path

from core import private
from core.storage.disk import Disks
from core.units import GIB
from graders.sandbox import pool
from worker.doctor.check import Diagnosis, check, failed, ok, warning
from worker.doctor.host import ComputeFailed, Host

LEAST_BYTES = 2 * GIB  # of main memory: torch, a tiny model and a sandbox
LEAST_SHM = 64 << 20
SHM_OF_ENGINES = GIB  # as the chart mounts it: vLLM's processes and ranks exchange tensors there


@check("memory", "machine", remedy="raise the memory limit of the container, or end other processes")
def memory(host: Host) -> Diagnosis:
    """Main memory is free for a run: its processes, and weights on their way to the GPU."""
    free, whole = host.free_memory(), host.total_memory()
    text = f"{free / GIB:.1f} GiB free, of {whole / GIB:.1f} GiB that a job may use"
    return ok(text) if free >= LEAST_BYTES else failed(text)


@check(
    "shared memory",
    "machine",
    remedy="mount a larger /dev/shm: `docker run --shm-size=1g`, or the chart's `shm`",
)
def shared_memory(host: Host) -> Diagnosis:
    """/dev/shm has room for what engines and ranks exchange."""
    usage = host.usage(host.shm)
    text = f"{host.shm}: {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    if usage.free < LEAST_SHM:
        return failed(text)
    return ok(text) if usage.free >= SHM_OF_ENGINES or not exchanges(host) else warning(text)


def exchanges(host: Host) -> bool:
    """Whether processes of a job exchange tensors on this machine. Without torch that is a finding of other checks."""
    if host.settings.ranks * host.settings.nodes > 1:
        return True
    try:
        return len(host.torch.gpus) > 1
    except ComputeFailed:
        return False


@check(
    "disk",
    "machine",
    remedy="choose a folder of a local filesystem with free space: REGRAFT_DATA_DIR, TMPDIR",
)
def disk(host: Host) -> Diagnosis:
    """The data folder and the temporary folder can be written and locked, and have room."""
    private.make_folder(host.settings.data_dir)
    for folder in (host.settings.data_dir, Path(tempfile.gettempdir())):
        if problem := unusable(folder):
            return failed(f"{folder}: {problem}")
    if problem := Disks(host.settings).problem():
        return failed(problem)
    free = host.usage(host.settings.data_dir).free
    return ok(f"{host.settings.data_dir}: {free / GIB:.1f} GiB free, with locks")


def unusable(folder: Path) -> str | None:
    """Return why the folder cannot hold a database and checkpoints, which need both kinds of locks and renames."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as trial:
            file = Path(trial, "lock")
            with file.open("w") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fsync(opened.fileno())
            file.rename(Path(trial, "renamed"))
    except OSError as cause:
        return str(cause.strerror or cause)
    return None


@check("sandbox", "machine", remedy="docs/howto/sandbox.md says what each layer needs")
def sandbox(host: Host) -> Diagnosis:
    """python graders can be run, in their sandbox."""
    if unsafe := host.sandbox():
        return failed(f"python graders are refused: {unsafe}")
    if missing := pool.not_built(host.settings.grader_environments):
        return warning(missing, "regraft-server environments build")
    return ok(pool.described())
