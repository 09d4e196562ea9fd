"""Read the operator's configuration for a command. Errors are UsageErrors that name the variable or the file."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import SettingsError

from core.hardware import InvalidHardware, hardware_of
from core.inference import unknown_models
from core.jobs.devices import GPU_FILES, expected_device
from core.registry import InvalidRegistry, Registry
from core.settings import Settings, problems
from worker.cli.parser import UsageError
from worker.device import problem_elsewhere
from worker.packages import missing_vllm, version_of, vllm_version


def read_settings() -> Settings:
    """Raise UsageError if a REGRAFT_* variable or the hardware file is invalid."""
    try:
        settings = Settings()
    except (ValidationError, SettingsError) as invalid:
        raise UsageError(problems(invalid)) from invalid
    try:
        hardware_of(settings.hardware_file)
    except InvalidHardware as invalid:
        raise UsageError(f"REGRAFT_HARDWARE_FILE: {invalid}") from invalid
    return settings


def check_packages(settings: Settings, version: Callable[[str], str | None] = version_of) -> None:
    """Raise UsageError if the settings need an extra of regraft-server that is not installed."""
    needed = [
        ("REGRAFT_DATABASE_URL", settings.database, "postgresql", "psycopg", "postgres"),
        ("REGRAFT_BROKER_URL", settings.broker_url, "redis", "redis", "redis"),
    ]
    for variable, url, scheme, package, extra in needed:
        if url.startswith(scheme) and version(package) is None:
            raise UsageError(
                f"{variable} needs the package {package}, which is not installed: "
                f"pip install 'regraft-server[{extra}]'"
            )


def check_device(settings: Settings, problem: Callable[[], str | None] = problem_elsewhere) -> None:
    """Raise UsageError if this machine has a GPU that its jobs could not use. Elsewhere no process is started."""
    if expected_device(settings) == "cuda" and (found := problem()):
        raise UsageError(found)


def worker_without_vllm(
    settings: Settings,
    vllm: Callable[[], str | None] = vllm_version,
    gpu_files: Iterable[Path] = GPU_FILES,
    environ: Mapping[str, str] | None = None,
) -> str | None:
    """Return the warning for a worker on a GPU whose jobs are sampled with transformers for lack of vLLM."""
    if settings.of_class(settings.gpu_class).sampler != "registry":  # no job has another sampler
        return None
    device = expected_device(settings, environ, gpu_files)
    return missing_vllm(device, "vllm", "transformers" if vllm() is None else "vllm")


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
