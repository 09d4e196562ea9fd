"""Which base models there are: a TOML file that maps a model id to its source, precision and context."""

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.errors import ModelNotFound

SamplerName = Literal["transformers", "vllm"]

DEFAULT_FILE = Path(__file__).parent / "registry.toml"


class BaseModelEntry(BaseModel):
    """One base model. Exactly one source: `path`, `package` with `file`, or `hub`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = None
    package: str | None = None
    file: str | None = None
    hub: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    context: int = Field(default=4096, ge=16)  # tokens of prompt and answer together
    sampler: SamplerName = "transformers"
    gpu_class: str | None = None  # None: the deployment's default queue

    @model_validator(mode="after")
    def one_source(self) -> "BaseModelEntry":
        if sum(source is not None for source in (self.path, self.package, self.hub)) != 1:
            raise ValueError("give exactly one of path, package (with file) or hub")
        if (self.package is None) != (self.file is None):
            raise ValueError("package and file belong together: the package ships the file")
        return self

    def locate(self) -> Path | str:
        """Where the weights are: a folder, a .gguf file, or a hub id.

        Raises:
            FileNotFoundError: the path does not exist, or the package is not installed or lacks the file.
        """
        if self.hub is not None:
            return self.hub
        if self.path is not None:
            source = self.path
        else:
            assert self.package is not None and self.file is not None
            spec = find_spec(
                self.package
            )  # finds without importing: the package's own imports may be missing
            if spec is None or not spec.submodule_search_locations:
                raise FileNotFoundError(
                    f"the Python package {self.package!r}, which ships the model, is not installed"
                )
            source = Path(spec.submodule_search_locations[0]) / self.file
        if not source.exists():
            raise FileNotFoundError(f"no model at {source}")
        return source


def sampler_of(entry: BaseModelEntry, override: Literal["registry"] | SamplerName) -> SamplerName:
    """The model's sampler, unless the whole service has another."""
    return entry.sampler if override == "registry" else override


class Registry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, BaseModelEntry]

    @classmethod
    def load(cls, file: Path | None) -> "Registry":
        """Read `file`, or the packaged default. A relative `path` in it is relative to the file."""
        file = file or DEFAULT_FILE
        registry = cls.model_validate(tomllib.loads(file.read_text()))
        folder = file.resolve().parent
        return cls(
            models={
                name: entry.model_copy(update={"path": folder / entry.path}) if entry.path else entry
                for name, entry in registry.models.items()
            }
        )

    def get(self, model: str) -> BaseModelEntry:
        if model not in self.models:
            raise ModelNotFound(model, self.models)
        return self.models[model]
