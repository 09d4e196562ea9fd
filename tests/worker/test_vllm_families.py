"""Families that vLLM computes in its own way: fused projections, windows, several sizes of heads."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.registry import BaseModelEntry
from tests.families.zoo import CONTEXT, FAMILIES
from worker.model import support
from worker.model.policy import Policy, load_base
from worker.refusals import SamplerUnusable
from worker.rollout.samplers import Sampling
from worker.rollout.samplers.vllm import VllmSampler, installed
from worker.types import Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() is None, reason="vLLM is not installed"),
]
PROMPTS = [Prompt(1, tuple(range(5, 45)), {}), Prompt(2, tuple(range(30, 41)), {})]  # beyond a window of 16
HOW = Sampling(group_size=4, temperature=1.0, max_completion_tokens=12, job_seed=0, step=0)


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Policy, VllmSampler]]]:
    """The policy on a tiny model of the family, with a random adapter, and vLLM beside it."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or the engine would compile vLLM again
    samplers = []

    def start(title: str) -> tuple[Policy, VllmSampler]:
        [family] = [one for one in FAMILIES if one.title == title]
        # vLLM's attention on a CPU starts at heads of 32.
        heads = {name: 32 for name in ("head_dim", "global_head_dim") if name in family.options}
        replace(family, options={**family.options, "hidden_size": 128, **heads}).save(tmp_path)
        entry = BaseModelEntry(path=tmp_path, dtype="float32", context=CONTEXT)
        policy = Policy(load_base("tiny", entry, tmp_path, "cpu"), rank=4, alpha=8, seed=0)
        support.probe(policy, sampled=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in policy.trainable:
                parameter.normal_(0.0, 0.2, generator=generator)
        samplers.append(VllmSampler(policy, kv_cache_bytes=1 << 26, threads=1))
        return policy, samplers[-1]

    yield start
    for sampler in samplers:
        sampler.close()


@pytest.mark.parametrize("title", ["Phi-3", "Gemma 4"])
def test_vllm_samples_from_the_policy_with_its_adapter(
    started: Callable[..., tuple[Policy, VllmSampler]], title: str
) -> None:
    policy, sampler = started(title)

    answers = list(sampler.answers(PROMPTS, HOW))

    assert policy.left_out == []
    with torch.no_grad():
        for answer in answers:
            ids = torch.tensor([[*PROMPTS[answer.prompt].ids, *answer.rollout.output_ids_T]])
            logits = policy.model(input_ids=ids, use_cache=False).logits[
                0, -len(answer.rollout.output_ids_T) - 1 : -1
            ]
            own = logits.log_softmax(-1).gather(-1, ids[0, -len(logits) :, None])[:, 0]
            assert own.tolist() == pytest.approx(answer.rollout.logprobs_T, abs=1e-3)


def test_a_family_without_adapters_in_vllm_is_refused_by_name(
    started: Callable[..., tuple[Policy, VllmSampler]],
) -> None:
    _, sampler = started("StableLM")

    with pytest.raises(SamplerUnusable, match=r"does not support LoRA.*`sampler = \"transformers\"`"):
        list(sampler.answers(PROMPTS, HOW))
