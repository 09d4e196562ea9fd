"""Measure the saving of prefix sharing in a group: eight answers of 16 tokens to a prompt of 256, with and without.

"Without" is the same code given eight groups of one: the prompt is then computed for every answer. Tokens,
log-probabilities and gradients must agree.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bench.report import report
from bench.sizes import sized
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import Registry
from core.settings import Settings
from worker.model.policy import Policy, load_base
from worker.model.sizing import CPU_TOKEN_BUDGET
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training.gradient import LocalGradient
from worker.training.loss import StepValues
from worker.training.policy_loss import PolicyLoss
from worker.types import Pack, Prompt, Rollout, TrainingSequence

GROUP, PROMPT, ANSWER, ROUNDS = sized((8, 256, 16, 3), (2, 16, 4, 1))
MODEL = "SmolLM2-135M-Instruct"
T = TypeVar("T")


@dataclass(frozen=True)
class OneEach(Sampling):
    """Prompt n of one answer draws what answer n of the one group draws."""

    def seed(self, prompt: Prompt, member: int) -> int:
        return super().seed(Prompt(0, prompt.ids, prompt.item), prompt.line)


def main() -> None:
    settings = Settings()
    base = load_base(MODEL, Registry.load(None).get(MODEL), settings.model_cache, "cpu")
    policy = Policy(base, rank=16, alpha=32, seed=0)
    for parameter in policy.trainable:
        torch.nn.init.normal_(parameter, std=0.02)
    policy.stop_ids = frozenset()  # every answer runs to its full length
    ids = tuple(torch.randint(100, 20_000, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist())

    sampler = TransformersSampler(policy)
    common: dict[str, Any] = {"temperature": 1.0, "max_completion_tokens": ANSWER, "job_seed": 1, "step": 1}
    singles = [Prompt(n, ids, {}) for n in range(GROUP)]
    [shared_rollouts], shared_sampling = timed(
        lambda: grouped(sampler.answers([Prompt(0, ids, {})], Sampling(group_size=GROUP, **common)), 1, GROUP)
    )
    alone, alone_sampling = timed(
        lambda: grouped(sampler.answers(singles, OneEach(group_size=1, **common)), GROUP, 1)
    )
    gaps = [
        gap
        for one, other in zip(shared_rollouts, [rollouts[0] for rollouts in alone], strict=True)
        for gap in logprob_gaps(one, other)
    ]

    answers = [
        TrainingSequence(
            r.output_ids_T,
            r.logprobs_T,
            advantages_T=(1.0 - 2.0 * (n % 2),) * len(r.output_ids_T),
            weight=1 / (GROUP * ANSWER),
        )
        for n, r in enumerate(shared_rollouts)
    ]
    resolved = resolve(Hyperparameters(), rows=8, parameters=base.parameters, context=base.context)
    own = LocalGradient(PolicyLoss(policy, resolved), token_budget=CPU_TOKEN_BUDGET)

    def gradient(packs: list[Pack]) -> list[torch.Tensor]:
        policy.model.zero_grad()
        own.add(packs, StepValues())
        own.end()
        return [p.grad.clone() for p in policy.trainable if p.grad is not None]

    shared_gradient, shared_training = timed(lambda: gradient([Pack(ids, tuple(answers))]))
    alone_gradient, alone_training = timed(lambda: gradient([Pack(ids, (answer,)) for answer in answers]))
    difference = sum(((a - b) ** 2).sum() for a, b in zip(shared_gradient, alone_gradient, strict=True))
    norm = sum((b**2).sum() for b in alone_gradient)

    report(
        "group_prefix",
        {
            "sample_speedup": alone_sampling / shared_sampling,
            "train_speedup": alone_training / shared_training,
            "logprob_difference": max(gaps),
            "tokens_compared": len(gaps),
            "gradient_difference": float((difference / norm) ** 0.5),
            "shared_sample_seconds": shared_sampling,
            "shared_train_seconds": shared_training,
        },
    )


def logprob_gaps(first: Rollout, second: Rollout) -> Iterator[float]:
    """Differences up to the first token that differs: a draw may fall on a border that rounding has moved."""
    for (a, b), (p, q) in zip(
        zip(first.output_ids_T, second.output_ids_T, strict=True),
        zip(first.logprobs_T, second.logprobs_T, strict=True),
        strict=True,
    ):
        if a != b:
            return
        yield abs(p - q)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result and the median seconds over ROUNDS, after one round that does not count."""
    work()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


if __name__ == "__main__":
    main()
