"""/v1/regraft/models: the base models that can be trained, and what is known of them."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from api.http.deps import CurrentProject, ServiceDep
from api.http.shapes import Listing
from core.model_checks import ModelCheck, ModelChecks, differ, installed_versions
from core.model_memory import ModelMemories, ModelMemory
from core.registry import BaseModelEntry, Registry, SamplerName
from core.template_facts import TemplateFacts

router = APIRouter(prefix="/regraft/models", tags=["regraft"])


class KindOut(BaseModel):
    """The adapted layers of one kind."""

    modules: int
    share: float  # of the model's parameters


class BaseModelOut(BaseModel):
    """A base model of the registry. The fields after `sampler` are null until a worker has tried the model."""

    id: str
    object: Literal["regraft.model"] = "regraft.model"
    aliases: list[str]
    context: int
    dtype: str
    gpu_class: str
    sampler: SamplerName | None  # null: by the device
    forward: str | None = None  # packed or rows
    decode: str | None = None  # of the transformers sampler; null also if only another sampler was tried
    largest_difference: float | None = None  # from transformers' log-probabilities, in nats
    adapted_modules: int | None = None
    adapted_share: float | None = None
    adapted_by_kind: dict[str, KindOut] | None = None
    reasons: bool | None = None
    template: TemplateFacts | None = None  # what its chat template does; null also if it has none
    # Of one GPU of the class, as a worker has estimated it at its start; null: unknown, or no GPU.
    memory: ModelMemory | None = None
    checked_at: int | None = None
    versions: dict[str, str] | None = None  # of the libraries that it was tried with
    # The worker tries the model again: this server, and so likely the worker, has other versions by now.
    outdated: bool | None = None

    @classmethod
    def of(
        cls,
        name: str,
        entry: BaseModelEntry,
        registry: Registry,
        gpu_class: str,
        check: ModelCheck | None,
        memory: ModelMemory | None,
    ) -> "BaseModelOut":
        known = check.model_dump(exclude={"key", "source", "verdict", "dtype", "context"}) if check else {}
        return cls(
            id=name,
            aliases=[alias for alias in registry.aliases if registry.resolve(alias) == name],
            context=entry.context,
            dtype=entry.dtype,
            gpu_class=entry.gpu_class or gpu_class,
            sampler=entry.sampler,
            memory=memory,
            outdated=differ(check.versions, installed_versions()) if check else None,
            **known,
        )


@router.get("")
def list_base_models(project: CurrentProject, service: ServiceDep) -> Listing[BaseModelOut]:
    """List the base models. Workers store their results in the model cache, which this server may share with them."""
    checks = ModelChecks(service.settings.model_cache)
    memories = ModelMemories(service.settings.model_cache)
    registry, gpu_class = service.registry, service.settings.gpu_class
    return Listing(
        data=[
            BaseModelOut.of(
                name,
                entry,
                registry,
                gpu_class,
                checks.latest(entry),
                memories.find(entry, entry.gpu_class or gpu_class),
            )
            for name, entry in registry.models.items()
        ]
    )
