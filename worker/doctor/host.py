"""The machine that the checks read. Tests give them another one.

Imports no torch: child processes do, so a check that crashes ends its own process only.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from core.jobs.devices import gpu_sign
from core.registry import Device
from core.settings import Settings
from graders.sandbox import pool
from worker import forking, main_memory
from worker.device import TORCH_SECONDS, CudaState, driver_version, not_finished, select_device
from worker.packages import version_of
from worker.process import KILLED_SECONDS, quiet_environment, run_within

COMPUTE_SECONDS = 300.0  # of one child; on a GPU its first kernels are compiled
COMMAND_SECONDS = 10.0


@dataclass(frozen=True)
class GpuState:
    """A GPU as torch sees it."""

    name: str
    capability: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class TorchState:
    """CUDA, GPUs and headers, as a process with torch reports them."""

    cuda: CudaState
    gpus: tuple[GpuState, ...]
    has_headers: bool  # Python's C headers are installed


class ComputeFailed(Exception):
    """A child process that computes has failed. Says its last line."""


class Children:
    """The processes that compute. They are forked from one that has imported torch and what they need, once."""

    def __init__(self) -> None:
        self._server = forking.ForkServer("worker.doctor.compute")

    def ask(self, part: str, device: Device) -> Mapping[str, Any]:
        """Run a part of worker/doctor/compute.py and return what it has found.

        Raises:
            ComputeFailed: it has exited with an error, or taken too long.
        """
        with tempfile.TemporaryDirectory(prefix="regraft-doctor-") as folder:
            answer, log = Path(folder, "answer"), Path(folder, "log")
            words = [str(os.getpid()), part, str(answer), device]
            command = [sys.executable, "-m", "worker.doctor.compute", *words]
            with log.open("wb") as stderr:
                child = forking.start(command, quiet_environment(), stderr=stderr, server=self._server)
            try:
                status = child.wait(COMPUTE_SECONDS)
            except subprocess.TimeoutExpired as cause:
                child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(KILLED_SECONDS)
                raise ComputeFailed(f"not finished after {COMPUTE_SECONDS:.0f} s") from cause
            if status:
                raise ComputeFailed(last_line(log.read_text(errors="replace")) or f"exit status {status}")
            found: dict[str, Any] = json.loads(answer.read_text())
            return found


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def torch_state(
    command: Sequence[str] = (sys.executable, "-m", "worker.doctor.torch_state"),
    seconds: float = TORCH_SECONDS,
) -> TorchState:
    """Raises ComputeFailed: torch cannot be imported, or hangs with the driver."""
    done = run_within(command, seconds)
    if done is None:
        raise ComputeFailed(not_finished(seconds))
    if done.returncode:
        raise ComputeFailed(last_line(done.stderr))
    said = json.loads(done.stdout.splitlines()[-1])
    return TorchState(
        CudaState(**said["cuda"]), tuple(GpuState(**gpu) for gpu in said["gpus"]), said["has_headers"]
    )


def output_of(command: Sequence[str]) -> str | None:
    """Return the output of a command. None: it is not installed, fails, or hangs as `nvidia-smi` of a failed driver."""
    try:
        done = run_within(command, COMMAND_SECONDS)
    except OSError:
        return None
    return None if done is None or done.returncode else done.stdout


def requirement_of(package: str, on: str) -> Requirement | None:
    """What an installed package requires of another one here. None: nothing."""
    try:
        found = [Requirement(text) for text in requires(package) or ()]
    except PackageNotFoundError:
        return None
    return next(
        (r for r in found if r.name == on and (r.marker is None or r.marker.evaluate({"extra": ""}))), None
    )


class DiskUsage(NamedTuple):
    """Of the filesystem of a folder, in bytes."""

    total: int
    used: int
    free: int


def disk_usage(folder: Path) -> DiskUsage:
    return DiskUsage(*shutil.disk_usage(folder))


@dataclass
class Host:
    settings: Settings
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    sign: Callable[[], str | None] = gpu_sign
    driver: Callable[[], str | None] = driver_version
    state: Callable[[], TorchState] = torch_state
    compute: Callable[[str, Device], Mapping[str, Any]] = field(default_factory=lambda: Children().ask)
    which: Callable[[str], str | None] = shutil.which
    output: Callable[[Sequence[str]], str | None] = output_of
    version: Callable[[str], str | None] = version_of
    requirement: Callable[[str, str], Requirement | None] = requirement_of
    shm: Path = Path("/dev/shm")
    usage: Callable[[Path], DiskUsage] = disk_usage
    sandbox: Callable[[], str] = pool.refusal
    clock: Callable[[], float] = time.time
    free_memory: Callable[[], int] = main_memory.available
    total_memory: Callable[[], int] = main_memory.capacity

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._torch: TorchState | ComputeFailed | None = None

    @property
    def torch(self) -> TorchState:
        """Asked once. Raises ComputeFailed."""
        with self._lock:
            if self._torch is None:
                try:
                    self._torch = self.state()
                except ComputeFailed as cause:
                    self._torch = cause
            if isinstance(self._torch, ComputeFailed):
                raise self._torch
            return self._torch

    def device(self) -> Device:
        """Raises GpuUnusable, ComputeFailed."""
        return select_device(
            self.settings, lambda: self.torch.cuda, self.sign, self.driver, environ=self.environ
        )
