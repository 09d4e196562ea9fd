"""Select the sampler of a job: from the model's entry or REGRAFT_SAMPLER, or else by the device."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from core.registry import BaseModelEntry, Device, SamplerName, sampler_of, vllm_problem
from core.settings import Settings
from worker.model.full import FullPolicy
from worker.model.policy import Policy
from worker.model.sizing import MAX_TOKENS_IN_FLIGHT, MemoryPlan, Shape
from worker.packages import vllm_version
from worker.sampling import Sampler, placement, published, vllm
from worker.sampling.fleet import FleetConfig
from worker.sampling.own import LowerEngine
from worker.sampling.placement import NotPlaceable, Placement
from worker.sampling.transformers import TransformersSampler
from worker.sampling.weights import AdapterStore, WeightFiles

Warn = Callable[[str, dict[str, Any]], None]  # a message of the job, and its data


class SamplerMissing(Exception):
    """The configured sampler is not installed on this machine, or cannot sample the model here."""


def choose(
    entry: BaseModelEntry,
    settings: Settings,
    device: Device,
    installed: Callable[[], str | None] = vllm_version,
    *,
    fleet: bool = False,
    adapters: bool = True,
) -> tuple[SamplerName, str]:
    """Return the sampler's name and version. Automatic: as core.registry.sampler_of says.

    Args:
        installed: returns the version of vLLM, or None.
        fleet: whether the model has one, which is used then. It refuses a model that it cannot sample itself.
        adapters: whether adapters are trained, not all weights.

    Raises:
        SamplerMissing: the configured sampler is not installed, cannot sample the model on this device, or is another
            one than the fleet's.
    """
    if fleet:
        if sampler_of(entry, settings.sampler, None) == "transformers":
            raise SamplerMissing(
                "This model has samplers in REGRAFT_SAMPLERS, which run vLLM, and is configured to be sampled with "
                "transformers. Remove one of them."
            )
        return "vllm", "fleet"
    version_of_vllm = installed()
    has_vllm = version_of_vllm is not None
    name = sampler_of(entry, settings.sampler, device, vllm_installed=has_vllm, adapters=adapters)
    if name == "transformers":
        return name, version("transformers")
    if version_of_vllm is None:
        raise SamplerMissing(
            "This model is sampled with vLLM, which is not installed on the worker. Install it there, on a GPU with "
            "pip install 'regraft-server[vllm]', or set REGRAFT_SAMPLER=transformers."
        )
    if adapters and (problem := vllm_problem(entry, device)):
        raise SamplerMissing(problem)
    return "vllm", version_of_vllm


def place(
    name: SamplerName,
    entry: BaseModelEntry,
    settings: Settings,
    device: Device,
    ranks: int,
    *,
    off_policy: bool = False,
) -> Placement:
    """Return where the model's engines run, in a job with `ranks` learning processes on this machine.

    Raises:
        NotPlaceable: it has too few GPUs, or the sampler has no engines to divide or to place elsewhere.
    """
    if name == "transformers":
        if entry.tensor_parallel > 1 or settings.sampling_gpus:
            what = (
                f"The model's entry has `tensor_parallel = {entry.tensor_parallel}`"
                if entry.tensor_parallel > 1
                else f"REGRAFT_SAMPLING_GPUS is {settings.sampling_gpus}"
            )
            raise NotPlaceable(
                f"{what}, which is for vLLM, and this worker samples the model with transformers. Remove it, or set "
                "REGRAFT_SAMPLER=vllm."
            )
        return placement.ONE_ENGINE
    gpus = ranks + settings.sampling_gpus
    return placement.place(
        engines=settings.engines,
        tensor_parallel=entry.tensor_parallel,
        device=device,
        gpus=placement.gpus_of_job(os.environ, gpus) if device == "cuda" else (),
        sampling_gpus=settings.sampling_gpus,
        off_policy=off_policy,
    )


def build(
    name: SamplerName,
    policy: Policy,
    settings: Settings,
    warn: Warn,
    *,
    shape: Shape,
    plan: MemoryPlan,
    store: AdapterStore,
    engines: Placement = placement.ONE_ENGINE,
    fleet: FleetConfig | None = None,
    continues: bool = False,
    lower: LowerEngine | None = None,
    store_coverage: Callable[[Policy], None] = lambda policy: None,
) -> Sampler:
    """Build the sampler.

    Args:
        warn: adds an event to the job's.
        store: where a fleet finds the adapter.
        fleet: of the model, if it has one.
        continues: whether answers in flight continue with the policy after an update.
        lower: as OwnEngines says.
        store_coverage: called when the sampler has left layers of the policy out.
    """
    if name == "transformers":
        token, beside = shape.own_token_bytes, 0
        if policy.route.forward == "rows" and policy.route.decode != "recomputed":
            token, beside = (max(1, bytes_each) for bytes_each in policy.row_bytes())
        return TransformersSampler(
            policy,
            # Without a cache the plan's bytes say nothing, and each step computes all tokens in flight again.
            max_tokens_in_flight=min(MAX_TOKENS_IN_FLIGHT, max(1, plan.cache_bytes // token)),
            row_tokens=math.ceil(beside / token),
        )
    on_left_out = partial(report_left_out, warn, store_coverage)
    if fleet is not None:
        return vllm.with_fleet(
            policy, fleet, store, on_lost=partial(report_lost, warn), on_left_out=on_left_out
        )
    weights = None
    if isinstance(policy, FullPolicy):
        parent = published.parent_for(shape.weight_bytes, policy.device.type, plan.main_memory)
        weights = WeightFiles(policy, published.PublishedWeights(policy, parent))
    return vllm.with_own_engines(
        policy,
        weights=weights,
        placement=engines,
        sizes=plan.engine,
        kv_cache_bytes=plan.cache_bytes,
        threads=settings.torch_threads,
        sleeps=plan.sleeps,
        continues=continues,
        lower=lower,
        on_restart=lambda reason: warn(f"The sampler was restarted: {reason}", {"reason": reason}),
        on_left_out=on_left_out,
    )


def report_lost(warn: Warn, reason: str) -> None:
    warn(f"A sampler of the fleet was lost: {reason}", {"reason": reason})


def report_left_out(
    warn: Warn, store_coverage: Callable[[Policy], None], policy: Policy, modules: Sequence[str]
) -> None:
    """Warn of the layers that vLLM cannot adapt, and correct the coverage that the job has reported and stored."""
    store_coverage(policy)
    names = f"{', '.join(modules[:3])}{', ...' if len(modules) > 3 else ''}"
    warn(
        f"vLLM puts no adapter on {len(modules)} of the layers, so they are not trained: {names}. "
        f"The adapter is on {policy.coverage}.",
        {"modules": list(modules), **policy.coverage.as_data()},
    )
