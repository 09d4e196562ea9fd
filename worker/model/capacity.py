"""Check whether models of the registry, and jobs, fit on the GPUs of their class, from each model's config.json.

For processes without a GPU and without torch: the hardware file has the memory of each class. If the memory
or the config is unknown, nothing is refused, and the run makes the same check before it loads the weights.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.jobs import full, hyperparameters
from core.jobs.hyperparameters import Hyperparameters
from core.model_memory import ModelMemories, ModelMemory
from core.model_templates import is_reasoning
from core.outages import outage
from core.registry import BaseModelEntry, Registry, sampler_of
from core.settings import Settings
from core.units import GIB
from worker.model import sizing
from worker.model.sizing import MemoryPlan, Shape, Workload
from worker.refusals import UnsupportedModel

log = logging.getLogger(__name__)

BYTES_EACH = {"float32": 4, "bfloat16": 2}


def config_of(entry: BaseModelEntry) -> Mapping[str, Any] | None:
    """Return the model's config.json if it is on this machine. Downloads nothing and converts no GGUF file."""
    try:
        source = entry.locate()
    except FileNotFoundError:
        return None
    file = source / "config.json" if isinstance(source, Path) else _cached(source)
    try:
        config = json.loads(file.read_text()) if file is not None else None
    except (OSError, ValueError) as cause:
        if outage(cause) is not None:
            raise
        return None
    return config if isinstance(config, dict) else None


def _cached(hub_id: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found) if isinstance(found, str) else None


def shape_of(entry: BaseModelEntry) -> Shape | None:
    """Return the model's shape.

    None: its config is not on this machine, or it is not a Llama-like decoder, or jobs on it are refused.
    """
    config = config_of(entry)
    try:
        return None if config is None else sizing.shape_of_config(config, BYTES_EACH[entry.dtype])
    except UnsupportedModel:
        return None


def memories(settings: Settings, registry: Registry) -> Iterator[tuple[BaseModelEntry, ModelMemory]]:
    """Yield what each model needs for its full context on a GPU of its class, where both are known."""
    for name, entry in registry.models.items():
        gpu_class = entry.gpu_class or settings.gpu_class
        gpu_gib, shape = settings.hardware.of(gpu_class).gpu_memory_gib, shape_of(entry)
        if not gpu_gib or shape is None:
            continue
        half = entry.context // 2
        work = Workload(16, half, entry.context - half, entry.context)
        try:
            plan = _planned(settings, name, entry, shape, work, None)
        except sizing.DoesNotFit as cause:
            problem = f"{cause} Jobs with shorter prompts and answers may fit."
            yield entry, ModelMemory(gpu_class=gpu_class, gpu_gib=gpu_gib, needed_gib=None, problem=problem)
            continue
        if plan is not None:
            needed = round(plan.estimate.total / GIB, 1)
            yield entry, ModelMemory(gpu_class=gpu_class, gpu_gib=gpu_gib, needed_gib=needed, problem=None)


def problems(settings: Settings, registry: Registry) -> Iterator[str]:
    """Yield a sentence for each model whose full context does not fit on a GPU of its class."""
    return (memory.problem for _, memory in memories(settings, registry) if memory.problem is not None)


def job_problem(
    settings: Settings,
    name: str,
    entry: BaseModelEntry,
    *,
    gpu_class: str,
    gpus: int | None = None,
    requested: Hyperparameters,
    rows: int,
    valid_rows: int,
) -> str | None:
    """Return why the job cannot run on a GPU of its class. None: it can, or this is unknown.

    Counts each prompt as one token, because there is no tokenizer here, so a refused job would not fit with its real
    prompts either.

    Args:
        gpus: of each node, if the job chose them.
    """
    shape = shape_of(entry)
    if shape is None:
        return None
    reasons = is_reasoning(entry, settings.model_cache, requested.advanced.sampling.chat_template)
    resolved = hyperparameters.resolve(
        requested, rows=rows, parameters=shape.parameters, context=entry.context, reasons=reasons
    )
    work = sizing.workload(
        rank=resolved.lora_rank,
        targets=resolved.lora_targets,
        full=resolved.train == "full",
        references=resolved.reference_copies,
        prompt=1,
        completion=resolved.max_completion_tokens,
        batch=resolved.batch_size,
        group=resolved.group_size,
        valid_rows=valid_rows,
        eval_samples=resolved.eval_samples,
        off_policy_steps=resolved.off_policy_steps,
        has_values=resolved.has_values,
        undoes=resolved.step_kl > 0,
        limit=entry.context,
    )
    takes_turns = not (resolved.overlap or resolved.off_policy_steps)
    try:
        _planned(settings, name, entry, shape, work, gpu_class, gpus=gpus, may_sleep=takes_turns)
    except sizing.DoesNotFit as cause:
        return str(cause)
    return None


def too_large_for_full(entry: BaseModelEntry) -> str | None:
    """Return why not all weights of the model can be trained. None: they can, or its size is unknown."""
    shape = shape_of(entry)
    return None if shape is None else full.too_large(shape.parameters) or None


def _planned(
    settings: Settings,
    name: str,
    entry: BaseModelEntry,
    shape: Shape,
    work: Workload,
    gpu_class: str | None,
    *,
    gpus: int | None = None,
    may_sleep: bool = True,
) -> MemoryPlan | None:
    """Return the plan of a job on a GPU of its class. None: there is no GPU, or its memory is unknown.

    Raises:
        DoesNotFit: the job needs more memory.
    """
    gpu_class = gpu_class or entry.gpu_class or settings.gpu_class
    memory = settings.hardware.of(gpu_class).gpu_memory_gib
    if not memory:  # no GPU, or unknown
        return None
    settings = settings.of_class(gpu_class, gpus)
    has_fleet = name in settings.samplers and not work.full
    sampler = "vllm" if has_fleet else sampler_of(entry, settings.sampler, "cuda", adapters=not work.full)
    assert sampler is not None, "machines with a GPU have a sampler"
    there = sizing.machine(
        settings,
        "cuda",
        int(memory * GIB),
        sampler,
        gpu_class=gpu_class,
        engines=0 if has_fleet else 1,
        tensor_parallel=1 if has_fleet else entry.tensor_parallel,
        may_sleep=may_sleep,
    )
    return sizing.plan_sharded(name, shape, work, there, settings.ranks)


def note(settings: Settings) -> None:
    """On worker start-up, store the needs of the models for the API, and log those that do not fit."""
    stored = ModelMemories(settings.model_cache)
    for entry, memory in memories(settings, Registry.load(settings.models_file)):
        stored.keep(entry, memory)
        if memory.problem is not None:
            log.warning("%s", memory.problem)
