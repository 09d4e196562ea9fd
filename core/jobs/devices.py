"""The device type of a GPU class, as far as a process on another machine can know it."""

from collections.abc import Iterable
from pathlib import Path

from core.registry import Device
from core.settings import Settings

# Device files of NVIDIA's driver; the second is that of WSL.
GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def device_of(settings: Settings, gpu_class: str, gpu_files: Iterable[Path] = GPU_FILES) -> Device | None:
    """The device type by `gpu_classes`, or this machine's if API and worker share a process. None: unknown."""
    memory = settings.gpu_memory_gib(gpu_class)
    if memory is not None:
        return "cuda" if memory > 0 else "cpu"
    if settings.embedded:
        return "cuda" if any(file.exists() for file in gpu_files) else "cpu"
    return None
