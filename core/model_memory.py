"""Memory that models of the registry need on a GPU, as workers have estimated it, beside the model cache.

Only workers can estimate it (worker/model/capacity.py); each writes its estimates when it starts. The API, which may
share the folder, shows them. One JSON file for each model, in its precision and context, and GPU class.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from core.json_files import JsonFiles
from core.model_checks import source_of
from core.registry import BaseModelEntry


class ModelMemory(BaseModel):
    """Memory of one GPU, in GiB, of a job with an adapter of rank 16 and answers that fill the context."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu_class: str
    gpu_gib: float
    needed_gib: float | None  # None: it does not fit
    problem: str | None  # why it does not fit


class ModelMemories:
    def __init__(self, model_cache: Path) -> None:
        self._files = JsonFiles(model_cache / "memory", ModelMemory)

    def find(self, entry: BaseModelEntry, gpu_class: str) -> ModelMemory | None:
        return self._files.read(_key(entry, gpu_class))

    def keep(self, entry: BaseModelEntry, memory: ModelMemory) -> None:
        """Write the estimate. If the disk refuses it, the API does not show it."""
        self._files.write(memory, _key(entry, memory.gpu_class))


def _key(entry: BaseModelEntry, gpu_class: str) -> str:
    return f"{source_of(entry)}\n{entry.dtype}\n{entry.context}\n{entry.tensor_parallel}\n{gpu_class}"
