"""The base model of a job, known from its config alone, and what its worker can do with it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from core.database.tables import Job
from core.jobs import full
from core.jobs.hyperparameter_places import param_at
from core.model_checks import ModelChecks, installed_versions
from core.registry import BaseModelEntry, Device, Registry, SamplerName
from core.settings import Settings
from worker.attempt import Attempt
from worker.checks import compatibility
from worker.device import select_device
from worker.model import full as full_policy
from worker.model import memory, quantized
from worker.model.architecture import refusing
from worker.model.policy import DTYPES, read_config, source_of
from worker.model.sizing import Shape
from worker.refusals import UserMistake
from worker.sampling import choice
from worker.sampling.placement import NO_ENGINE, ONE_ENGINE, NotPlaceable, Placement
from worker.sharing.base import OWN_ENGINE, RunsAlone


class TooFewGpus(Exception):
    """There are fewer GPUs than ranks; each rank needs its own."""


@dataclass(frozen=True)
class BaseModel:
    """The job's model, known from its config alone, and the sampler for it."""

    entry: BaseModelEntry
    source: Path | str
    shape: Shape
    device: Device
    sampler: SamplerName
    sampler_version: str
    rows: bool = False  # it is known or expected to be computed in rows
    quantization: str = ""  # the format of its quantized weights
    precision: str = ""  # how these are computed with, in words
    quantizes_activations: bool = False  # the sampler may, and the trainer does not
    engines: Placement = ONE_ENGINE  # of vLLM
    fleet: tuple[str, ...] = ()  # the addresses of the fleet that samples instead

    @property
    def sampler_name(self) -> str:
        """The sampler with its version."""
        return f"{self.sampler} {self.sampler_version}"


def inspect_model(
    name: str,
    settings: Settings,
    ranks: int,
    *,
    off_policy: bool = False,
    samples: bool = True,
    full: bool = False,
) -> BaseModel:
    """Read the model's config and select its sampler. Refuse what is not supported here.

    Args:
        off_policy: whether the job samples a batch while it learns from the one before.
        samples: whether it samples at all.
        full: whether all weights are trained.

    Raises:
        UserMistake: its sampler is missing, cannot sample it, needs more GPUs than a job has, or cannot be divided.
        UnsupportedModel: the architecture is not computed correctly here, or vLLM has no kernel for its weights.
        GpuUnusable: torch cannot use the GPU of this machine.
        TooFewGpus: this machine has fewer GPUs than REGRAFT_RANKS and REGRAFT_SAMPLING_GPUS together.
    """
    registry = Registry.load(settings.models_file)
    entry = registry.get(name)
    fleet = settings.samplers.get(registry.resolve(name), ())
    device = select_device(settings)
    try:
        sampler, version = choice.choose(entry, settings, device, fleet=bool(fleet), adapters=not full)
    except choice.SamplerMissing as cause:
        raise UserMistake("sampler_unavailable", str(cause), "model") from cause
    if device == "cuda" and ranks + settings.sampling_gpus > torch.cuda.device_count():
        raise TooFewGpus(
            f"REGRAFT_RANKS is {ranks}, REGRAFT_SAMPLING_GPUS is {settings.sampling_gpus}, and there are "
            f"{torch.cuda.device_count()} GPUs here."
        )
    try:
        engines = NO_ENGINE
        if samples and not fleet:
            engines = choice.place(sampler, entry, settings, device, ranks, off_policy=off_policy)
    except NotPlaceable as cause:
        raise UserMistake("sampler_unavailable", str(cause), "model") from cause
    source = source_of(entry, settings.model_cache)
    config: PretrainedConfig = read_config(source)
    compatibility.refuse_by_config(config, entry.context)
    if sampler == "vllm" and not fleet:
        quantized.refuse_without_kernel(config, entry.dtype, device)
    quantization = quantized.format_of(config)
    precision = quantized.described(config, DTYPES[entry.dtype], sampler)
    quantizes_activations = sampler == "vllm" and quantized.quantizes_activations(config)
    with refusing(config):
        shape = memory.shape_of(config, DTYPES[entry.dtype])
        checked = ModelChecks(settings.model_cache).latest(entry, installed_versions())
        rows = checked.forward == "rows" if checked is not None else memory.expects_rows(config)
    if full:
        full_policy.refuse(config, shape.parameters)
    refuse_undivided(shape, engines)
    return BaseModel(
        entry,
        source,
        shape,
        device,
        sampler,
        version,
        rows,
        quantization,
        precision,
        quantizes_activations,
        engines,
        fleet,
    )


def refuse_undivided(shape: Shape, engines: Placement) -> None:
    """Raises UserMistake: the model's heads cannot be divided over the GPUs of an engine."""
    if shape.heads % engines.tensor_parallel:
        raise UserMistake(
            "sampler_unavailable",
            f"`tensor_parallel = {engines.tensor_parallel}` in the model's entry does not divide its {shape.heads} "
            "attention heads.",
            "model",
        )


def refuse_full(job: Job, settings: Settings) -> None:
    """Raises UserMistake: this worker cannot train or sample all weights of the model."""
    name = Registry.load(settings.models_file).resolve(job.model)
    problem = full.several_machines(settings) or full.problem(name, settings)
    if problem:
        raise UserMistake("unsupported_parameter", problem, param_at(job.method, "train"))


def refuse_to_share(attempt: Attempt, base: BaseModel) -> None:
    """Check whether the job can share its base model with others, if that is what it is to do.

    Raises:
        RunsAlone: it cannot. It can run alone.
        BaseLost: the process that holds the base has ended.
    """
    if attempt.shared is None:
        return
    if base.sampler == "vllm" and not base.fleet:
        raise RunsAlone(OWN_ENGINE)
    attempt.shared.base.refuse_other(base.entry, base.source)


def shared_by(attempt: Attempt, base: BaseModel) -> Callable[[], PreTrainedModel] | None:
    """What loads the base model from the process that holds it; None: the job loads its own."""
    if attempt.shared is None:
        return None
    if base.device == "cuda":
        # A job that needs more than its part fails by itself, and not its neighbor.
        own = attempt.shared.base.memory(base.shape.weight_bytes) - base.shape.weight_bytes
        torch.cuda.set_per_process_memory_fraction(own / torch.cuda.get_device_properties(0).total_memory)
    return attempt.shared.load
