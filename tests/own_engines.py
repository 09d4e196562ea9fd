"""A job's own vLLM engines, as tests reach them."""

from worker.sampling.own import OwnEngine, OwnEngines
from worker.sampling.vllm import VllmSampler


def engines_of(sampler: VllmSampler) -> dict[int, OwnEngine]:
    """By number."""
    assert isinstance(sampler.engines, OwnEngines)
    return sampler.engines.by_number
