"""Which sampler a job gets: the model's, unless REGRAFT_SAMPLER says otherwise. Never another one in its place."""

from collections.abc import Sequence
from importlib.metadata import version

from core.methods import Resolved
from core.registry import BaseModelEntry, SamplerName, sampler_of
from core.settings import Settings
from worker.memory import Shape
from worker.policy import Policy
from worker.recorder import Recorder
from worker.samplers import Sampler, vllm
from worker.samplers.transformers import MAX_TOKENS_IN_FLIGHT, TransformersSampler
from worker.types import Prompt


class SamplerMissing(Exception):
    """The sampler a job should use is not installed on this machine."""


def choose(entry: BaseModelEntry, settings: Settings) -> tuple[SamplerName, str]:
    """The sampler's name and version.

    Raises:
        SamplerMissing: it is not installed here.
    """
    name = sampler_of(entry, settings.sampler)
    found = vllm.installed() if name == "vllm" else version("transformers")
    if found is None:
        raise SamplerMissing(
            "This model is sampled with vLLM, which is not installed on the worker. Install it there, or set "
            "REGRAFT_SAMPLER=transformers."
        )
    return name, found


def cache_bytes(
    name: SamplerName,
    settings: Settings,
    shape: Shape,
    asked: Resolved,
    train: Sequence[Prompt],
    valid: Sequence[Prompt],
) -> int:
    """Keys and values that are alive at once, at most."""
    if name == "vllm":
        return int(settings.kv_cache_gib * 2**30)
    longest = max(len(prompt.ids) for prompt in [*train, *valid])
    training = asked.batch_size * (longest + asked.group_size * asked.max_completion_tokens)
    validating = len(valid) * (longest + asked.eval_samples * asked.max_completion_tokens)
    return shape.token_cache_bytes * min(MAX_TOKENS_IN_FLIGHT, max(training, validating))


def build(name: SamplerName, policy: Policy, settings: Settings, recorder: Recorder) -> Sampler:
    if name == "transformers":
        return TransformersSampler(policy)
    return vllm.VllmSampler(
        policy,
        kv_cache_bytes=int(settings.kv_cache_gib * 2**30),
        threads=settings.torch_threads,
        on_restart=lambda reason: recorder.warn(f"The sampler is restarted: {reason}", {"reason": reason}),
    )
