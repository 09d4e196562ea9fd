"""Decoding of SmolLM2-135M with transformers: rollouts of a step, and served answers that come and go.

Tokens are counted per second of CPU time of this process, which other processes of the machine change less than
wall-clock time. `serving_N` is with N clients on four adapters, without HTTP; `_wide` is one long prompt among short
ones. To compare two versions, run the file in a checkout of each, alternately.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.models import smollm2
from bench.report import report
from worker.model.policy import Policy
from worker.rollout.samplers import Sampling
from worker.rollout.samplers.transformers import TransformersSampler
from worker.serve.continuous import ContinuousEngine
from worker.serve.engine import Ask
from worker.types import Prompt

PROMPTS, GROUP, ANSWER, ADAPTERS, ROUNDS = 8, 8, 40, 4, 2
CLIENTS = {1: 2, 8: 8, 32: 32}  # at once: answers in all


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        policy = Policy(smollm2(), rank=16, alpha=32, seed=0)
        folders = []
        for number in range(ADAPTERS):
            torch.manual_seed(number)
            for parameter in policy.trainable:
                torch.nn.init.normal_(parameter, std=0.005)
            folders.append(Path(name) / str(number))
            policy.save(folders[-1])
        figures = rollouts(policy)
        del policy
        figures |= asyncio.run(serving(folders))
    report("decoding", figures)


def ids(length: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(100, 20_000, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def rollouts(policy: Policy) -> dict[str, float]:
    prompts = [Prompt(line, ids(48 + 24 * line, line), {}) for line in range(PROMPTS)]
    sampler = TransformersSampler(policy)

    def sample(step: int) -> int:
        sampling = Sampling(GROUP, 1.0, ANSWER, job_seed=1, step=step)
        return sum(len(answer.rollout.output_ids_T) for answer in sampler.answers(prompts, sampling))

    return {"rollout_tokens_per_cpu_second": best_rate(sample)}


async def serving(folders: Sequence[Path]) -> dict[str, float]:
    engine = ContinuousEngine(smollm2())
    requests = itertools.count()

    async def answers(clients: int, each: int, first: int) -> int:
        """Tokens of `each` answers of each client; a client's answers follow each other."""

        async def client(number: int) -> int:
            tokens = 0
            for _ in range(each):
                seed = next(requests)
                length = first if number == 0 else 40 + 16 * (number % 8)
                ask = Ask(
                    prompt_ids=ids(length, seed),
                    adapter=folders[number % len(folders)],
                    temperature=1.0,
                    top_p=1.0,
                    seed=seed,
                    max_tokens=ANSWER - 16 + 8 * (number % 5),
                    held_to="",
                    top_logprobs=None,
                )
                tokens += sum([1 async for _ in engine.generate(ask)])
            return tokens

        return sum(await asyncio.gather(*map(client, range(clients))))

    figures = {}
    try:
        await answers(1, 1, 40)
        cases = [(str(clients), clients, total, 40) for clients, total in CLIENTS.items()]
        for name, clients, total, first in [*cases, ("8_wide", 8, 8, 1024)]:
            rates = []
            for _ in range(ROUNDS):
                start = time.process_time()
                tokens = await answers(clients, total // clients, first)
                rates.append(tokens / (time.process_time() - start))
            figures[f"serving_{name}_tokens_per_cpu_second"] = max(rates)
    finally:
        await engine.close()
    return figures


def best_rate(work: Callable[[int], int]) -> float:
    """Tokens per second of CPU time: the best of ROUNDS, after one round that does not count."""
    rates = []
    for step in range(ROUNDS + 1):
        start = time.process_time()
        tokens = work(step)
        rates.append(tokens / (time.process_time() - start))
    return max(rates[1:])


if __name__ == "__main__":
    main()
