"""Select the device that this machine computes on. A GPU that is there and cannot be used is an error by name.

    python -m worker.device

prints the error, if there is one, for processes that do not import torch.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from core.jobs.devices import gpu_sign
from core.registry import Device
from core.settings import Settings
from worker.process import run_within

# The first driver of each CUDA version (CUDA's release notes, minor version compatibility).
NEEDED_DRIVERS = {"11": 450, "12": 525, "13": 580}
DRIVER_FILE = Path("/proc/driver/nvidia/version")
PAGE = "docs/howto/doctor.md"
TORCH_SECONDS = 60.0  # of a process that imports torch and initializes CUDA


class GpuUnusable(Exception):
    """This machine has a GPU that torch cannot use. Says why, and what to do."""


@dataclass(frozen=True)
class CudaState:
    """What torch says of CUDA."""

    is_available: bool
    torch: str  # its version
    runtime: str | None  # the CUDA version that it was built for; None: a build for CPUs
    error: str = ""  # of the initialization


def cuda_state() -> CudaState:
    import torch

    error = ""
    if torch.version.cuda and not torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as cause:
            error = str(cause).strip().partition("\n")[0]
    return CudaState(torch.cuda.is_available(), torch.__version__, torch.version.cuda, error)


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """The version of NVIDIA's kernel module, such as 580.95.05. None: it is not loaded, or not visible here."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text())
    except OSError:
        return None
    return found and found[0]


def needed_driver(runtime: str | None) -> int | None:
    """The oldest driver branch for a CUDA version, such as 580 for 13.0. None: unknown."""
    return NEEDED_DRIVERS.get((runtime or "").partition(".")[0])


def is_too_old(driver: str, runtime: str | None) -> bool:
    """Whether the driver is older than the CUDA version needs."""
    needed = needed_driver(runtime)
    return needed is not None and int(driver.partition(".")[0]) < needed


def select_device(
    settings: Settings,
    cuda: Callable[[], CudaState] = cuda_state,
    sign: Callable[[], str | None] = gpu_sign,
    driver: Callable[[], str | None] = driver_version,
    environ: Mapping[str, str] = os.environ,
) -> Device:
    """Return the device that models are computed on. The only place that chooses one.

    Args:
        sign: returns what shows that this machine has a GPU.

    Raises:
        GpuUnusable: there is a GPU, or REGRAFT_DEVICE=cuda expects one, and torch cannot use it.
    """
    if settings.device == "cpu":
        return "cpu"
    state = cuda()
    if state.is_available:
        return "cuda"
    found = sign()
    if found is None and settings.device == "auto":
        return "cpu"
    where = (
        f"This machine has a GPU ({found}), but none"
        if found
        else "REGRAFT_DEVICE is cuda, and there is no GPU"
    )
    raise GpuUnusable(
        f"{where} that torch can use: {why_unusable(state, driver(), environ)}. To compute on the CPU, set "
        f"REGRAFT_DEVICE=cpu. `regraft-server doctor` checks more: {PAGE}."
    )


def why_unusable(state: CudaState, driver: str | None, environ: Mapping[str, str]) -> str:
    """Why torch finds no GPU, and the remedy, without a full stop."""
    if state.runtime is None:
        return f"torch {state.torch} is a build for CPUs; install constraints/gpu.txt"
    if environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs; unset it"
    needed = needed_driver(state.runtime)
    about = f"torch {state.torch} has the runtime of CUDA {state.runtime}" + (
        f", which needs driver {needed} or later" if needed else ""
    )
    if driver is None:
        return f"{about}, and no driver is visible here; install it, and in a container use NVIDIA's container runtime"
    if is_too_old(driver, state.runtime):
        return f"{about}, and the driver is {driver}; update it"
    return f"{about}, and the driver is {driver}, which fits; {state.error or '`nvidia-smi` may say why'}"


def problem_elsewhere(
    command: tuple[str, ...] = (sys.executable, "-m", "worker.device"), seconds: float = TORCH_SECONDS
) -> str | None:
    """The error of `select_device`, asked in another process, so that this one keeps free of torch and CUDA."""
    asked = run_within(command, seconds)
    if asked is None:
        return not_finished(seconds)
    return None if asked.returncode == 0 else (asked.stdout or asked.stderr).strip()


def not_finished(seconds: float) -> str:
    return f"torch did not initialize CUDA in {seconds:.0f} s: the driver may hang. Drain this machine and restart it"


def main() -> int:
    try:
        select_device(Settings())
    except GpuUnusable as cause:
        print(cause)  # noqa: T201 - for the process that has started this one
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
