"""Several sampling engines against one: whether their answers are the same, with a killed engine, too.

Prompts of unequal length, SmolLM2-135M in float32 with an adapter that changes its answers. `answers_equal` is the
share of answers with exactly the tokens that one engine gives: with two engines (processes), with two engines after
another update of the adapter, and with one of the two killed after the first answer. `answers_equal_tp` is the share
with one engine of three processes (tensor parallelism), whose sums are rounded in another order. `busy_2` is how even
the tokens are that two engines have left after the first answer: those of the average over those of the busiest.

Times are printed to see that nothing is idle. Two engines on the cores of one are not faster.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bench.report import report
from core.registry import Registry
from core.settings import Settings
from worker.model.policy import Policy, load_base
from worker.rollout.samplers import Answer, Sampling, dealing, grouped
from worker.rollout.samplers.placement import Placement
from worker.rollout.samplers.vllm import VllmSampler
from worker.types import Prompt

MODEL = "SmolLM2-135M-Instruct"
TOPICS = "rivers cats music trains bread iron winter salt".split()
HOW = Sampling(group_size=4, temperature=1.0, max_completion_tokens=24, job_seed=3, step=1)
TENSOR_PARALLEL = 3  # of the model's 9 attention heads
Tokens = list[tuple[int, ...]]


def main() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process would compile vLLM again
    settings = Settings()
    base = load_base(MODEL, Registry.load(None).get(MODEL), settings.model_cache, "cpu")
    policy = Policy(base, rank=16, alpha=32, seed=0)
    prompts = [prompt(policy, line, topic) for line, topic in enumerate(TOPICS, start=1)]
    with started(policy, engines=1) as one:
        expected = timed("one engine", one, prompts, policy)
        updated = timed("one engine after an update", one, prompts, policy, seed=6)
    with started(policy, engines=2) as two:
        shared = timed("two engines", two, prompts, policy)
        shared_updated = timed("two engines after an update", two, prompts, policy, seed=6)
        move(policy, seed=5)
        after_loss, busy = sampled_with_a_loss(two, prompts)
    with started(policy, engines=1, tensor_parallel=TENSOR_PARALLEL) as divided:
        parallel = timed(f"one engine of {TENSOR_PARALLEL} processes", divided, prompts, policy)
    report(
        "scale",
        {
            "answers_equal": equal([*shared, *shared_updated, *after_loss], [*expected, *updated, *expected]),
            "answers_equal_after_loss": equal(after_loss, expected),
            "answers_equal_tp": equal(parallel, expected),
            "busy_2": busy,
        },
    )


def prompt(policy: Policy, line: int, topic: str) -> Prompt:
    text = "Tell me about " + " and ".join([topic] * line)
    return Prompt(line, tuple(policy.render([{"role": "user", "content": text}])), {})


@contextmanager
def started(policy: Policy, *, engines: int, tensor_parallel: int = 1) -> Iterator[VllmSampler]:
    placement = Placement(tensor_parallel, ((),) * engines)
    sampler = VllmSampler(policy, placement=placement, context=512, kv_cache_bytes=1 << 27, threads=1)
    try:
        yield sampler
    finally:
        sampler.close()


def timed(name: str, sampler: VllmSampler, prompts: list[Prompt], policy: Policy, *, seed: int = 5) -> Tokens:
    """Sample with the adapter of this seed, after all engines have started and have it."""
    move(policy, seed)
    tokens_of([*sampler.answers(prompts[:2], HOW)], prompts[:2])
    began = time.perf_counter()
    answers = [*sampler.answers(prompts, HOW)]
    print(f"{name}: {time.perf_counter() - began:.1f} s for {len(answers)} answers")
    return tokens_of(answers, prompts)


def move(policy: Policy, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)


def sampled_with_a_loss(sampler: VllmSampler, prompts: list[Prompt]) -> tuple[Tokens, float]:
    """Kill an engine after the first answer. Returns how even the loads were before, too."""
    answers: list[Answer] = []
    busy = 0.0
    for answer in sampler.answers(prompts, HOW):
        if not answers:
            engines = [*sampler.engines.values()]
            loads = [dealing.tokens(engine.requests.values()) for engine in engines]
            busy = sum(loads) / (len(loads) * max(loads))
            os.kill(engines[0].child.pid, signal.SIGKILL)
        answers.append(answer)
    return tokens_of(answers, prompts), busy


def tokens_of(answers: list[Answer], prompts: list[Prompt]) -> Tokens:
    groups = grouped(answers, len(prompts), HOW.group_size)
    return [rollout.output_ids_T for group in groups for rollout in group]


def equal(found: Tokens, expected: Tokens) -> float:
    return sum(one == other for one, other in zip(found, expected, strict=True)) / len(expected)


if __name__ == "__main__":
    main()
