"""Load models on demand within the available memory, and evict the least recently used one.

A tuned model that is an adapter shares the base model with others. A whole model is loaded like another base model.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from core.chat import Adapter, Served
from core.registry import BaseModelEntry, Device, Registry, sampler_of, vllm_problem
from core.reloaded import Reloaded, current
from core.settings import Settings
from core.units import GIB
from worker.model import memory
from worker.refusals import ModelUnavailable, NotEnoughMemory, Refusal
from worker.serving.adapters import AdapterDamaged, AdapterFolders, AdapterGone
from worker.serving.engine import LoadedModel
from worker.serving.serving_metrics import loading

log = logging.getLogger(__name__)

T = TypeVar("T")

# After this time the client gets a Retry-After, and loading continues. A model of gigabytes takes minutes. An adapter
# of megabytes takes seconds; if not, the blob store has a problem, and waiting requests would block others.
LOAD_PATIENCE = 60.0
ADAPTER_PATIENCE = 20.0
DOWNLOADS_AT_ONCE = 8  # of adapters, each in a thread


class EngineRefused(Exception):
    """The request cannot be served; has the reason and the HTTP status."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after


class Builder(Protocol):
    """Builds engines of one kind."""

    def bytes_needed(self, entry: BaseModelEntry) -> int:
        """Return the needed share of `bytes_free`. Blocks. Raises Refusal if the model cannot be read."""
        ...

    def bytes_free(self) -> int: ...

    def bytes_in_all(self) -> int:
        """Return what `bytes_free` is when nothing else uses the device."""
        ...

    async def build(self, name: str, entry: BaseModelEntry, others: Sequence[BaseModelEntry]) -> LoadedModel:
        """Build an engine. `others`: models of the registry that are not loaded; leaves memory for them if possible."""
        ...


@dataclass
class Loaded:
    engine: LoadedModel
    entry: BaseModelEntry  # of the registry, when it was loaded
    users: int = 0


class Engines:
    """The loaded base models and whole tuned models, and the folders of tuned models."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry | Reloaded[Registry],
        builders: Mapping[str, Builder],
        adapters: AdapterFolders,
        wholes: AdapterFolders,
        *,
        device: Device = "cpu",
    ) -> None:
        """Create without loaded models. `builders`: by sampler name, "vllm" only if it is installed, and "fleet"."""
        self.settings, self._registry, self.builders = settings, registry, builders
        self.adapters, self.wholes = adapters, wholes
        self.device, self.patience, self.adapter_patience = device, LOAD_PATIENCE, ADAPTER_PATIENCE
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Loaded]] = {}
        self._one_at_a_time = asyncio.Lock()  # two concurrent loads would count the same memory as free
        self._fetching: dict[Adapter, asyncio.Future[Path]] = {}
        # A separate pool: a blob store that hangs must not block the threads that other requests need.
        self._downloads = ThreadPoolExecutor(DOWNLOADS_AT_ONCE, "adapters")

    @asynccontextmanager
    async def open(self, served: Served) -> AsyncIterator[tuple[LoadedModel, Path | None]]:
        """Yield the model, which stays loaded during the context, and the folder of its adapter.

        Raises:
            EngineRefused: the model does not exist, does not fit, or takes too long to load.
        """
        name, adapter = served.base_model, served.adapter
        entry = self.registry.models.get(name)
        if entry is None:
            raise EngineRefused(f"The model '{name}' does not exist.", 404, code="model_not_found")
        if adapter is not None and adapter.is_whole:
            entry = _in_folder(entry, await self._folder(adapter))
            name, adapter = f"{name}@{adapter.manifest_sha256}", None
        loaded = await self._in_time(self._task(name, entry), served.base_model, self.patience)
        while self._loaded.get(name) is not loaded:  # it may be evicted before we hold it
            loaded = await self._in_time(self._task(name, entry), served.base_model, self.patience)
        loaded.users += 1
        try:
            yield loaded.engine, None if adapter is None else await self._folder(adapter)
        finally:
            loaded.users -= 1

    @property
    def registry(self) -> Registry:
        return current(self._registry)

    @property
    def busy(self) -> bool:
        return bool(self._loading) or any(loaded.users for loaded in self._loaded.values())

    async def load(self, name: str) -> None:
        """Load a base model unless it is loaded and alive, however long it takes.

        Raises:
            EngineRefused: it cannot be loaded; without `retry_after` for a reason that does not pass.
        """
        await self._task(name, self.registry.models[name])

    def is_lost(self, name: str) -> bool:
        """Whether the engine of a base model has died. False if it is not loaded."""
        loaded = self._loaded.get(name)
        return loaded is not None and loaded.engine.lost

    async def release_idle(self) -> None:
        """Unload the models that answer no request, because a job on this machine needs their memory."""
        async with self._one_at_a_time:
            for name in [*self._loaded]:
                loaded = self._loaded.get(name)  # `_find` takes out one that has died meanwhile
                if loaded is not None and not loaded.users:
                    log.info("unloading %s, because a job needs its memory", name)
                    await self._loaded.pop(name).engine.close()
        memory.release_unused(self.device)

    async def close(self) -> None:
        for loaded in self._loaded.values():
            await loaded.engine.close()
        self._loaded.clear()
        self._downloads.shutdown(wait=False, cancel_futures=True)

    async def _folder(self, adapter: Adapter) -> Path:
        folders = self.wholes if adapter.is_whole else self.adapters
        found = await asyncio.to_thread(folders.found, adapter)
        if found is not None:
            return found
        if adapter not in self._fetching:
            loop = asyncio.get_running_loop()
            fetching = loop.run_in_executor(self._downloads, folders.folder, adapter)
            fetching.add_done_callback(lambda done: self._fetching.pop(adapter))
            self._fetching[adapter] = fetching
        what, patience = (
            ("the model", self.patience) if adapter.is_whole else ("the adapter", self.adapter_patience)
        )
        return await self._in_time(self._fetching[adapter], what, patience)

    async def _in_time(self, task: "asyncio.Future[T]", what: str, patience: float) -> T:
        try:
            return await asyncio.wait_for(asyncio.shield(task), patience)
        except TimeoutError:
            raise EngineRefused(
                f"{what} is still loading; retry later.", 503, code="loading", retry_after=5
            ) from None
        except AdapterGone as gone:
            raise EngineRefused(f"The model cannot be loaded: {gone}.", 404, code="model_not_found") from gone
        except AdapterDamaged as damaged:
            message = f"The model's checkpoint is damaged: {damaged}. Use another checkpoint of its job."
            raise EngineRefused(message, 410, code="checkpoint_damaged") from damaged

    def _task(self, name: str, entry: BaseModelEntry) -> "asyncio.Task[Loaded]":
        if name not in self._loading:
            task = self._loading[name] = asyncio.create_task(self._find(name, entry))
            task.add_done_callback(lambda done: self._loading.pop(name))
        return self._loading[name]

    async def _find(self, name: str, entry: BaseModelEntry) -> Loaded:
        if (loaded := self._loaded.get(name)) is not None and loaded.engine.lost:
            log.warning("the engine of %s has died and is being restarted", name)
            await self._loaded.pop(name).engine.close()
        elif loaded is not None and loaded.entry != entry and not loaded.users:
            log.info("the entry of %s has changed, so it is loaded again", name)
            await self._loaded.pop(name).engine.close()
        if name not in self._loaded:
            async with self._one_at_a_time:
                self._loaded[name] = Loaded(await self._load(name, entry), entry)
        self._loaded.move_to_end(name)
        return self._loaded[name]

    async def _load(self, name: str, entry: BaseModelEntry) -> LoadedModel:
        builder = self._builder(name, entry)
        try:
            needed = await asyncio.to_thread(builder.bytes_needed, entry)
            await self._make_room(name, needed, builder)
            log.info("loading %s", name)
            absent = (
                self.registry.models.keys() - self._loaded.keys() - self.settings.samplers.keys() - {name}
            )
            with loading("model"):
                return await builder.build(name, entry, [self.registry.models[other] for other in absent])
        except NotEnoughMemory as taken:  # the device had room for it a moment ago
            raise EngineRefused(f"{taken} Retry later.", 503, code="loading", retry_after=10) from taken
        except Refusal as refusal:
            raise EngineRefused(str(refusal), code=refusal.code) from refusal
        except ModelUnavailable as silence:
            raise EngineRefused(str(silence), 503, code="model_unavailable", retry_after=10) from silence

    def _builder(self, name: str, entry: BaseModelEntry) -> Builder:
        if name in self.settings.samplers:  # not a whole tuned model, whose name has its hash
            return self.builders["fleet"]
        kind = sampler_of(entry, self.settings.sampler, self.device, vllm_installed="vllm" in self.builders)
        assert kind is not None, "device and installation are known here"
        if kind not in self.builders:
            raise EngineRefused(
                "The model is served with vLLM, which is not installed here.", 503, code="engine_unavailable"
            )
        if kind == "vllm" and (problem := vllm_problem(entry, self.device)):
            raise EngineRefused(f"The model cannot be served: {problem}", 503, code="engine_unavailable")
        return self.builders[kind]

    async def _make_room(self, name: str, needed: int, builder: Builder) -> None:
        while (free := builder.bytes_free()) < needed:
            idle = next((other for other, loaded in self._loaded.items() if not loaded.users), None)
            if idle is None:
                raise self._no_room(name, needed, free, builder.bytes_in_all())
            log.info("unloading %s to make room for %s", idle, name)
            await self._loaded.pop(idle).engine.close()
            memory.release_unused(self.device)

    def _no_room(self, name: str, needed: int, free: int, in_all: int) -> EngineRefused:
        """The refusal of a model for which no other can be unloaded: permanent if it is too large for the device."""
        needs = f"{name} needs {needed / GIB:.1f} GiB of memory, and "
        if needed > in_all:
            message = f"{needs}the device has {in_all / GIB:.1f} GiB."
            return EngineRefused(message, 503, code="not_enough_memory")
        users = "other models answer" if self._loaded else "other processes use the device"
        message = f"{needs}{free / GIB:.1f} GiB are free while {users}."
        return EngineRefused(message, 503, code="loading", retry_after=10)


def _in_folder(entry: BaseModelEntry, folder: Path) -> BaseModelEntry:
    """A tuned whole model, with the entry of its base model. The chat template of its job is in the folder."""
    source = {"path": folder, "package": None, "file": None, "hub": None}
    return entry.model_copy(update=source | {"chat_template": None})
