"""What computes on the machines of a GPU class, as far as a process that may run elsewhere can know."""

from pathlib import Path

from core.registry import Device
from core.settings import Settings

# Device files of NVIDIA's driver; the second is Windows' subsystem for Linux.
GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def device_of(settings: Settings, gpu_class: str) -> Device | None:
    """`gpu_classes` says it, or this machine, where API and worker are one process. None: unknown here."""
    memory = settings.gpu_memory_gib(gpu_class)
    if memory is not None:
        return "cuda" if memory > 0 else "cpu"
    if settings.embedded:
        return "cuda" if any(file.exists() for file in GPU_FILES) else "cpu"
    return None
