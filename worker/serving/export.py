"""`regraft-server export`: write a checkpoint to a folder in a format of --format."""

import sys
import tempfile
from pathlib import Path
from typing import Literal

from core.database.engine import Database
from core.errors import CheckpointDamaged, NotFound
from core.model_templates import CHAT_TEMPLATE
from core.registry import BaseModelEntry, Registry
from core.results import export
from core.settings import Settings
from core.storage.store import BlobStore
from worker.refusals import Refusal

TEXTS = ("README.md", "reproduce.json")
Format = Literal["peft", "merged", "gguf", "gguf-adapter"]
WeightType = Literal["f16", "q8_0"]


def export_to(
    settings: Settings,
    database: Database,
    blobs: BlobStore,
    name: str,
    folder: Path,
    *,
    format: Format,
    weights: WeightType,
) -> None:
    """Write the checkpoint of `name` (a checkpoint, a model or a job) into `folder`, or exit with an error.

    Args:
        weights: type of the weights of the format gguf.
    """
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
    if home.is_whole_model and format in ("merged", "gguf-adapter"):
        sys.exit(
            f"{name} is a whole model already, without an adapter: export the format peft, as it is, or gguf."
        )
    if format == "peft":
        home.write(blobs, folder)
        return
    with tempfile.TemporaryDirectory(prefix="regraft-") as scratch:
        home.write(blobs, Path(scratch))
        try:
            if format == "merged":
                merge(registry.get(base_model), settings.model_cache, Path(scratch), folder)
            else:
                kind = None if format == "gguf-adapter" else weights
                write_gguf(registry.get(base_model), settings.model_cache, Path(scratch), folder, kind)
        except Refusal as refused:
            sys.exit(str(refused))


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
    _copy_texts(adapter, folder)


def write_gguf(
    entry: BaseModelEntry, cache: Path, checkpoint: Path, folder: Path, weights: WeightType | None
) -> None:
    """Write a GGUF file and a Modelfile of Ollama.

    Args:
        checkpoint: a folder with an adapter in PEFT's format or with a whole model, and its tokenizer.
        weights: type of the weights of a whole model; None: the adapter alone.

    Raises:
        Refusal: the model has no tested mapping to llama.cpp, or its files cannot be read.
    """
    from transformers import AutoTokenizer

    from worker.model.policy import read_config, source_of
    from worker.serving import gguf_files, modelfile

    is_whole = (checkpoint / "config.json").exists()
    source = checkpoint if is_whole else source_of(entry, cache)
    config = read_config(source)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    pairs = {} if is_whole else gguf_files.read_pairs(checkpoint)
    file = folder / (f"model-{weights}.gguf" if weights else "adapter.gguf")
    folder.mkdir(parents=True, exist_ok=True)
    with gguf_files.written(file) as partial:
        if weights is None:
            gguf_files.write_adapter(partial, config, pairs)
        else:
            gguf_files.write_model(partial, weights, source, config, checkpoint, tokenizer, pairs)
    (folder / "Modelfile").write_text(
        modelfile.modelfile_of(tokenizer, file.name, None if weights else base_file(entry))
    )
    _copy_texts(checkpoint, folder)


def base_file(entry: BaseModelEntry) -> str:
    """The file name that a base model probably has as GGUF."""
    source = entry.path or entry.file or entry.hub
    return f"{Path(str(source)).name.removesuffix('.gguf')}.gguf"


def _copy_texts(checkpoint: Path, folder: Path) -> None:
    for name in [*TEXTS, *([CHAT_TEMPLATE] if (checkpoint / CHAT_TEMPLATE).exists() else [])]:
        (folder / name).write_bytes((checkpoint / name).read_bytes())
