"""Read the operator's graders file, with defaults from the settings, and wait for the servers that it names."""

import asyncio
from typing import Literal

from core.registry import Registry
from core.reloaded import Reloaded
from core.settings import Settings
from graders.backends import Backends, Inference, InvalidBackends
from graders.calls import CallRetryPolicy
from worker.heartbeat import Beat
from worker.progress import PROGRESS

Server = Literal["grader's server", "teacher"]  # that a run waits for


def open_backends(settings: Settings) -> Backends:
    """Raise InvalidBackends if the file cannot be used, or names a model that the registry does not have."""
    inference = Inference(settings.inference_address, settings.inference_key)
    backends = Backends.load(settings.graders_file, inference, environments=settings.grader_environments)
    unknown = backends.registry_models - Registry.load(settings.models_file).models.keys()
    if unknown:
        raise InvalidBackends(f"{settings.graders_file}: no model {min(unknown)!r} in the registry")
    return backends


def reloaded_backends(settings: Settings) -> Reloaded[Backends]:
    """The backends, read again when the graders file or the registry has changed. Raises InvalidBackends."""
    return Reloaded(lambda: open_backends(settings), [settings.graders_file, settings.models_file])


def patience_of_run(settings: Settings, beat: Beat, server: Server = "grader's server") -> CallRetryPolicy:
    """That of a run with the servers of judges, endpoints and teachers: it waits as for database and blob store.

    Args:
        server: shown as what the run waits for.
    """

    async def wait(seconds: float) -> None:
        with PROGRESS.waiting(server):
            await asyncio.sleep(seconds)
        beat()

    return CallRetryPolicy(away_seconds=settings.patience_seconds, sleep=wait)
