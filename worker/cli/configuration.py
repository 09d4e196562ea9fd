"""Read the operator's configuration for a command. Errors are UsageErrors that name the variable or the file."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import SettingsError

from core.inference import unknown_models
from core.jobs.devices import GPU_FILES
from core.registry import InvalidRegistry, Registry
from core.settings import Settings, problems
from worker.cli.parser import UsageError


def read_settings() -> Settings:
    """Raise UsageError if a REGRAFT_* variable is invalid."""
    try:
        return Settings()
    except (ValidationError, SettingsError) as invalid:
        raise UsageError(problems(invalid)) from invalid


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def check_packages(settings: Settings, is_installed: Callable[[str], bool] = _is_installed) -> None:
    """Raise UsageError if the settings need an extra of regraft-server that is not installed."""
    needed = [
        ("REGRAFT_DATABASE_URL", settings.database, "postgresql", "psycopg", "postgres"),
        ("REGRAFT_BROKER_URL", settings.broker_url, "redis", "redis", "redis"),
    ]
    for variable, url, scheme, package, extra in needed:
        if url.startswith(scheme) and not is_installed(package):
            raise UsageError(
                f"{variable} needs the package {package}, which is not installed: "
                f"pip install 'regraft-server[{extra}]'"
            )


def missing_vllm(
    settings: Settings,
    is_installed: Callable[[str], bool] = _is_installed,
    gpu_files: Iterable[Path] = GPU_FILES,
) -> str | None:
    """The warning for a worker that has a GPU and would sample with transformers because vLLM is not installed."""
    if settings.sampler == "transformers" or is_installed("vllm"):
        return None
    if not any(file.exists() for file in gpu_files):
        return None
    return (
        "This machine has a GPU and no vLLM, so jobs are sampled with transformers, which is much slower: "
        "pip install 'regraft-server[vllm]'. If transformers is intended, set REGRAFT_SAMPLER=transformers."
    )


def check_models(settings: Settings) -> None:
    """Raise UsageError if the models file cannot be used, or a model of another setting is not in it."""
    try:
        registry = Registry.load(settings.models_file)
    except InvalidRegistry as invalid:
        raise UsageError(f"REGRAFT_MODELS_FILE: {invalid}") from invalid
    if unknown := unknown_models(settings.inference_url, registry.models):
        known = ", ".join(sorted(registry.models))
        raise UsageError(
            f"REGRAFT_INFERENCE_URL: {unknown[0]} is not a base model; the base models are: {known}"
        )
    for name, entry in ((name, registry.models.get(name)) for name in sorted(settings.samplers)):
        if entry is None:
            known = ", ".join(sorted(registry.models))
            raise UsageError(f"REGRAFT_SAMPLERS: {name} is not a base model; the base models are: {known}")
        if entry.sampler == "transformers":
            raise UsageError(
                f"REGRAFT_SAMPLERS has samplers for {name}, which run vLLM, and its entry in the registry has "
                '`sampler = "transformers"`: remove one of them'
            )
