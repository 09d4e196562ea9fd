"""The device type of a machine and of a GPU class, as far as a process without torch can know it."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from core.registry import Device
from core.settings import Settings

# Files of NVIDIA's driver; the second is that of WSL.
GPU_FILES = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
# NVIDIA's container runtime gives a container the GPUs that this variable names.
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
NO_GPUS = ("", "none", "void")


def gpu_sign(environ: Mapping[str, str] | None = None, gpu_files: Iterable[Path] = GPU_FILES) -> str | None:
    """The file or variable that shows that this machine or container has an NVIDIA GPU; None: it has none."""
    for file in gpu_files:
        if file.exists():
            return str(file)
    value = (os.environ if environ is None else environ).get(VISIBLE, "")
    return None if value in NO_GPUS else f"{VISIBLE}={value}"


def expected_device(
    settings: Settings, environ: Mapping[str, str] | None = None, gpu_files: Iterable[Path] = GPU_FILES
) -> Device:
    """The device that worker/device.py selects on this machine, unless it raises GpuUnusable."""
    if settings.device != "auto":
        return settings.device
    return "cpu" if gpu_sign(environ, gpu_files) is None else "cuda"


def device_of(
    settings: Settings,
    gpu_class: str,
    environ: Mapping[str, str] | None = None,
    gpu_files: Iterable[Path] = GPU_FILES,
) -> Device | None:
    """The device type by the hardware file, or this machine's if API and worker share a process. None: unknown."""
    memory = settings.hardware.of(gpu_class).gpu_memory_gib
    if memory is not None:
        return "cuda" if memory > 0 else "cpu"
    return expected_device(settings, environ, gpu_files) if settings.embedded else None
