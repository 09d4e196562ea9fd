"""Measure sampler and trainer on a GPU, with random weights of the shape of a real model, so without network access.

bench/gpu_trial.py runs each part in a separate process with a time limit. docs/measured/ has what was measured.

--part exact: log-probabilities and gradients against transformers and dense masks (bench/gpu_exact.py).

--part train: tokens a second of the sampler and of the update, and the update's share of the bfloat16 matrix product
rate that the same device reaches in the same process. Counted are the products with frozen weights: 4 x the decoder's
linear weights for every token read (forward, and backward to the inputs), 6 x the head's for every trained one (it is
computed again in the backward pass). Attention and the adapter are not counted, so the share is a lower bound.
`planned_gib` is what the memory plan counts for such a job; `first_*` are the first step, which compiles;
`logprob_gap` is how far the sampler's log-probabilities are from the trainer's. --budget: tokens of a micro-batch.

--part swap: what a changed adapter adds to a sample of one token through vLLM (bench/swap.py says how it is measured).

--part colocated, split, ahead, parallel, sleep, fleet, long and full: whole steps on --gpus GPUs (bench/gpu_steps.py).

--part trl: the steps of `colocated` on one GPU by TRL's GRPOTrainer, with vLLM colocated where it is installed, and
with transformers elsewhere: those of `train` (bench/gpu_trl.py).

A part has no figures if it needs more GPUs, vLLM or TRL.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch

from bench import gpu_exact, gpu_steps, gpu_trl
from bench.gpu_models import SHAPES, Shape, prompt, random_base, workload_of
from bench.models import settings_for
from bench.report import report
from core.units import GIB
from graders.types import Grade
from worker.doctor.exact import RANK
from worker.model import memory, sizing
from worker.model.policy import Base, Policy
from worker.packages import vllm_version
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.sampling.vllm import with_own_engines
from worker.training.trainer import PeftTrainer
from worker.types import Group

PARTS = (
    "exact",
    "train",
    "swap",
    "colocated",
    "split",
    "ahead",
    "parallel",
    "sleep",
    "fleet",
    "long",
    "full",
    "trl",
)
ROUNDS = 3
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="train")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--steps", type=int, default=4, help="of the whole steps; the first one is not counted"
    )
    parser.add_argument("--gpus", default="1", help="a number, or all; on a CPU, of processes")
    parser.add_argument("--out", type=Path, help="a file that the figures are written to as JSON, too")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch of `train`")
    asked = parser.parse_args()
    shape = SHAPES[asked.shape]
    if asked.budget:
        shape = replace(shape, token_budget=asked.budget)
    gpus = torch.cuda.device_count() if asked.gpus == "all" else int(asked.gpus)
    figures = run(asked.part, shape, asked.device, gpus, asked.steps)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        where = {
            "shape": asked.shape,
            "sizes": asdict(shape),
            "part": asked.part,
            "gpus": gpus,
            "device": device_name(asked.device),
        }
        asked.out.write_text(
            json.dumps(where | {"torch": torch.__version__, "figures": figures}, indent=1) + "\n"
        )
    report(f"gpu_{asked.part}_{asked.shape}", figures)


def run(part: str, shape: Shape, device: str, gpus: int, steps: int) -> dict[str, float]:
    if part == "exact":
        return gpu_exact.measure(device)
    if part in ("train", "swap"):
        return {"train": train, "swap": swap}[part](shape, device)
    if part == "trl":
        return gpu_trl.measure(shape, device, steps)
    scenario = gpu_steps.scenario_of(part, gpus)
    if vllm_version() is None or scenario is None or shape.heads % scenario.tensor_parallel:
        return {}
    # As many steps with the full number of batches ahead, whichever number that is.
    return gpu_steps.measure(replace(scenario, steps=steps + scenario.ahead - 1), shape, device)


def train(shape: Shape, device: str) -> dict[str, float]:
    base = random_base(shape, device)
    policy = Policy(base, rank=RANK, alpha=2 * RANK, seed=0)
    policy.stop_ids = frozenset()  # every answer runs to its full length
    if device.startswith("cuda"):
        policy.use(replace(policy.route, blocks=True))  # as the probe chooses for a job
    # Without overlap: sampling and the update are measured apart.
    settings = settings_for(
        base,
        optimizer={"learning_rate": 1e-12},
        sampling={"group_size": shape.group, "max_completion_tokens": shape.answer},
    )
    trainer = PeftTrainer(policy, settings, token_budget=shape.token_budget)
    sampler = TransformersSampler(policy)
    prompts = [prompt(shape, line) for line in range(shape.prompts)]
    sampling = Sampling(shape.group, 1.0, shape.answer, job_seed=0, step=0)
    sampled, updated, gaps, read, trained = [], [], [], 0, 0
    for _ in range(ROUNDS + 1):
        answers, seconds = timed(device, lambda: list(sampler.answers(prompts, sampling)))
        sampled.append(seconds)
        rollouts_PG = grouped(answers, shape.prompts, shape.group)
        for one, rollouts in zip(prompts, rollouts_PG, strict=True):
            trainer.add(Group(one, rollouts, tuple(Grade(float(n)) for n in range(len(rollouts)))))
        read = shape.prompts * (shape.prompt + shape.group * (shape.answer - 1))
        metrics, seconds = timed(device, trainer.step)
        updated.append(seconds)
        trained = metrics.trained_tokens
        gaps.append((metrics.logprob_gap or 0.0, metrics.logprob_gap_max or 0.0))
    sampling_seconds, update_seconds = statistics.median(sampled[1:]), statistics.median(updated[1:])
    operations = 4 * decoder_weights(shape) * read + 6 * shape.hidden * shape.vocabulary * trained
    rate = matrix_product_rate(device, shape.matrix)
    return {
        "sampled_tokens_per_second": shape.prompts * shape.group * shape.answer / sampling_seconds,
        "update_tokens_per_second": read / update_seconds,
        "update_share_of_matmul": operations / update_seconds / rate,
        "matmul_teraflops": rate / 1e12,
        "sampling_seconds": sampling_seconds,
        "update_seconds": update_seconds,
        "first_sampling_seconds": sampled[0],
        "first_update_seconds": updated[0],
        "logprob_gap": max(mean for mean, _ in gaps),
        "logprob_gap_max": max(largest for _, largest in gaps),
        "peak_memory_gib": peak_memory(device) / GIB,
        "planned_gib": planned_bytes(base, shape, device) / GIB,
    }


def planned_bytes(base: Base, shape: Shape, device: str) -> float:
    """Return the bytes that the memory plan of such a job counts, with micro-batches of the size that is measured."""
    work = workload_of(shape)
    machine = sizing.Machine(
        "cuda" if device.startswith("cuda") else "cpu",
        1 << 50,  # more than any: the need itself is of interest
        "transformers",
        token_budget=shape.token_budget,
    )
    sizes = memory.shape_of(base.model.config, torch.bfloat16)
    return sizing.plan("random", sizes, work, machine).estimate.total


def swap(shape: Shape, device: str) -> dict[str, float]:
    if vllm_version() is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(random_base(shape, device, folder), rank=RANK, alpha=2 * RANK, seed=0)
        sampler = with_own_engines(policy, kv_cache_bytes=GIB)
        one, changed, same = prompt(shape, 0), [], []

        def sample() -> None:
            [_] = sampler.answers([one], Sampling(1, 1.0, 1, job_seed=0, step=0))

        try:
            for _ in range(2 + 3 * ROUNDS):
                with torch.no_grad():
                    for parameter in policy.trainable:
                        parameter.normal_(std=0.01)
                changed.append(timed(device, sample)[1])
                same.append(timed(device, sample)[1])
        finally:
            sampler.close()
        # The first two start the engine, and let it allocate what it keeps.
        return {
            "swap_seconds": statistics.median(changed[2:]) - statistics.median(same[2:]),
            "sample_seconds": statistics.median(same[2:]),
            "adapter_bytes": sum(
                parameter.numel() * parameter.element_size() for parameter in policy.trainable
            ),
        }


def decoder_weights(shape: Shape) -> int:
    """Of the linear layers, the head apart."""
    key_values = shape.hidden // shape.heads * shape.key_value_heads
    attention_weights = shape.hidden * (2 * shape.hidden + 2 * key_values)
    return shape.layers * (attention_weights + 3 * shape.hidden * shape.intermediate)


def matrix_product_rate(device: str, side: int) -> float:
    """Operations a second of a bfloat16 product of two square matrices: the yardstick, measured here and now."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(10):
            a @ b

    timed(device, products)
    return 10 * 2 * side**3 / min(timed(device, products)[1] for _ in range(3))


def timed(device: str, work: Callable[[], T]) -> tuple[T, float]:
    wait(device)
    start = time.perf_counter()
    result = work()
    wait(device)
    return result, time.perf_counter() - start


def wait(device: str) -> None:
    """A GPU computes asynchronously: without this the clock would stop too early."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_memory(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"{device}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
