"""Which sampler a job gets: the model's, unless REGRAFT_SAMPLER says otherwise. Never another one in its place."""

from importlib.metadata import version

from core.registry import BaseModelEntry, SamplerName
from core.settings import Settings
from worker.policy import Policy
from worker.recorder import Recorder
from worker.samplers import Sampler, vllm
from worker.samplers.transformers import TransformersSampler


class SamplerMissing(Exception):
    """The sampler a job should use is not installed on this machine."""


def choose(entry: BaseModelEntry, settings: Settings) -> tuple[SamplerName, str]:
    """The sampler's name and version.

    Raises:
        SamplerMissing: it is not installed here.
    """
    name = entry.sampler if settings.sampler == "registry" else settings.sampler
    found = vllm.installed() if name == "vllm" else version("transformers")
    if found is None:
        raise SamplerMissing(
            "This model is sampled with vLLM, which is not installed on the worker. Install it there, or set "
            "REGRAFT_SAMPLER=transformers."
        )
    return name, found


def build(name: SamplerName, policy: Policy, settings: Settings, recorder: Recorder) -> Sampler:
    if name == "transformers":
        return TransformersSampler(policy)
    return vllm.VllmSampler(
        policy,
        kv_cache_bytes=int(settings.kv_cache_gib * 2**30),
        threads=settings.torch_threads,
        on_restart=lambda reason: recorder.warn(f"The sampler is restarted: {reason}", {"reason": reason}),
    )
