"""A job's own vLLM engines, as tests reach them."""

from collections.abc import Sequence

from worker.engine.protocol import ServerInfo
from worker.sampling.own import OwnEngine, OwnEngines
from worker.sampling.vllm import VllmSampler


def engines_of(sampler: VllmSampler) -> dict[int, OwnEngine]:
    """By number."""
    assert isinstance(sampler.engines, OwnEngines)
    return sampler.engines.by_number


def facts_of(sampler: VllmSampler, tensors: Sequence[str]) -> ServerInfo:
    """What the first engine says of itself and of these tensors of an adapter."""
    engine = engines_of(sampler)[0]
    return sampler._thread.run(engine.facts(tensors, engine.seconds))
