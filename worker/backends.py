"""Read the operator's graders file, with defaults from the settings."""

from core.registry import Registry
from core.settings import Settings
from graders.backends import Backends, Inference, InvalidBackends


def open_backends(settings: Settings) -> Backends:
    """Raise InvalidBackends if the file cannot be used, or names a model that the registry does not have."""
    inference = Inference(settings.inference_address, settings.inference_key)
    backends = Backends.load(settings.graders_file, inference, environments=settings.grader_environments)
    unknown = backends.registry_models - Registry.load(settings.models_file).models.keys()
    if unknown:
        raise InvalidBackends(f"{settings.graders_file}: no model {min(unknown)!r} in the registry")
    return backends
