"""Measure sampler and trainer on a GPU, with random weights of the shape of a real model, so without network access.

NOT YET RUN ON A GPU: only the tiny shape has been run, on a CPU. bench/gpu.sh runs each part in a separate process with
a time limit.

--part train: tokens a second of the sampler and of the update, and the update's share of the bfloat16 matrix product
rate that the same device reaches in the same process. Counted are the products with frozen weights: 4 x the decoder's
linear weights for every token read (forward, and backward to the inputs), 6 x the head's for every trained one (it is
computed again in the backward pass). Attention and the adapter are not counted, so the share is a lower bound.

--part swap: what a changed adapter adds to a sample of one token through vLLM (bench/swap.py says how it is measured).
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from bench.models import settings_for
from bench.report import report
from graders.types import Grade
from worker.learn.trainer import PeftTrainer
from worker.model import attention
from worker.model.policy import Base, Policy
from worker.rollout.samplers import Sampling, grouped
from worker.rollout.samplers.transformers import TransformersSampler
from worker.rollout.samplers.vllm import VllmSampler, installed
from worker.types import Group, Prompt

RANK, ROUNDS = 16, 3
T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes, and how much of it to sample at once."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    prompts: int
    group: int
    prompt: int
    answer: int
    token_budget: int
    matrix: int  # side of the matrices whose product is the yardstick


SHAPES = {
    "tiny": Shape(512, 64, 128, 2, 2, 1, 2, 4, 24, 8, 256, 256),
    "0.5b": Shape(151_936, 896, 4864, 24, 14, 2, 16, 16, 256, 128, 16_384, 8192),
    "1.5b": Shape(151_936, 1536, 8960, 28, 12, 2, 16, 16, 256, 128, 16_384, 8192),
    "8b": Shape(128_256, 4096, 14_336, 32, 32, 8, 8, 16, 256, 128, 8192, 8192),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["train", "swap"], default="train")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="a file that the figures are written to as JSON, too")
    asked = parser.parse_args()
    shape = SHAPES[asked.shape]
    figures = {"train": train, "swap": swap}[asked.part](shape, asked.device)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        where = {
            "shape": asked.shape,
            "sizes": asdict(shape),
            "part": asked.part,
            "device": device_name(asked.device),
        }
        asked.out.write_text(
            json.dumps(where | {"torch": torch.__version__, "figures": figures}, indent=1) + "\n"
        )
    report(f"gpu_{asked.part}_{asked.shape}", figures)


def random_base(shape: Shape, device: str, source: str = "") -> Base:
    """A Llama of this shape in bfloat16, made on the device, and a tokenizer of that many words."""
    words = {f"w{number}": number for number in range(shape.vocabulary)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        unk_token="w0",
        pad_token="w1",
        eos_token="w2",
    )
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.NAME
        )
    model.requires_grad_(False)
    if source:
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
    return Base("random", source, model.eval(), tokenizer, context=2048)


def train(shape: Shape, device: str) -> dict[str, float]:
    base = random_base(shape, device)
    policy = Policy(base, rank=RANK, alpha=2 * RANK, seed=0)
    policy.stop_ids = frozenset()  # every answer runs to its full length
    advanced: dict[str, Any] = {"group_size": shape.group, "max_completion_tokens": shape.answer}
    # Not as the answers come in: sampling and the update are measured apart.
    settings = settings_for(base, learning_rate=1e-12, overlap=False, **advanced)
    trainer = PeftTrainer(policy, settings, token_budget=shape.token_budget)
    sampler = TransformersSampler(policy)
    prompts = [prompt(shape, line) for line in range(shape.prompts)]
    sampling = Sampling(shape.group, 1.0, shape.answer, job_seed=0, step=0)
    sampled, updated, read, trained = [], [], 0, 0
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
        "peak_memory_gib": peak_memory(device) / 2**30,
    }


def swap(shape: Shape, device: str) -> dict[str, float]:
    if installed() is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(random_base(shape, device, folder), rank=RANK, alpha=2 * RANK, seed=0)
        sampler = VllmSampler(policy, kv_cache_bytes=1 << 30)
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


def prompt(shape: Shape, line: int) -> Prompt:
    generator = torch.Generator().manual_seed(line)
    return Prompt(
        line, tuple(torch.randint(3, shape.vocabulary, (shape.prompt,), generator=generator).tolist()), {}
    )


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
