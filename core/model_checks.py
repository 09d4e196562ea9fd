"""Results of trying a model, stored beside the model cache, so that the next job on it does not try it again.

One JSON file for each model and circumstances (versions, precision, context, files; worker/model/verdicts.py). The API
reads them too, so nothing here imports torch. A damaged file is ignored and written again.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from core.registry import BaseModelEntry

log = logging.getLogger(__name__)


class ModelCheck(BaseModel):
    """A result, and the model that it is of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str  # a hash of everything that the result depends on
    source: str
    dtype: str
    context: int
    checked_at: int
    forward: str
    decode: str | None  # None: the transformers sampler was not tried
    largest_difference: float  # nats
    adapted_modules: int
    adapted_share: float  # of the parameters
    adapted_by_kind: dict[str, dict[str, float]]
    verdict: dict[str, Any]  # as worker/model/verdicts.py reads it


class ModelChecks:
    """The files, in a folder that need not exist."""

    def __init__(self, model_cache: Path) -> None:
        self.folder = model_cache / "checks"

    def find(self, source: str, key: str) -> ModelCheck | None:
        """The result under this key, if it is there and whole."""
        check = _read(self._path(source, key))
        return check if check is not None and (check.source, check.key) == (source, key) else None

    def latest(self, entry: BaseModelEntry) -> ModelCheck | None:
        """The newest result of a model of the registry with its present context and precision."""
        source = source_of(entry)
        same = [
            check
            for check in self._of(source)
            if (check.source, check.dtype, check.context) == (source, entry.dtype, entry.context)
        ]
        return max(same, key=lambda check: check.checked_at, default=None)

    def keep(self, check: ModelCheck) -> None:
        """Write the result, replacing one under the same key. A disk that refuses it costs the next job a check."""
        path, scratch = self._path(check.source, check.key), None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, scratch = tempfile.mkstemp(dir=self.folder, prefix=".")
            with os.fdopen(descriptor, "w") as file:
                file.write(check.model_dump_json())
            Path(scratch).chmod(0o644)  # the API may run as another user
            Path(scratch).replace(path)
        except OSError as cause:
            if scratch is not None:
                with contextlib.suppress(OSError):
                    Path(scratch).unlink()
            log.warning("the check of %s is not stored: %s", check.source, cause)

    def forget(self, source: str, key: str) -> None:
        """Delete the result under this key, if there is one."""
        with contextlib.suppress(OSError):
            self._path(source, key).unlink()

    def _of(self, source: str) -> Iterator[ModelCheck]:
        for path in self.folder.glob(f"{_short(source)}-*.json"):
            if (check := _read(path)) is not None:
                yield check

    def _path(self, source: str, key: str) -> Path:
        return self.folder / f"{_short(source)}-{_short(key)}.json"


def source_of(entry: BaseModelEntry) -> str:
    """The model's source as the registry has it."""
    return entry.hub or (str(entry.path) if entry.path else f"{entry.package}/{entry.file}")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> ModelCheck | None:
    try:
        return ModelCheck.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
