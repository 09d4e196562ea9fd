"""Memory that models of the registry need on a GPU, as workers have estimated it, beside the model cache.

Only workers can estimate it (worker/model/capacity.py); each writes its estimates when it starts. The API, which may
share the folder, shows them. One JSON file for each model, in its precision and context, and GPU class.
"""

import hashlib
import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from core.model_checks import source_of, write_whole
from core.registry import BaseModelEntry

log = logging.getLogger(__name__)


class ModelMemory(BaseModel):
    """Of a job whose longest prompt and answer fill the context, with an adapter of rank 16. In GiB of one GPU."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu_class: str
    gpu_gib: float
    needed_gib: float | None  # None: it does not fit
    problem: str | None  # why it does not fit


class ModelMemories:
    """The files, in a folder that need not exist."""

    def __init__(self, model_cache: Path) -> None:
        self.folder = model_cache / "memory"

    def find(self, entry: BaseModelEntry, gpu_class: str) -> ModelMemory | None:
        try:
            return ModelMemory.model_validate_json(self._path(entry, gpu_class).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as cause:
            log.warning("the memory estimate of %s is ignored: %s", source_of(entry), type(cause).__name__)
            return None

    def keep(self, entry: BaseModelEntry, memory: ModelMemory) -> None:
        """Write the estimate. A disk that refuses it costs only the display."""
        try:
            write_whole(self._path(entry, memory.gpu_class), memory.model_dump_json())
        except OSError as cause:
            log.warning("the memory estimate of %s is not stored: %s", source_of(entry), cause)

    def _path(self, entry: BaseModelEntry, gpu_class: str) -> Path:
        key = f"{source_of(entry)}\n{entry.dtype}\n{entry.context}\n{entry.tensor_parallel}\n{gpu_class}"
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
