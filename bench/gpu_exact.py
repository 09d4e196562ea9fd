"""Part `exact` of bench/gpu_trial.py: does this device compute what transformers computes, and are FlexAttention's
gradients those of dense masks?

Tiny random models of several families, with heads of 64 as in real models. `probe` compares log-probabilities with
transformers' eager attention in float32, as it does for each job; `in_blocks` is 1 if it chose FlexAttention. Then one
pack of three answers is computed backward on both routes, and the gradients of the adapter are compared by
||blocks - dense|| / ||dense||.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from worker.checks import compatibility
from worker.doctor.exact import BOUNDS, SIZES, gradient_difference, tiny_policy

WINDOW = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 128},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 64},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 64},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def measure(device: str, families: Sequence[str] = tuple(FAMILIES)) -> dict[str, float]:
    figures: dict[str, float] = {}
    for family in families:
        started = time.perf_counter()
        sizes = {**SIZES, **FAMILIES[family]}
        verdict = compatibility.probe(tiny_policy(family, sizes, device, torch.float32), sampled=True)
        figures[f"{family}_in_blocks"] = verdict.route.blocks
        figures[f"{family}_largest_difference"] = verdict.largest
        if verdict.route.blocks:
            for dtype in BOUNDS:
                name = str(dtype).rpartition(".")[2]
                policy = tiny_policy(family, sizes, device, dtype)
                figures[f"{family}_gradient_{name}"] = gradient_difference(policy)
        figures[f"{family}_seconds"] = time.perf_counter() - started
    return figures
