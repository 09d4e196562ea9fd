"""`regraft-server export`: write a checkpoint to a folder in a format of --format."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from core.database.engine import Database
from core.errors import CheckpointDamaged, NotFound
from core.model_templates import CHAT_TEMPLATE
from core.passports import FILE, listed, read, render
from core.registry import BaseModelEntry, Registry
from core.results import export
from core.results.export import TakeHome
from core.results.passport import Issuer
from core.scratch import scratch_folder
from core.settings import Settings
from core.storage.disk import NoRoom, require_room, writing_to
from core.storage.store import BlobStore
from worker.refusals import Refusal

if TYPE_CHECKING:
    from worker.serving import gguf_files

RECIPE = "reproduce.json"
TEXTS = ("README.md", RECIPE)
NO_PASSPORT = "The export has no passport: REGRAFT_PASSPORT_KEY is not set."
OUTPUT = "--output"  # chooses the disk
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
    weight_type: WeightType,
) -> str:
    """Write the checkpoint of `name` (a checkpoint, a model or a job) into `folder`, or exit with an error.

    Returns sentences for the operator, or "".

    Args:
        weight_type: of the format gguf.
    """
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty.")
    registry = Registry.load(settings.models_file)
    try:
        with database.read() as session:
            checkpoint = export.find(session, name)
            base_model = export.base_model(session, checkpoint)
        issuer = Issuer.of(settings)
        home = export.gather(database, blobs, registry, checkpoint, issuer)
        if home.is_whole_model and format in ("merged", "gguf-adapter"):
            sys.exit(
                f"{name} is a whole model already, without an adapter: export the format peft, as it is, or gguf."
            )
        unsigned = NO_PASSPORT if issuer is None else ""
        if format == "peft":
            _download(home, blobs, checkpoint.id, folder)
            return unsigned
        entry = registry.get(base_model)
        with scratch_folder(folder.absolute().parent) as scratch:
            if format != "merged":
                _download(_without_weights(home), blobs, checkpoint.id, scratch)
                refuse_unmapped(entry, settings.model_cache, scratch, with_model=format == "gguf")
            _download(home, blobs, checkpoint.id, scratch)
            with writing_to(folder, OUTPUT):
                note = _write(entry, settings.model_cache, scratch, folder, format, weight_type)
                if issuer is not None:
                    _sign(home, issuer, folder, format)
                return " ".join(filter(None, (note, unsigned)))
    except (NotFound, CheckpointDamaged) as refused:
        sys.exit(refused.message)
    except (NoRoom, Refusal) as refused:
        sys.exit(str(refused))


def _sign(home: TakeHome, issuer: Issuer, folder: Path, format: Format) -> None:
    """Write the passport of the files in `folder`, which has the rest of its statement from that of the checkpoint."""
    statement = read(home.texts[FILE]).statement
    export = {"format": format, "files": listed(folder)}
    (folder / FILE).write_bytes(render(issuer.signer.sign({**statement, "export": export})))


def _write(
    entry: BaseModelEntry,
    cache: Path,
    checkpoint: Path,
    folder: Path,
    format: Format,
    weight_type: WeightType,
) -> str:
    """Write a checkpoint in a format that needs its base model. Returns a sentence for the operator, or ""."""
    match format:
        case "gguf":
            return write_gguf(entry, cache, checkpoint, folder, weight_type)
        case "gguf-adapter":
            write_gguf_adapter(entry, cache, checkpoint, folder)
        case _:
            merge(entry, cache, checkpoint, folder)
    return ""


def _without_weights(home: TakeHome) -> TakeHome:
    return replace(home, files=[file for file in home.files if not file.name.endswith(".safetensors")])


def _download(home: TakeHome, blobs: BlobStore, checkpoint_id: str, folder: Path) -> None:
    """Write the files into `folder`.

    Raises:
        NoRoom: they do not fit on the disk. Nothing is written.
        CheckpointDamaged: a file is missing or does not match its hash. Nothing is written.
    """
    needed = sum(file.bytes for file in home.files)
    require_room(folder, OUTPUT, needed)
    export.check(home.files, blobs, checkpoint_id)
    with writing_to(folder, OUTPUT, needed):
        home.write(blobs, folder)


def merge(entry: BaseModelEntry, cache: Path, adapter: Path, folder: Path) -> None:
    """Write a whole model: base + scale * BA, added in float32 and rounded once to the base's own precision."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    from worker.model import quantized
    from worker.model.policy import DTYPES, read_config, source_of

    source = source_of(entry, cache)
    config, dtype = read_config(source), DTYPES[entry.dtype]
    base = quantized.load_wide(config, source, dtype)
    model = PeftModel.from_pretrained(base, adapter).merge_and_unload().to(dtype)
    require_room(folder, OUTPUT, sum(weight.nbytes for weight in model.parameters()))
    (quantized.as_plain(model) if quantized.format_of(config) else model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    # The adapter may have been trained with another template than the base model's.
    _copy_texts(adapter, folder)


def refuse_unmapped(entry: BaseModelEntry, cache: Path, checkpoint: Path, *, with_model: bool) -> None:
    """Refuse a model without a tested mapping to llama.cpp, before any weights are read.

    Args:
        checkpoint: a folder with the small files of the checkpoint.
        with_model: whether the file has the model and its tokenizer, not an adapter alone.

    Raises:
        Refusal: the architecture, the tokenizer or the format of the weights has no tested mapping.
    """
    from worker.model.policy import read_config
    from worker.serving.gguf_architectures import Architecture
    from worker.serving.gguf_files import refuse_quantized
    from worker.serving.gguf_vocabulary import read_description

    config = read_config(_source_of(entry, cache, checkpoint))
    Architecture(config)
    if with_model:
        refuse_quantized(config)
        read_description(checkpoint)


def write_gguf(
    entry: BaseModelEntry, cache: Path, checkpoint: Path, folder: Path, weight_type: WeightType
) -> str:
    """Write the whole model as a GGUF file with a Modelfile of Ollama, and return a sentence about the latter.

    Args:
        checkpoint: a folder with an adapter in PEFT's format or with a whole model, and its tokenizer.

    Raises:
        Refusal: the model has no tested mapping to llama.cpp, or its files cannot be read.
    """
    from transformers import AutoTokenizer

    from worker.model.policy import read_config
    from worker.serving import gguf_files, modelfile

    source = _source_of(entry, cache, checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    pairs = {} if source == checkpoint else gguf_files.read_pairs(checkpoint)
    file = folder / f"model-{weight_type}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    with gguf_files.written(file) as partial:
        gguf_files.write_model(
            partial,
            weight_type,
            source,
            read_config(source),
            checkpoint,
            tokenizer,
            pairs,
            _origin(entry, checkpoint),
        )
    made = modelfile.modelfile_of(
        tokenizer, file.name, context=entry.context, temperature=_temperature(checkpoint)
    )
    (folder / "Modelfile").write_text(made.text)
    _copy_texts(checkpoint, folder)
    if made.missing_template:
        return (
            f"The Modelfile has no TEMPLATE, because {made.missing_template}: Ollama may send the raw text of "
            "messages. Use llama-server --jinja."
        )
    return "The Modelfile has the chat template of the job."


def write_gguf_adapter(entry: BaseModelEntry, cache: Path, checkpoint: Path, folder: Path) -> None:
    """Write the adapter alone as a GGUF file. Arguments and errors are those of `write_gguf`."""
    from worker.model.policy import read_config
    from worker.serving import gguf_files

    config = read_config(_source_of(entry, cache, checkpoint))
    folder.mkdir(parents=True, exist_ok=True)
    with gguf_files.written(folder / "adapter.gguf") as partial:
        gguf_files.write_adapter(
            partial, config, gguf_files.read_pairs(checkpoint), _origin(entry, checkpoint)
        )
    _copy_texts(checkpoint, folder)


def _source_of(entry: BaseModelEntry, cache: Path, checkpoint: Path) -> Path | str:
    """The whole model: the checkpoint itself, or else its base."""
    from worker.model.policy import source_of

    return checkpoint if (checkpoint / "config.json").exists() else source_of(entry, cache)


def _origin(entry: BaseModelEntry, checkpoint: Path) -> "gguf_files.Origin":
    from worker.serving.gguf_files import Origin

    recipe = _recipe(checkpoint)
    base = recipe["base_model"]["name"]
    return Origin(f"{base} {recipe['job']} step {recipe['checkpoint']['step']}", base, entry.hub)


def _recipe(checkpoint: Path) -> Mapping[str, Any]:
    recipe: Mapping[str, Any] = json.loads((checkpoint / RECIPE).read_text())
    return recipe


def _temperature(checkpoint: Path) -> float:
    """The temperature that the job sampled at; 1, as for requests to the service, if it sampled nothing."""
    return float((_recipe(checkpoint)["resolved_hyperparameters"] or {}).get("temperature") or 1.0)


def _copy_texts(checkpoint: Path, folder: Path) -> None:
    for name in [*TEXTS, *([CHAT_TEMPLATE] if (checkpoint / CHAT_TEMPLATE).exists() else [])]:
        (folder / name).write_bytes((checkpoint / name).read_bytes())
