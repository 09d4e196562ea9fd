"""The weights of a model's name, as a project may use it."""

from sqlalchemy.orm import Session

from core.chat import Adapter, Served
from core.registry import Registry
from core.results import tuned_models
from core.storage.store import BlobNotFound, BlobStore


def served(
    session: Session, blobs: BlobStore, registry: Registry, project_id: str, name: str
) -> Served | None:
    """A base model of the registry, or one of the project's tuned models and checkpoints; None if it is neither.

    Raises InvalidRequest for a reward model.
    """
    base = registry.resolve(name)
    if base in registry.models:
        return Served(base_model=base)
    model = tuned_models.find(session, project_id, name)
    checkpoint = None if model is None else tuned_models.checkpoint_of(session, model)
    if model is None or checkpoint is None:
        return None
    if tuned_models.is_reward_model(session, model):
        raise tuned_models.only_scores(name, "data_source.model")
    try:
        manifest = blobs.read(f"{checkpoint.blob_prefix}/manifest.json")
    except BlobNotFound:
        return None
    return Served(base_model=model.base_model, adapter=Adapter.of(checkpoint.blob_prefix, manifest))
