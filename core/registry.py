"""Which base models there are: a TOML file that maps a model id to its source, precision and context.

It may also list aliases, so that scripts that name a model of OpenAI's need no edit.
"""

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from core import chat_templates
from core.errors import ModelNotFound, TunedModelGiven

SamplerName = Literal["transformers", "vllm"]
Device = Literal["cpu", "cuda"]

DEFAULT_FILE = Path(__file__).parent / "registry.toml"


class InvalidRegistry(ValueError):
    """The models file cannot be used; the message names it, the table and what is wrong, in one line."""


class BaseModelEntry(BaseModel):
    """One base model. Exactly one source: `path`, `package` with `file`, or `hub`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = None
    package: str | None = None
    file: str | None = None
    hub: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    context: int = Field(default=4096, ge=16)  # tokens of prompt and answer together
    sampler: SamplerName | None = None  # None: vllm on a GPU where it is installed, else transformers
    gpu_class: str | None = None  # None: the deployment's default queue
    # "plain", "r1_zero", a path to a Jinja file or Jinja text (core/chat_templates.py); None: the tokenizer's own.
    chat_template: str | None = None

    @model_validator(mode="after")
    def one_source(self) -> "BaseModelEntry":
        if sum(source is not None for source in (self.path, self.package, self.hub)) != 1:
            raise ValueError("give exactly one of path, package (with file) or hub")
        if (self.package is None) != (self.file is None):
            raise ValueError("package and file belong together: the package ships the file")
        return self

    @property
    def template_text(self) -> str | None:
        """The Jinja text of `chat_template`; None: the tokenizer's own holds."""
        return None if self.chat_template is None else chat_templates.text_of(self.chat_template)

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


def sampler_of(
    entry: BaseModelEntry,
    override: Literal["registry"] | SamplerName,
    device: Device | None,
    *,
    vllm_installed: bool | None = True,
) -> SamplerName | None:
    """The model's sampler, unless the deployment has another; where neither names one, what suits the device.

    Returns None if that depends on a machine that the caller does not know: `device` or `vllm_installed` is None.
    """
    name = entry.sampler if override == "registry" else override
    if name is not None:
        return name
    if device == "cpu":
        return "transformers"
    if device is None or vllm_installed is None:
        return None
    return "vllm" if vllm_installed else "transformers"


class Registry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, BaseModelEntry]
    # Another name of a model -> a model, or another alias.
    aliases: dict[str, str] = {}

    @model_validator(mode="after")
    def aliases_lead_to_models(self) -> "Registry":
        for alias, target in self.aliases.items():
            if not alias or alias.startswith("ft:"):
                raise ValueError(f"alias {alias!r}: a name that is empty or begins with 'ft:' is no alias")
            if alias in self.models:
                raise ValueError(f"alias {alias!r} is the name of a model, which it would hide")
            seen = [alias]
            while target in self.aliases:
                if target in seen:
                    raise ValueError(f"aliases form a cycle: {' -> '.join([*seen, target])}")
                seen.append(target)
                target = self.aliases[target]
            if target not in self.models:
                raise ValueError(f"alias {alias!r} leads to {target!r}, which is no model of this registry")
        return self

    @classmethod
    def load(cls, file: Path | None) -> "Registry":
        """Read `file`, or the packaged default. Relative paths in it are relative to the file.

        Raises:
            InvalidRegistry: it cannot be read, is no TOML, or has a model or an alias that is not clear; or a
                `chat_template` is neither a name, nor Jinja text, nor a file.
        """
        file = file or DEFAULT_FILE
        try:
            registry = cls.model_validate(tomllib.loads(file.read_text()))
        except ValidationError as invalid:  # its own text has all of the input in it
            raise InvalidRegistry(f"{file}: {'; '.join(map(_problem, invalid.errors()))}") from None
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
            raise InvalidRegistry(f"{file}: {cause}") from cause
        folder = file.resolve().parent
        models = {}
        for name, entry in registry.models.items():
            try:
                models[name] = _relative_to(folder, entry)
            except (OSError, ValueError) as cause:
                raise InvalidRegistry(f"{file}: [models.{name}] {cause}") from cause
        return registry.model_copy(update={"models": models})

    @property
    def names(self) -> list[str]:
        """Everything that a request may name: the models, then the aliases."""
        return [*self.models, *self.aliases]

    def resolve(self, name: str) -> str:
        """The id of the model that `name` is or leads to; any other name as it is."""
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def get(self, model: str) -> BaseModelEntry:
        """The entry of a model by its id or an alias.

        Raises:
            TunedModelGiven: it looks like the id of a tuned model.
            ModelNotFound: it is neither.
        """
        found = self.models.get(self.resolve(model))
        if found is None and model.startswith("ft:"):
            raise TunedModelGiven(model, self.names)
        if found is None:
            raise ModelNotFound(model, self.names)
        return found


def _problem(error: ErrorDetails) -> str:
    # Of a rule of ours pydantic says "Value error, " before it.
    message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    return f"[{'.'.join(map(str, error['loc']))}] {message}" if error["loc"] else message


def _relative_to(folder: Path, entry: BaseModelEntry) -> BaseModelEntry:
    changed: dict[str, Path | str] = {}
    if entry.path is not None:
        changed["path"] = folder / entry.path
    if entry.chat_template is not None:
        changed["chat_template"] = chat_templates.text_of(entry.chat_template, folder)
    return entry.model_copy(update=changed)
