"""Tiny models of families in vLLM on a CPU, with random adapters, against the trainer's model.

`python -m tests.families.vllm TITLE ...` runs some, for `RUN` below: about 15 seconds of a core each. Three are in
tests/worker/test_vllm_families.py.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.registry import BaseModelEntry
from tests.families.zoo import CONTEXT, FAMILIES, Family
from tests.own_engines import with_forked_engines
from worker.checks import compatibility
from worker.engine.client import EngineLost
from worker.model.policy import Policy, load_base
from worker.refusals import Refusal, first_line
from worker.sampling import Sampling
from worker.sampling.vllm import VllmSampler
from worker.types import Prompt

PROMPTS = [Prompt(1, tuple(range(5, 45)), {}), Prompt(2, tuple(range(30, 41)), {})]  # beyond a window of 16
HOW = Sampling(group_size=4, temperature=1.0, max_completion_tokens=12, job_seed=0, step=0)

# What the command said with vLLM 0.32, by title.
RUN: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "Arcee",
            "Cohere Command R",
            "Gemma",
            "Gemma 2",
            "Gemma 3",
            "Gemma 4",
            "GLM 4 (9B)",
            "Granite 3",
            "Llama 2, 3",
            "Ministral",
            "Mistral",
            "Nemotron 3, 4 (Minitron)",
            "OLMo 2",
            "OLMo 3",
            "Phi-3",
            "Phi-4",
            "Qwen 2, 2.5",
            "Qwen 3",
            "SmolLM 3",
            "StarCoder 2",
        ),
        "exact",
    ),
    # The window of vLLM has one token more, on purpose: "sliding_window + 1 here to match the training convention".
    "Cohere Command A": "differs: a longer window",
    "GLM 4 0414": "exact, without `gate_up_proj`",
    "GPT-NeoX, Pythia": "differs by 5 nats",
    "gpt-oss": "refused: needs Triton",
    "LFM 2": "refused: needs chunked prefill",
    "Qwen 3 MoE": "refused: needs Triton",
    "Qwen 3.5": "refused: needs Triton",
    "StableLM": "refused: no LoRA",
}


@contextmanager
def started(family: Family, folder: Path) -> Iterator[tuple[Policy, VllmSampler]]:
    """The policy on a tiny model of the family, and vLLM beside it."""
    # vLLM's attention on a CPU starts at heads of 32.
    heads = {name: 32 for name in ("head_dim", "global_head_dim") if name in family.options}
    replace(family, options={**family.options, "hidden_size": 128, **heads}).save(folder)
    entry = BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)
    policy = Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=0)
    compatibility.probe(policy, sampled=False)
    sampler = with_forked_engines(policy, kv_cache_bytes=1 << 26, threads=1)
    try:
        yield policy, sampler
    finally:
        sampler.close()


@torch.no_grad()
def largest_difference(policy: Policy, sampler: VllmSampler) -> float:
    """Between the sampler's log-probabilities and those of a plain forward pass, in nats, with a random adapter."""
    list(sampler.answers(PROMPTS, HOW))  # now it has said which layers it cannot adapt
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.trainable:
        parameter.normal_(0.0, 0.2, generator=generator)
    for name in policy.left_out:
        policy.model.get_submodule(name).lora_B["default"].weight.zero_()
    differences: list[float] = []
    for answer in sampler.answers(PROMPTS, HOW):
        output = answer.rollout.output_ids_T
        ids = torch.tensor([[*PROMPTS[answer.prompt].ids, *output]])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, -len(output) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0]
        differences.append((own - torch.tensor(answer.rollout.logprobs_T)).abs().max().item())
    return max(differences)


@dataclass(frozen=True)
class Result:
    difference: float | None = None
    left_out: int = 0  # layers without an adapter in vLLM
    refusal: str = ""

    def __str__(self) -> str:
        if self.difference is None:
            return f"refused: {self.refusal}"
        left_out = f", without {self.left_out} layers" if self.left_out else ""
        return f"{self.difference:.1g} nats{left_out}"


def tried(family: Family) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with started(family, Path(scratch)) as (policy, sampler):
                return Result(largest_difference(policy, sampler), len(policy.left_out))
        except (Refusal, EngineLost) as cause:
            return Result(refusal=first_line(cause))


def main() -> None:
    for title in sys.argv[1:]:
        [family] = [one for one in FAMILIES if one.title == title]
        sys.stdout.write(f"{title}: {tried(family)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
