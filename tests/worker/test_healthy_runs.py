"""Ten runs that learn raise no warning: the real loop, sampler and trainer, on a model of two layers."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.database.tables import Event
from core.thresholds import Thresholds
from graders.types import Grade, Item, Sample
from tests.worker.conftest import Bench
from worker.model.policy import Policy
from worker.rollout.prompts import PromptStream
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Prompt

ADVANCED = {"group_size": 8, "max_completion_tokens": 6, "lora_rank": 4, "lora_alpha": 8}
SUBJECTS = (
    "a cat",
    "a dog",
    "a bird",
    "milk",
    "salt",
    "water",
    "wood",
    "iron",
    "summer",
    "winter",
    "bread",
    "fire",
)


class ShareOfColors:
    """A grader with partial credit: the share of the answer's words that are colors."""

    name, type = "colors", "share"

    async def grade(self, sample: Sample, item: Item) -> Grade:
        words = sample.output_text.split()
        return Grade(sum(word in ("red", "green", "blue") for word in words) / max(1, len(words)))


def run_of(bench: Bench, policy: Policy, seed: int, learning_rate: float) -> Any:
    """Twelve steps on prompts that a random model answers alike, so that training carries over to validation."""
    advanced = ADVANCED | {"learning_rate": learning_rate}
    run = bench.run(ShareOfColors(), batch_size=4, n_epochs=6, eval_interval=4, advanced=advanced)
    prompts = []
    for line, subject in enumerate(SUBJECTS, start=1):
        messages = [{"role": "user", "content": f"what colour is {subject}"}]
        prompts.append(Prompt(line, tuple(policy.render(messages)), {"messages": messages}))
    run.experience = replace(
        run.experience,
        seed=seed,
        train_prompts=PromptStream(prompts[:8], batch_size=4, seed=seed),
        valid_prompts=prompts[8:],
        sampler=TransformersSampler(policy),
        trainer=PeftTrainer(policy, run.experience.settings, token_budget=2048),
        # Random weights never learned to end an answer: every answer is cut off, from the first step on.
        thresholds=Thresholds(truncated_share=None),
    )
    return run


def warnings(bench: Bench) -> list[str]:
    with bench.database.read() as session:
        rows = session.query(Event).where(Event.level != "info").order_by(Event.seq)
        return [row.message for row in rows]


# One of them is enough after each change; that the other nine raise none either takes fifteen seconds.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.slow
def test_a_run_that_learns_raises_no_warning(
    bench: Bench, make_policy: Callable[..., Policy], seed: int
) -> None:
    asyncio.run(run_of(bench, make_policy(seed=seed), seed, learning_rate=5e-3).train())

    first, *_, last = [step["train_mean_reward"] for step in bench.steps()[1:]]
    assert last > first + 0.1, "it learns, or the test would say nothing"
    assert warnings(bench) == []
