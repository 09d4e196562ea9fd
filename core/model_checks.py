"""Results of trying a model, stored beside the model cache, so that the next job on it does not try it again.

One JSON file for each model and circumstances (versions, precision, context, files; see
worker/checks/compatibility_cache.py). The API reads them too, so nothing here imports torch. A file that is damaged,
edited to contradict itself, or of another version of this module is ignored and written again.
"""

import contextlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.json_files import JsonFiles
from core.registry import BaseModelEntry
from core.template_facts import TemplateFacts

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
    """`Gap` of worker/checks/compatibility.py."""

    part: str
    largest: Nats
    mean: Nats
    share: Share
    prompt: Annotated[int, Field(ge=1)]


class CheckedVerdict(Stored):
    """`Verdict` of worker/checks/compatibility.py."""

    route: CheckedRoute
    gaps: Annotated[list[CheckedGap], Field(min_length=1)]
    instead: str
    checked_at: int


class CheckedKind(Stored):
    """The adapted layers of one kind."""

    modules: Annotated[int, Field(ge=0)]
    share: Share


class ModelCheck(Stored):
    """The result of trying a model."""

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
    def __init__(self, model_cache: Path) -> None:
        self._files = JsonFiles(model_cache / "checks", ModelCheck)

    def find(self, source: str, key: str) -> ModelCheck | None:
        """The result under this key."""
        check = self._files.read(source, key)
        return check if check is not None and (check.source, check.key) == (source, key) else None

    def latest(self, entry: BaseModelEntry, versions: Mapping[str, str] | None = None) -> ModelCheck | None:
        """The newest result of a model of the registry with its present context and precision.

        Args:
            versions: only a result with these; None: with any.
        """
        source = source_of(entry)
        same = [
            check
            for check in self._files.under(source)
            if (check.source, check.dtype, check.context) == (source, entry.dtype, entry.context)
            and versions in (None, check.versions)
        ]
        return max(same, key=lambda check: check.checked_at, default=None)

    def keep(self, check: ModelCheck) -> None:
        """Write the result, replacing one under the same key. If the disk refuses it, the next job checks again."""
        self._files.write(check, check.source, check.key)

    def forget(self, source: str, key: str) -> None:
        """Delete the result under this key, if there is one."""
        self._files.delete(source, key)


def source_of(entry: BaseModelEntry) -> str:
    """The model's source as the registry has it."""
    return entry.hub or (str(entry.path) if entry.path else f"{entry.package}/{entry.file}")


def installed_versions() -> dict[str, str]:
    """The version of each of LIBRARIES that is installed here."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def differ(versions: Mapping[str, str], installed: Mapping[str, str]) -> bool:
    """Whether one of these is installed here in another version.

    A server without torch knows its own version only. Builds for other devices (2.13.0+cpu) are the same version.
    """
    return any(
        name in installed and _public(installed[name]) != _public(made) for name, made in versions.items()
    )


def _public(version: str) -> str:
    return version.partition("+")[0]
