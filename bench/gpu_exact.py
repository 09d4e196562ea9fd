"""Part `exact` of bench/gpu_trial.py: does this device compute what transformers computes, and are FlexAttention's
gradients those of dense masks?

Tiny random models of several families, with heads of 64 as in real models. `probe` compares log-probabilities with
transformers' eager attention in float32, as it does for each job; `in_blocks` is 1 if it chose FlexAttention. Then one
pack of three answers is computed backward on both routes, and the gradients of the adapter are compared by
||blocks - dense|| / ||dense||.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpu_models import RANK, words
from worker.learn.batch import tensors_of
from worker.learn.gradient import logprobs
from worker.model import attention, support
from worker.model.policy import Base, Policy, Route
from worker.types import Pack, TrainingSequence

SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": None,
}
WINDOW = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 128},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 64},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 64},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
PROMPT, ANSWERS = 300, (40, 130, 200)
# Rounding of the device's own products; a mask that lets one token too many through differs by 1e-1.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def measure(device: str, families: Sequence[str] = tuple(FAMILIES)) -> dict[str, float]:
    figures: dict[str, float] = {}
    for family in families:
        started = time.perf_counter()
        policy = policy_of(family, device, torch.float32)
        verdict = support.probe(policy, sampled=True)
        figures[f"{family}_in_blocks"] = verdict.route.blocks
        figures[f"{family}_largest_difference"] = verdict.largest
        if verdict.route.blocks:
            for dtype in BOUNDS:
                name = str(dtype).rpartition(".")[2]
                figures[f"{family}_gradient_{name}"] = gradient_difference(policy_of(family, device, dtype))
        figures[f"{family}_seconds"] = time.perf_counter() - started
    return figures


def policy_of(family: str, device: str, dtype: torch.dtype) -> Policy:
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME).to(
        device
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # larger than usual, so that an error shows
                parameter.normal_(0.0, 0.06)
    model.requires_grad_(False)
    base = Base("tiny", "", model.eval(), words(SIZES["vocab_size"]), context=2048)
    return Policy(base, rank=RANK, alpha=2 * RANK, seed=0)


def gradient_difference(policy: Policy) -> float:
    """||blocks - dense|| / ||dense|| over all weights of the adapter."""
    with policy.moved():
        blocks, dense = (gradients(policy, Route("packed", blocks=value)) for value in (True, False))
    return ((blocks - dense).norm() / dense.norm()).item()


def gradients(policy: Policy, route: Route) -> Tensor:
    policy.use(route)
    logprobs(policy, tensors_of([pack()], policy.device), 1.0)[0].sum().backward()  # type: ignore[no-untyped-call]
    found = torch.cat([p.grad.double().flatten() for p in policy.trainable if p.grad is not None])
    for parameter in policy.trainable:
        parameter.grad = None
    return found


def pack() -> Pack:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist())

    def answers() -> Iterator[TrainingSequence]:
        for length in ANSWERS:
            yield TrainingSequence(draw(length), (0.0,) * length, (1.0,) * length, 1.0)

    return Pack(draw(PROMPT), tuple(answers()))
