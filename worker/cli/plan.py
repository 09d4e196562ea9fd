"""`regraft-server plan`: what a job would need and take on GPUs that are not here."""

import argparse
import json
from pathlib import Path

from core.registry import BaseModelEntry, Registry
from core.settings import Settings
from worker.cli.configuration import read_settings
from worker.cli.parser import UsageError
from worker.model import capacity, forecast
from worker.model.forecast import Forecast, NotDivisible, StepSize, UnknownGpus
from worker.model.sizing import DoesNotFit

LORA_RANK = 16


def main(arguments: argparse.Namespace) -> int:
    """Raises UsageError: the model or the GPUs are unknown, or the job does not fit."""
    if arguments.sampling_gpus is not None and not arguments.off_policy_steps:
        raise UsageError(
            "--sampling-gpus is for jobs that sample while they learn: add --off-policy-steps. Other jobs sample on "
            "all GPUs"
        )
    settings = read_settings()
    entry, parallel = entry_of(arguments.model, settings)
    shape = capacity.shape_of(entry)
    if shape is None:
        if _is_file(entry):
            raise UsageError(
                f"{arguments.model} is a GGUF file, and plans need a folder with a config.json: run a job on the model "
                f"once, and plan the folder that this makes below {settings.data_dir / 'models'}"
            )
        raise UsageError(
            f"the config.json of {arguments.model} is not on this machine, or it is not that of a Llama-like decoder"
        )
    if arguments.train == "full" and arguments.lora_rank is not None:
        raise UsageError("--lora-rank has no effect with --train full, which trains all weights")
    size = StepSize(
        prompts=arguments.batch_size,
        group=arguments.group_size,
        prompt=arguments.prompt,
        completion=arguments.max_completion_tokens,
        answer=arguments.answer or arguments.max_completion_tokens // 2,
        rank=arguments.lora_rank or LORA_RANK,
        full=arguments.train == "full",
        has_reference=arguments.kl,
        off_policy_steps=arguments.off_policy_steps,
    )
    try:
        cluster = forecast.cluster_of(arguments.gpus)
        found = forecast.forecast(arguments.model, shape, size, cluster, parallel, arguments.sampling_gpus)
    except (UnknownGpus, NotDivisible, DoesNotFit) as cause:
        raise UsageError(str(cause)) from cause
    print(json.dumps(as_json(found)) if arguments.json else f"{arguments.model}: {found}")
    if not arguments.json and found.tensor_parallel > 1 and parallel is None:
        print(f"  Set `tensor_parallel = {found.tensor_parallel}` in the model's entry of the registry.")
    return 0


def entry_of(model: str, settings: Settings) -> tuple[BaseModelEntry, int | None]:
    """A model of the registry, whose tensor parallel degree is used if it is set, or a folder with a config.json."""
    registry = Registry.load(settings.models_file)
    name = registry.resolve(model)
    if name in registry.models:
        entry = registry.models[name]
        return entry, entry.tensor_parallel if entry.tensor_parallel > 1 else None
    if Path(model).is_dir():
        return BaseModelEntry(path=Path(model).resolve(), dtype="bfloat16", context=4096), None
    raise UsageError(f"{model!r} is neither a model of the registry nor a folder")


def _is_file(entry: BaseModelEntry) -> bool:
    try:
        source = entry.locate()
    except FileNotFoundError:
        return False
    return isinstance(source, Path) and source.is_file()


def as_json(found: Forecast) -> dict[str, object]:
    return {
        "gpus": found.cluster.gpus,
        "placement": "split" if found.sampling_gpus else "colocated",
        "sampling_gpus": found.sampling_gpus,
        "ranks": found.ranks,
        "off_policy_steps": found.size.off_policy_steps,
        "engines": found.engines,
        "tensor_parallel": found.tensor_parallel,
        "degree": found.plan.degree,
        "token_budget": found.plan.token_budget,
        "checkpointed": found.plan.checkpointed,
        "sleeps": found.plan.sleeps,
        "main_memory_bytes": found.plan.main_memory,
        "bytes_per_gpu": found.plan.estimate.total,
        "bytes_per_sampling_gpu": found.sampling_bytes if found.sampling_gpus else None,
        "answers_side_by_side": found.concurrent,
        "seconds": found.seconds,
        "decode_seconds": found.decode_seconds,
        "prefill_seconds": found.prefill_seconds,
        "learning_seconds": found.learning_seconds,
        "gathering_seconds": found.gathering_seconds,
        "sleeping_seconds": found.sleeping_seconds,
        "publishing_seconds": found.publishing_seconds,
    }
