"""A checkpoint as an export: the adapter or whole model, its tokenizer, a model card, and the data to reproduce it."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.engine import Database
from core.database.tables import Checkpoint, Event, File, Job, RolloutPage, TunedModel
from core.errors import CheckpointDamaged, CheckpointNotFound, NotFound
from core.jobs import events
from core.jobs.hyperparameter_groups import names_experts
from core.jobs.methods import OFFLINE, REWARD_MODEL, variant
from core.jobs.verdict import Verdict
from core.masking import hide_in_method
from core.passports import FILE, digest, render
from core.registry import Registry
from core.results import passport, tuned_models
from core.results.lineage import Parent
from core.results.passport import Issuer
from core.step_metrics import StepMetrics
from core.storage import manifests
from core.storage.manifests import Damaged, is_trainers
from core.storage.store import CHUNK_BYTES, BlobCorrupt, BlobNotFound, BlobStore

FORMAT = 1


@dataclass(frozen=True)
class StoredFile:
    """A file in the blob store."""

    name: str
    key: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TakeHome:
    """The files of an exported checkpoint: stored files, and texts generated on export."""

    folder: str
    files: Sequence[StoredFile]
    texts: Mapping[str, bytes]

    @property
    def is_whole_model(self) -> bool:
        """Whether it has all weights of a model, and no adapter."""
        return any(file.name == "config.json" for file in self.files)

    @property
    def tar_bytes(self) -> int:
        sizes = [file.bytes for file in self.files] + [len(text) for text in self.texts.values()]
        return sum(512 + _rounded(size) for size in sizes) + 1024

    @property
    def sha256(self) -> str:
        """Of the names and contents: equal for archives that are equal byte for byte."""
        contents = [(file.name, file.sha256) for file in self.files]
        texts = [(name, hashlib.sha256(text).hexdigest()) for name, text in self.texts.items()]
        return digest([self.folder, contents, texts])

    def files_in(self, start: int, end: int) -> list[StoredFile]:
        """The stored files of whose contents the bytes from `start` to before `end` of the tar have some."""
        found, at = [], 0
        for file in self.files:
            first = at + 512
            if start < first + file.bytes and first < end:
                found.append(file)
            at = first + _rounded(file.bytes)
        return found

    def tar(self, blobs: BlobStore, files: Sequence[StoredFile]) -> Iterator[bytes]:
        """An uncompressed tar in chunks, never as a whole in memory.

        Args:
            files: those that are read; the others have zeros for their contents, for a part of the tar without them.

        Raises:
            BlobNotFound: immediately, if the first file is missing.
            BlobCorrupt: at the end of a file whose bytes do not match its hash.
        """
        return self._tar(blobs, files, [blobs.open(file.key) for file in files[:1]])

    def _tar(
        self, blobs: BlobStore, files: Sequence[StoredFile], opened: list[Iterator[bytes]]
    ) -> Iterator[bytes]:
        for file in self.files:
            yield self._header(file.name, file.bytes)
            if file in files:
                yield from verified(file, opened.pop() if opened else blobs.open(file.key))
            else:
                yield from _zeros(file.bytes)
            yield bytes(_rounded(file.bytes) - file.bytes)
        for name, text in self.texts.items():
            yield self._header(name, len(text)) + text + bytes(_rounded(len(text)) - len(text))
        yield bytes(1024)

    def _header(self, name: str, size: int) -> bytes:
        info = tarfile.TarInfo(f"{self.folder}/{name}")
        info.size, info.mode = size, 0o644
        return info.tobuf(tarfile.USTAR_FORMAT)

    def write(self, blobs: BlobStore, folder: Path) -> None:
        """Write the same files to a folder, each verified against its hash."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            blobs.download(file.key, folder / file.name, sha256=file.sha256)
        for name, text in self.texts.items():
            (folder / name).write_bytes(text)


def check(files: Sequence[StoredFile], blobs: BlobStore, checkpoint_id: str) -> None:
    """Verify stored files of a checkpoint before streaming: a response that has started can only be aborted.

    Raises:
        CheckpointDamaged: a file is missing or does not match its hash.
    """
    for file in files:
        try:
            for _ in verified(file, blobs.open(file.key)):
                pass
        except BlobNotFound:
            raise CheckpointDamaged(checkpoint_id, str(Damaged(file.name, missing=True))) from None
        except BlobCorrupt:
            raise CheckpointDamaged(checkpoint_id, str(Damaged(file.name))) from None


def verified(file: StoredFile, chunks: Iterator[bytes]) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise BlobCorrupt(f"{file.key!r} does not have the sha256 it was stored with")


def _zeros(size: int) -> Iterator[bytes]:
    chunk = bytes(min(size, CHUNK_BYTES))
    while size:
        yield chunk[:size]
        size -= min(size, CHUNK_BYTES)


def _rounded(size: int) -> int:
    return -(-size // 512) * 512


def find(session: Session, name: str) -> Checkpoint:
    """Find a checkpoint by its id, by the name of a tuned model, or by the id of a job (its result).

    Raises:
        NotFound: it does not exist, or the job has no result yet.
    """
    if (job := session.scalar(select(Job).where(Job.id == name))) is not None:
        return delivered(session, job)
    model = session.scalar(select(TunedModel).where(TunedModel.name == name))
    checkpoint = session.scalar(
        select(Checkpoint).where(Checkpoint.id == (model.checkpoint_id if model else name))
    )
    if checkpoint is None:
        raise NotFound(f"There is no checkpoint, tuned model or job {name!r}.")
    return checkpoint


def delivered(session: Session, job: Job) -> Checkpoint:
    """The checkpoint of the job's result.

    Raises:
        NotFound: the job has no result yet, or it was deleted.
    """
    of_model = select(TunedModel.checkpoint_id).where(TunedModel.name == job.fine_tuned_model)
    checkpoint = session.scalar(select(Checkpoint).where(Checkpoint.id.in_(of_model)))
    if checkpoint is None:
        raise NotFound(
            f"Job {job.id} has no fine-tuned model (it is {job.status}); name one of its checkpoints."
        )
    return checkpoint


def base_model(session: Session, checkpoint: Checkpoint) -> str:
    """The registry's id of the base model."""
    return session.scalars(select(Job.model).where(Job.id == checkpoint.job_id)).one()


def of_project(session: Session, project_id: str, checkpoint_id: str) -> Checkpoint:
    """Raise NotFound if the project has no such checkpoint."""
    mine = select(Checkpoint).join(Job, Job.id == Checkpoint.job_id).where(Job.project_id == project_id)
    checkpoint = session.scalar(mine.where(Checkpoint.id == checkpoint_id))
    if checkpoint is None:
        raise CheckpointNotFound(checkpoint_id)
    return checkpoint


def gather(
    database: Database,
    blobs: BlobStore,
    registry: Registry,
    checkpoint: Checkpoint,
    issuer: Issuer | None,
) -> TakeHome:
    """Collect an export, with a passport if there is an `issuer`.

    Holds no database connection while reading the blob store.

    Raises:
        NotFound: the files are missing.
        CheckpointDamaged: the manifest is invalid.
    """
    try:
        manifest = manifests.read(blobs, checkpoint.blob_prefix)
    except Damaged as damage:
        if damage.problem == "missing":
            message = f"The files of checkpoint {checkpoint.id} are missing."
            raise NotFound(message, param="checkpoint_id") from None
        raise CheckpointDamaged(checkpoint.id, str(damage)) from None
    files = [
        StoredFile(file.name, f"{checkpoint.blob_prefix}/{file.name}", file.bytes, file.sha256)
        for file in manifest.files
        if not is_trainers(file.name)
    ]
    with database.read() as session:
        job = session.scalars(select(Job).where(Job.id == checkpoint.job_id)).one()
        recipe = _recipe(session, registry, job, checkpoint, files)
        steps = [step for step in events.metrics(session, job.id) if step.step <= checkpoint.step]
        name = tuned_models.names(session, [checkpoint]).get(
            checkpoint.id, f"{job.id} at step {checkpoint.step}"
        )
        page = session.get(RolloutPage, (job.id, checkpoint.step, "valid"))
        said = None if issuer is None else passport.described(session, issuer, job, checkpoint, name, recipe)
    rank = (
        _highest_rank(blobs, files) if names_experts((job.resolved or {}).get("lora_targets", ())) else None
    )
    texts = {
        "README.md": model_card(name, recipe, steps, rank).encode(),
        "reproduce.json": (json.dumps(recipe, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    if issuer is not None and said is not None:
        said["samples"] = passport.samples(blobs, page, checkpoint.id)
        said["export"] = {"format": "peft", "files": _listed(files, texts)}
        texts[FILE] = render(issuer.signer.sign(passport.plain(said)))
    return TakeHome(f"{job.id}-step-{checkpoint.step}", files, texts)


def _highest_rank(blobs: BlobStore, files: Sequence[StoredFile]) -> int | None:
    """The highest rank of an adapter on experts, for which engines need room. None: it is on no experts.

    Raises:
        NotFound: its config is missing.
    """
    [key] = [file.key for file in files if file.name == "adapter_config.json"]
    try:
        config = json.loads(blobs.read(key))
    except BlobNotFound:
        raise NotFound("The config of the adapter is missing.", param="checkpoint_id") from None
    if not config["target_parameters"]:
        return None
    highest: int = max([config["r"], *config["rank_pattern"].values()])
    return highest


def _listed(files: Sequence[StoredFile], texts: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The files of an export by name, as those of a folder (core/passports.py)."""
    stored = [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in files]
    written = [
        {"name": name, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        for name, text in texts.items()
    ]
    return sorted(stored + written, key=lambda file: str(file["name"]))


def _recipe(
    session: Session,
    registry: Registry,
    job: Job,
    checkpoint: Checkpoint,
    files: Sequence[StoredFile],
) -> dict[str, Any]:
    """reproduce.json: `request` recreates the job once the two files are uploaded."""
    method = {"hyperparameters": job.body["hyperparameters"]}
    kept = ("mode", "teacher", "grader", "shadow_grader", "tools", "environment", "max_episode_steps")
    method |= hide_in_method({name: job.body[name] for name in kept if name in job.body})
    if job.body.get("response_format"):
        method["response_format"] = job.body["response_format"]
    parent = Parent.of(job)
    request = {
        "model": job.model if parent is None else parent.model,
        "training_file": job.training_file,
        "seed": job.seed,
        "method": {"type": job.method, job.method: method},
    }
    if job.validation_file:
        request["validation_file"] = job.validation_file
    if job.suffix:
        request["suffix"] = job.suffix
    return {
        "format": FORMAT,
        "regraft": version("regraft-server"),
        "job": job.id,
        "request": request,
        "data": {
            "training_file": _file(session, job, job.training_file),
            **({"validation_file": _file(session, job, job.validation_file)} if job.validation_file else {}),
        },
        "grader_sha256": digest(method["grader"]) if "grader" in method else None,
        "resolved_hyperparameters": job.resolved,
        "base_model": _base(registry, job.model) | _quantization(session, job) | _trained_on(session, job),
        "lineage": None if parent is None else parent.as_data(),
        "sampler": _announced(session, job, "sampler"),
        "grader_environments": _announced(session, job, "grader_environments") or [],
        # The delivered checkpoint against the start of the job; null for any other checkpoint of the job.
        "verdict": job.verdict if job.verdict and job.verdict["step"] == checkpoint.step else None,
        "checkpoint": {
            "id": checkpoint.id,
            "step": checkpoint.step,
            "valid_reward": checkpoint.valid_reward,
            "valid_difference": checkpoint.metrics.get("full_valid_difference"),
            "files": [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in files],
        },
    }


def _trained_on(session: Session, job: Job) -> dict[str, Any]:
    """The files of the base model when the job loaded it; None: unknown. `sampled_sha256` is not of whole contents."""
    return {
        "sampled_sha256": _announced(session, job, "base_sampled_sha256"),
        "revision": _announced(session, job, "base_revision"),
    }


def _announced(session: Session, job: Job, key: str) -> Any:
    """The value of `key` in the data of the job's latest message event that has it; None without one."""
    mine = select(Event).where(
        Event.job_id == job.id, Event.type == "message", Event.data[key].as_string().is_not(None)
    )
    event = session.scalar(mine.order_by(Event.seq.desc()).limit(1))
    return event.data[key] if event else None


def _file(session: Session, job: Job, file_id: str | None) -> dict[str, Any]:
    """The file of a job by id; a deleted file's row, with its hash, may be gone."""
    mine = select(File).where(File.id == file_id, File.project_id == job.project_id)
    file = session.scalar(mine)
    if file is None:
        return {"id": file_id, "filename": None, "bytes": None, "sha256": None}
    return {"id": file.id, "filename": file.filename, "bytes": file.bytes, "sha256": file.sha256}


def _base(registry: Registry, name: str) -> dict[str, Any]:
    """The registry's entry, without the local path on the training machine."""
    entry = registry.models.get(name)
    if entry is None:
        return {"name": name}
    shown = entry.model_dump(
        mode="json", exclude_none=True, include={"package", "file", "hub", "dtype", "context"}
    )
    return {"name": name, **({"folder": entry.path.name} if entry.path else {}), **shown}


def _quantization(session: Session, job: Job) -> dict[str, Any]:
    """The format of the base model's quantized weights, as the worker announced it; empty if they are not quantized."""
    found = _announced(session, job, "quantization")
    return {} if found is None else {"quantization": found}


TASKS = {REWARD_MODEL: "text-classification"}
TAGS = {
    "supervised": "supervised-fine-tuning",
    "dpo": "dpo",
    "reinforcement": "reinforcement-fine-tuning",
    "distillation": "distillation",
    REWARD_MODEL: "reward-model",
}
TRAINED_BY = {
    "supervised": "supervised fine-tuning",
    "dpo": "preference fine-tuning",
    "reinforcement": "reinforcement fine-tuning",
    "distillation": "distillation from a teacher",
    REWARD_MODEL: "a loss of preferences as a reward model",
}


def model_card(
    name: str, recipe: Mapping[str, Any], steps: Sequence[StepMetrics], expert_rank: int | None = None
) -> str:
    """README.md with the front matter of the Hugging Face Hub.

    Args:
        expert_rank: the highest rank of an adapter on experts.
    """
    base, checkpoint = recipe["base_model"], recipe["checkpoint"]
    requested = recipe["request"]["method"]
    method = requested["type"]
    known = base.get("hub") or base["name"]
    is_whole = (recipe["resolved_hyperparameters"] or {}).get("train") == "full"
    samples = variant(method, requested[method]) not in OFFLINE
    card = io.StringIO()
    card.write(_front_matter(base.get("hub"), method, is_whole=is_whole))
    card.write(f"# {name}\n\n")
    what = f"`{known}` with all weights trained" if is_whole else f"A LoRA adapter for `{known}`, trained"
    card.write(
        f"{what} by {TRAINED_BY[method]} with regraft {recipe['regraft']} "
        f"(job `{recipe['job']}`, step {checkpoint['step']}).\n\n"
    )
    if parent := recipe["lineage"]:
        card.write(
            f"It was trained further from `{parent['model']}` (job `{parent['job_id']}`, step {parent['step']}).\n\n"
        )
    if is_whole:
        card.write(f"```python\n{WHOLE_LOADING_CODE}```\n\n")
    else:
        _write_loading(card, base, method)
    if expert_rank is not None:
        card.write(
            f"The adapter is on experts, and its highest rank is {expert_rank}: start vLLM with a `--max-lora-rank` of "
            f"at least {expert_rank}.\n\n"
        )
    if samples:
        _write_rewards(card, recipe, steps)
    else:
        _write_losses(card, recipe, steps)
    _write_data(card, recipe)
    card.write("\n## Hyperparameters\n\n| | |\n|---|---|\n")
    card.write(f"| seed | {recipe['request']['seed']} |\n")
    if samples:
        card.write(f"| sampler | {recipe['sampler'] or 'unknown'} |\n")
    for key, value in (recipe["resolved_hyperparameters"] or {}).items():
        card.write(f"| {key} | {value} |\n")
    card.write("\n`reproduce.json` has the whole request, and the hash of every file here.\n")
    return card.getvalue()


def _front_matter(hub: str | None, method: str, *, is_whole: bool) -> str:
    front = [
        # Readers of the front matter take it for an id of the hub.
        *(["base_model: " + json.dumps(hub)] if hub else []),
        f"library_name: {'transformers' if is_whole else 'peft'}",
        f"pipeline_tag: {TASKS.get(method, 'text-generation')}",
    ]
    tags = [*([] if is_whole else ["lora"]), "regraft", TAGS[method]]
    return "---\n" + "\n".join([*front, f"tags: [{', '.join(tags)}]"]) + "\n---\n\n"


def _write_data(card: io.StringIO, recipe: Mapping[str, Any]) -> None:
    """The hashes of the files and of the grader."""
    title = "Data and grader" if recipe["grader_sha256"] else "Data"
    card.write(f"\n## {title}\n\n| | sha256 |\n|---|---|\n")
    for role, file in recipe["data"].items():
        card.write(
            f"| {role} `{file['filename'] or file['id']}` | `{file['sha256'] or 'unknown: deleted'}` |\n"
        )
    if recipe["grader_sha256"]:
        card.write(f"| grader | `{recipe['grader_sha256']}` |\n")


WHOLE_LOADING_CODE = (
    "from transformers import AutoModelForCausalLM\n\n"
    'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER", dtype="auto").eval()\n'
)


BASE_FOLDER = "FOLDER OF THE BASE MODEL"


def loading_code(base: str, method: str) -> str:
    """Python that loads the adapter in "THIS FOLDER" on a base model of transformers.

    Args:
        base: an id of the hub, or a folder.
    """
    kind, labels, padding = "AutoModelForCausalLM", "", ""
    if method == REWARD_MODEL:
        kind, labels = "AutoModelForSequenceClassification", ", num_labels=1"
        # Classifiers read at the last token that is not for padding. Many models pad with the token that ends answers.
        padding = "base.config.get_text_config().pad_token_id = None  # read at the very last token\n"
    return (
        f"from peft import PeftModel\nfrom transformers import {kind}\n\n"
        f'base = {kind}.from_pretrained("{base}"{labels})\n{padding}'
        'model = PeftModel.from_pretrained(base, "THIS FOLDER").eval()\n'
    )


def _write_loading(card: io.StringIO, base: Mapping[str, Any], method: str) -> None:
    hub = base.get("hub")
    if hub is None:
        card.write(
            f"`{base['name']}` is the name of {_source(base)} in the registry of the service, and not an id of the "
            f"Hugging Face Hub: replace `{BASE_FOLDER}` by the path of your copy of this model in Hugging Face "
            "format.\n\n"
        )
    card.write(f"```python\n{loading_code(hub or BASE_FOLDER, method)}```\n\n")
    if quantization := base.get("quantization"):
        card.write(
            f"The files of the base hold {quantization} weights, and the adapter was trained on their values in "
            f"{base.get('dtype', 'its precision')}. On other weights of the same model, such as those in bfloat16, it "
            "gives other answers. The export format `merged` has these values with the adapter added, without "
            "quantization.\n\n"
        )
    if method == REWARD_MODEL:
        card.write(
            "Its output for one conversation that ends with the token that ends the answer is the reward; `mean` and "
            "`std` in `reward_model.json` make a score of it: (reward - mean) / std. To score several at once, set "
            "`pad_token_id` to a token that conversations do not contain.\n\n"
        )


def _source(base: Mapping[str, Any]) -> str:
    """Name the source of a base model that is not from the hub, without a path of the service's machine."""
    if "package" in base:
        return f"the file `{base['file']}` of the Python package `{base['package']}`"
    return "a local model"


def _start(recipe: Mapping[str, Any]) -> str:
    lineage = recipe["lineage"]
    return "the base model" if lineage is None else f"`{lineage['model']}`"


def _write_losses(card: io.StringIO, recipe: Mapping[str, Any], steps: Sequence[StepMetrics]) -> None:
    card.write(f"## Losses\n\nStep 0 is {_start(recipe)}.\n\n")
    card.write("| step | whole validation file | training |\n|---|---|---|\n")
    last = steps[-1].step if steps else 0
    for step in steps:
        if step.full_valid_loss is not None or step.step == last:
            card.write(f"| {step.step} | {_number(step.full_valid_loss)} | {_number(step.train_loss)} |\n")


def _write_rewards(card: io.StringIO, recipe: Mapping[str, Any], steps: Sequence[StepMetrics]) -> None:
    card.write(f"## Compared with {_start(recipe)}\n\n{_comparison(recipe)}\n\n")
    card.write(
        "## Rewards\n\nMean reward on the validation file with its standard error; "
        f"step 0 is {_start(recipe)}.\n\n"
    )
    card.write("| step | validation | standard error | training |\n|---|---|---|---|\n")
    for step in steps:
        if step.full_valid_mean_reward is not None:
            card.write(
                f"| {step.step} | {_number(step.full_valid_mean_reward)} "
                f"| {_number(step.full_valid_stderr)} | {_number(step.train_mean_reward)} |\n"
            )


def _comparison(recipe: Mapping[str, Any]) -> str:
    if recipe["verdict"] is not None:
        verdict = Verdict.read(recipe["verdict"])
        warning = {
            "worse": f"**This model is worse than {_start(recipe)} on these rows.** ",
            "no_difference": f"**No difference to {_start(recipe)} was found.** ",
            "too_few": f"**There are too few rows to compare it with {_start(recipe)}.** ",
            "improved": "",
        }[verdict.outcome]
        return (
            f"{warning}{verdict.sentence()} The checkpoint was chosen on these rows, so its reward on new ones "
            "is probably a little lower."
        )
    difference = recipe["checkpoint"]["valid_difference"]
    if difference is None:
        return f"This checkpoint was not compared with {_start(recipe)}."
    return f"The mean paired difference on the validation rows is {difference:+.4f}."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
