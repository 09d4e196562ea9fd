"""Select the sampler of a job: from the model's entry or REGRAFT_SAMPLER, or else by the device."""

from importlib.metadata import version

from core.registry import BaseModelEntry, Device, SamplerName, sampler_of
from core.settings import Settings
from worker.model.policy import Policy
from worker.model.sizing import Plan, Shape
from worker.record.recorder import Recorder
from worker.rollout.samplers import Sampler, vllm
from worker.rollout.samplers.transformers import TransformersSampler


class SamplerMissing(Exception):
    """The configured sampler is not installed on this machine."""


def choose(entry: BaseModelEntry, settings: Settings, device: Device) -> tuple[SamplerName, str]:
    """Return the sampler's name and version. Automatic: vLLM on a GPU if it is installed, else transformers.

    Raises:
        SamplerMissing: the configured sampler is not installed.
    """
    installed = vllm.installed()
    name = sampler_of(entry, settings.sampler, device, vllm_installed=installed is not None)
    if name == "transformers":
        return name, version("transformers")
    if installed is None:
        raise SamplerMissing(
            "This model is sampled with vLLM, which is not installed on the worker. Install it there, or set "
            "REGRAFT_SAMPLER=transformers."
        )
    return "vllm", installed


def build(
    name: SamplerName,
    policy: Policy,
    settings: Settings,
    recorder: Recorder,
    *,
    shape: Shape,
    plan: Plan,
    longest: int,
) -> Sampler:
    """`longest`: tokens of the longest prompt and answer together."""
    if name == "transformers":
        return TransformersSampler(
            policy, max_tokens_in_flight=max(1, plan.cache_bytes // shape.token_cache_bytes)
        )
    return vllm.VllmSampler(
        policy,
        context=longest,
        kv_cache_bytes=plan.cache_bytes,
        threads=settings.torch_threads,
        on_restart=lambda reason: recorder.warn(f"The sampler was restarted: {reason}", {"reason": reason}),
    )
