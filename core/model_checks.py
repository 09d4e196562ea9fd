"""Results of trying a model, stored beside the model cache, so that the next job on it does not try it again.

One JSON file for each model and circumstances (versions, precision, context, files; worker/model/verdicts.py). The API
reads them too, so nothing here imports torch. A file that is damaged, edited to contradict itself, or of another
version of this module is ignored and written again.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.registry import BaseModelEntry
from core.template_facts import TemplateFacts

log = logging.getLogger(__name__)


# A result depends on these. transformers uses the kernels of the second line wherever they are installed.
LIBRARIES = (
    *("regraft-server", "torch", "transformers", "peft", "triton"),
    *("flash-linear-attention", "fla-core", "causal-conv1d", "mamba-ssm", "kernels"),
)

Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckedRoute(Stored):
    """`Route` of worker/model/policy.py."""

    forward: Literal["packed", "rows"]
    decode: Literal["shared", "joined", "forked", "padded", "alone", "recomputed"]
    blocks: bool
    eager: bool


class CheckedGap(Stored):
    """`Gap` of worker/model/support.py."""

    part: str
    largest: Nats
    mean: Nats
    share: Share
    prompt: Annotated[int, Field(ge=1)]


class CheckedVerdict(Stored):
    """`Verdict` of worker/model/support.py."""

    route: CheckedRoute
    gaps: Annotated[list[CheckedGap], Field(min_length=1)]
    instead: str
    checked_at: int


class CheckedKind(Stored):
    """The adapted layers of one kind."""

    modules: Annotated[int, Field(ge=0)]
    share: Share


class ModelCheck(Stored):
    """A result, and the model that it is of."""

    key: str  # a hash of everything that the result depends on
    source: str
    dtype: str
    context: int
    versions: dict[str, str]  # of the LIBRARIES that were installed
    checked_at: Annotated[int, Field(ge=0)]
    forward: Literal["packed", "rows"]
    decode: str | None  # None: the transformers sampler was not tried
    largest_difference: Nats
    adapted_modules: Annotated[int, Field(ge=0)]
    adapted_share: Share
    adapted_by_kind: dict[str, CheckedKind]
    reasons: bool | None  # its chat template lets it write thoughts; None: not known
    template: TemplateFacts | None = None  # None: it has none
    verdict: CheckedVerdict

    @model_validator(mode="after")
    def _is_of_its_verdict(self) -> "ModelCheck":
        verdict = self.verdict
        if self.forward != verdict.route.forward or self.decode not in (None, verdict.route.decode):
            raise ValueError("its verdict has another route")
        if self.largest_difference != max(gap.largest for gap in verdict.gaps):
            raise ValueError("its verdict has another difference")
        return self


class ModelChecks:
    """The files, in a folder that need not exist."""

    def __init__(self, model_cache: Path) -> None:
        self.folder = model_cache / "checks"

    def find(self, source: str, key: str) -> ModelCheck | None:
        """The result under this key, if it is there and whole."""
        check = _read(self._path(source, key))
        return check if check is not None and (check.source, check.key) == (source, key) else None

    def latest(self, entry: BaseModelEntry, versions: Mapping[str, str] | None = None) -> ModelCheck | None:
        """The newest result of a model of the registry with its present context and precision.

        Args:
            versions: only a result with these; None: with any.
        """
        source = source_of(entry)
        same = [
            check
            for check in self._of(source)
            if (check.source, check.dtype, check.context) == (source, entry.dtype, entry.context)
            and versions in (None, check.versions)
        ]
        return max(same, key=lambda check: check.checked_at, default=None)

    def keep(self, check: ModelCheck) -> None:
        """Write the result, replacing one under the same key. A disk that refuses it costs the next job a check."""
        try:
            write_whole(self._path(check.source, check.key), check.model_dump_json())
        except OSError as cause:
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


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all, readable by an API that runs as another user."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(scratch).unlink()
        raise


def source_of(entry: BaseModelEntry) -> str:
    """The model's source as the registry has it."""
    return entry.hub or (str(entry.path) if entry.path else f"{entry.package}/{entry.file}")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def installed_versions() -> dict[str, str]:
    """Of the LIBRARIES that are installed here."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def differ(versions: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Whether one of these is installed here in another version.

    A server without torch knows its own version only. Builds for other devices (2.13.0+cpu) are the same version.
    """
    return any(name in here and _public(here[name]) != _public(made) for name, made in versions.items())


def _public(version: str) -> str:
    return version.partition("+")[0]


def _read(path: Path) -> ModelCheck | None:
    try:
        return ModelCheck.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as cause:
        _report_ignored(path, type(cause).__name__)
        return None


@cache
def _report_ignored(path: Path, cause: str) -> None:
    """Log it once in a process: the API reads the files for each request."""
    log.warning("the check of a model in %s is ignored (%s): the next job tries the model again", path, cause)
