"""The registry of base models: a TOML file that maps a model id to its source, precision and context.

It may also define aliases, so that scripts with OpenAI's model names work unchanged.
"""

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from core import chat_templates
from core.errors import ModelNotFound, TunedModelNotFound
from core.reloaded import Reloaded
from core.system_errors import file_problem

SamplerName = Literal["transformers", "vllm"]
Device = Literal["cpu", "cuda"]

DEFAULT_FILE = Path(__file__).parent / "registry.toml"


class InvalidRegistry(ValueError):
    """The models file is invalid; the message has the file, the table and the problem in one line."""


class BaseModelEntry(BaseModel):
    """One base model. Exactly one source: `path`, `package` with `file`, or `hub`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = None
    package: str | None = None
    file: str | None = None
    hub: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    context: int = Field(default=4096, ge=16)  # tokens of prompt and answer
    sampler: SamplerName | None = None  # None: by the device (sampler_of)
    # GPUs that share each layer while vLLM samples (tensor parallelism). Their number has to divide the model's heads.
    tensor_parallel: int = Field(default=1, ge=1)
    # vLLM's --tool-call-parser: how the model writes calls of tools. None: by its chat template, where known.
    tool_parser: str | None = None
    gpu_class: str | None = None  # None: the default queue
    # "plain", "r1_zero", a path to a Jinja file or Jinja text (core/chat_templates.py); None: the tokenizer's template.
    chat_template: str | None = None

    @model_validator(mode="after")
    def one_source(self) -> "BaseModelEntry":
        if sum(source is not None for source in (self.path, self.package, self.hub)) != 1:
            raise ValueError("give exactly one of path, package (with file) or hub")
        if (self.package is None) != (self.file is None):
            raise ValueError("package and file belong together: the package ships the file")
        return self

    @model_validator(mode="after")
    def only_vllm_is_parallel(self) -> "BaseModelEntry":
        if self.tensor_parallel > 1 and self.sampler == "transformers":
            raise ValueError(
                "tensor_parallel is for the sampler vllm: transformers uses the trainer's weights"
            )
        return self

    @property
    def template_text(self) -> str | None:
        """The Jinja text of `chat_template`; None: the tokenizer's template."""
        return None if self.chat_template is None else chat_templates.text_of(self.chat_template)

    def locate(self) -> Path | str:
        """The location of the weights: a folder, a .gguf file, or a hub id.

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
            )  # find_spec does not import: the package's dependencies may be missing
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
    adapters: bool = True,
) -> SamplerName | None:
    """The deployment's sampler, else the model's, else the default for the device.

    The default is vLLM on a GPU where it is installed and can compute the model, transformers elsewhere.

    Args:
        adapters: whether the model is sampled with LoRA adapters; False: all its weights are trained.

    Returns None if the default depends on an unknown machine: `device` or `vllm_installed` is None.
    """
    name = entry.sampler if override == "registry" else override
    if name is not None:
        return name
    if device == "cpu" or (device == "cuda" and adapters and vllm_problem(entry, device)):
        return "transformers"
    if device is None or vllm_installed is None:
        return None
    return "vllm" if vllm_installed else "transformers"


def vllm_problem(entry: BaseModelEntry, device: Device) -> str | None:
    """Why vLLM cannot start with adapters of the model on this device, and the remedy. None: it can.

    vLLM's kernels for LoRA on a GPU take 16-bit numbers only (vllm/lora/ops/triton_ops/lora_shrink_op.py).
    """
    if device == "cuda" and entry.dtype == "float32":
        return (
            'vLLM computes LoRA adapters on a GPU in 16 bits only, and the model\'s entry has `dtype = "float32"`. Set '
            '`dtype = "bfloat16"` there, or sample with transformers: `sampler = "transformers"` there, or '
            "REGRAFT_SAMPLER=transformers."
        )
    return None


class Registry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, BaseModelEntry]
    # Alias -> model or another alias.
    aliases: dict[str, str] = {}

    @model_validator(mode="after")
    def aliases_lead_to_models(self) -> "Registry":
        for alias, target in self.aliases.items():
            if not alias or alias.startswith("ft:"):
                raise ValueError(f"alias {alias!r}: an alias must not be empty or begin with 'ft:'")
            if alias in self.models:
                raise ValueError(f"alias {alias!r} is the name of a model, which it would hide")
            seen = [alias]
            while target in self.aliases:
                if target in seen:
                    raise ValueError(f"aliases form a cycle: {' -> '.join([*seen, target])}")
                seen.append(target)
                target = self.aliases[target]
            if target not in self.models:
                raise ValueError(
                    f"alias {alias!r} leads to {target!r}, which is not a model of this registry"
                )
        return self

    @classmethod
    def load(cls, file: Path | None) -> "Registry":
        """Read `file`, or the packaged default. Relative paths in it are relative to the file.

        A file with aliases and no models gives the models of the packaged default further names.

        Raises:
            InvalidRegistry: it cannot be read, is not TOML, or has an invalid model or alias; or a `chat_template` is
            neither
                a name, nor Jinja text, nor a file.
        """
        file = file or DEFAULT_FILE
        try:
            fields = tomllib.loads(file.read_text())
            if "aliases" in fields and "models" not in fields:
                fields["models"] = tomllib.loads(DEFAULT_FILE.read_text())["models"]
            registry = cls.model_validate(fields)
        except ValidationError as invalid:  # its own text quotes the whole input
            raise InvalidRegistry(f"{file}: {'; '.join(map(_problem, invalid.errors()))}") from None
        except OSError as cause:
            raise InvalidRegistry(file_problem(cause)) from cause
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
            raise InvalidRegistry(f"{file}: {cause}") from cause
        folder = file.resolve().parent
        models = {}
        for name, entry in registry.models.items():
            try:
                models[name] = _relative_to(folder, entry)
            except (OSError, ValueError) as cause:
                raise InvalidRegistry(f"{file}: [models.{name}] {file_problem(cause)}") from cause
        return registry.model_copy(update={"models": models})

    @classmethod
    def reloaded(cls, file: Path | None) -> "Reloaded[Registry]":
        """The registry, read again when the file has changed. Raises InvalidRegistry."""
        return Reloaded(lambda: cls.load(file), [file])

    @property
    def names(self) -> list[str]:
        """All valid model names of requests: the models, then the aliases."""
        return [*self.models, *self.aliases]

    def resolve(self, name: str) -> str:
        """Resolve an alias to the id of its model; other names are returned unchanged."""
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def get(self, model: str) -> BaseModelEntry:
        """Look up a model by its id or an alias.

        Raises:
            TunedModelNotFound: it looks like the id of a tuned model.
            ModelNotFound: the name is neither.
        """
        entry = self.models.get(self.resolve(model))
        if entry is None and model.startswith("ft:"):
            raise TunedModelNotFound(model, self.names)
        if entry is None:
            raise ModelNotFound(model, self.names)
        return entry


def _problem(error: ErrorDetails) -> str:
    # pydantic prefixes messages of our validators with "Value error, ".
    message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    return f"[{'.'.join(map(str, error['loc']))}] {message}" if error["loc"] else message


def _relative_to(folder: Path, entry: BaseModelEntry) -> BaseModelEntry:
    changed: dict[str, Path | str] = {}
    if entry.path is not None:
        changed["path"] = folder / entry.path
    if entry.chat_template is not None:
        changed["chat_template"] = chat_templates.text_of(entry.chat_template, folder)
    return entry.model_copy(update=changed)
