"""The one base model of `regraft-server inference --model`: loaded before the server is ready, and again if it dies."""

import asyncio
import logging
from dataclasses import dataclass

from core.outages import outage
from core.registry import InvalidRegistry, Registry
from core.reloaded import Reloaded
from core.settings import Settings
from worker.serving.engines import EngineRefused, Engines

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # between two looks at the engine, and before another try to load the model


@dataclass(frozen=True)
class ModelChoice:
    """The model of the command line."""

    name: str
    tensor_parallel: int | None = None  # None: that of the model's entry

    def registry(self, settings: Settings) -> Reloaded[Registry]:
        """The registry with this model and no other. Raises InvalidRegistry."""
        file = settings.models_file
        return Reloaded(lambda: self._of(Registry.load(file)), [file])

    def _of(self, registry: Registry) -> Registry:
        entry = registry.models.get(self.name)
        if entry is None:
            known = ", ".join(sorted(registry.models))
            raise InvalidRegistry(f"{self.name} is not a base model; the base models are: {known}")
        if self.tensor_parallel is not None:
            entry = entry.model_copy(update={"tensor_parallel": self.tensor_parallel})
        return Registry(models={self.name: entry})


class KeptModel:
    """Keeps a base model loaded.

    A tuned whole model may still unload it for a while, as on a server of all models.
    """

    def __init__(self, engines: Engines, name: str, *, look_seconds: float = LOOK_SECONDS) -> None:
        self.engines, self.name, self.look_seconds = engines, name, look_seconds
        self._has_loaded = False
        self.has_failed = False  # to load, for a reason that does not pass

    @property
    def is_ready(self) -> bool:
        return self._has_loaded and not self.engines.is_lost(self.name)

    async def keep(self) -> None:
        """Returns if the model cannot be loaded and waiting does not help; the log says why."""
        while True:
            if not self.is_ready:
                await self._load()
            if self.has_failed:
                return
            await asyncio.sleep(self.look_seconds)

    async def _load(self) -> None:
        self._has_loaded = False
        try:
            await self.engines.load(self.name)
        except EngineRefused as refusal:
            self.has_failed = refusal.retry_after == 0
            log.error("%s cannot be loaded%s: %s", self.name, "" if self.has_failed else " yet", refusal)
        except Exception as cause:
            self.has_failed = outage(cause) is None
            log.exception("%s cannot be loaded%s", self.name, "" if self.has_failed else " yet")
        else:
            self._has_loaded = True
            log.info("%s is loaded", self.name)
