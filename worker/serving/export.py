"""`regraft-server export`: write a checkpoint to a folder, as it is or with its adapter merged into the base model."""

import sys
import tempfile
from pathlib import Path

from core.database.engine import Database
from core.errors import CheckpointDamaged, NotFound
from core.model_templates import CHAT_TEMPLATE
from core.registry import BaseModelEntry, Registry
from core.results import export
from core.settings import Settings
from core.storage.store import BlobStore

TEXTS = ("README.md", "reproduce.json")


def export_to(
    settings: Settings, database: Database, blobs: BlobStore, name: str, folder: Path, *, merged: bool
) -> None:
    """Write the checkpoint of `name` (a checkpoint, a model or a job) into `folder`, or exit with an error."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty.")
    registry = Registry.load(settings.models_file)
    try:
        with database.read() as session:
            checkpoint = export.find(session, name)
            base_model = export.base_model(session, checkpoint)
        home = export.gather(database, blobs, registry, checkpoint)
        export.check(home, blobs, checkpoint.id)
    except (NotFound, CheckpointDamaged) as refused:
        sys.exit(refused.message)
    if merged and home.is_whole_model:
        sys.exit(f"{name} is a whole model already, without an adapter to merge: leave --merged out.")
    if not merged:
        home.write(blobs, folder)
        return
    with tempfile.TemporaryDirectory(prefix="regraft-") as scratch:
        home.write(blobs, Path(scratch))
        merge(registry.get(base_model), settings.model_cache, Path(scratch), folder)


def merge(entry: BaseModelEntry, cache: Path, adapter: Path, folder: Path) -> None:
    """Write a whole model: base + scale * BA, added in float32 and rounded once to the base's own precision."""
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer

    from worker.model import quantized
    from worker.model.architecture import class_of
    from worker.model.policy import DTYPES, read_config, source_of

    source = source_of(entry, cache)
    config = read_config(source)
    plain = quantized.arguments(config, source)
    base = class_of(config).from_pretrained(source, dtype=torch.float32, **plain).to(torch.float32)
    model = PeftModel.from_pretrained(base, adapter).merge_and_unload().to(DTYPES[entry.dtype])
    (quantized.as_plain(model) if plain else model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    # The adapter may have been trained with another template than the base model's.
    for name in [*TEXTS, *([CHAT_TEMPLATE] if (adapter / CHAT_TEMPLATE).exists() else [])]:
        (folder / name).write_bytes((adapter / name).read_bytes())
