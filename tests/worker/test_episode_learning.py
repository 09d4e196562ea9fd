"""A tiny policy learns to ask a tool for a digit that it cannot know, and to say what the tool said."""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, PreTrainedTokenizerFast

from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry
from graders.tools.protocol import ToolRequest, ToolResult
from graders.types import Grade
from tests.hyperparameters import in_groups
from tests.tiny import save_llama
from worker.model.policy import Policy, load_base
from worker.rollout.episodes import EpisodeLimits, EpisodeSampler
from worker.sampling import Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training.trainer import PeftTrainer
from worker.types import Call, Group, ParsedAnswer, Prompt, Rollout

DIGITS = "01234"
WORDS = ["<pad>", "which", "is", "lookup", *DIGITS]
FUNCTION = {"type": "function", "function": {"name": "lookup"}}
GROUP, STEPS = 64, 14


def read_calls(rollout: Rollout, row: Mapping[str, Any]) -> Rollout:
    calls = (Call("lookup", "{}"),) if rollout.text == "lookup" else ()
    return replace(rollout, parsed=ParsedAnswer(rollout.text, calls))


class Drawers:
    """Implements Tools: says the digit of the row."""

    async def call(self, call: ToolRequest) -> ToolResult:
        return ToolResult(call.item["digit"])

    async def end(self, trace_id: str) -> None:
        """There is nothing to free."""


class Is:
    """Implements Suffixes: `is` and the digit."""

    takes_several = True

    def after(
        self,
        answer: Rollout,
        message: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, ...]:
        return (WORDS.index("is"), WORDS.index(results[0]["content"]))

    def fewest(self, results: Sequence[Mapping[str, Any]]) -> int:
        return 1


@pytest.mark.slow
def test_a_policy_learns_to_ask_the_tool_and_to_say_what_it_said(tmp_path: Path) -> None:
    rewards = learn(tmp_path)

    assert statistics.fmean(rewards[:2]) < 0.3
    assert statistics.fmean(rewards[-3:]) > 0.9


def reward(rollout: Rollout, digit: str) -> float:
    """0 for a guess, and 0.2 for another digit than the tool's: a policy that only guesses is right in 1 of 5 rows."""
    assert rollout.episode is not None
    if rollout.episode.turns == 1:
        return 0.0
    return 1.0 if rollout.text == digit else 0.2


def learn(folder: Path, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", chat_template="which")
    path = save_llama(tokenizer, len(WORDS), 2, folder, head_dim=32)
    # Each word that the policy may say ends its answer.
    ends = [number for number, word in enumerate(WORDS) if word == "lookup" or word in DIGITS]
    GenerationConfig(eos_token_id=ends).save_pretrained(path)
    entry = BaseModelEntry(path=path, dtype="float32", context=16)
    policy = Policy(load_base("tiny", entry, folder / "cache", "cpu"), rank=16, alpha=32, seed=seed)
    asked = {"learning_rate": 1e-2, "step_kl": 0, "group_size": GROUP, "max_completion_tokens": 1}
    settings = resolve(
        Hyperparameters.model_validate({"advanced": in_groups(asked)}), rows=5, parameters=1, context=16
    ).model_copy(update={"max_episode_tokens": 2})
    trainer = PeftTrainer(policy, settings, token_budget=4096)
    sampler = EpisodeSampler(
        TransformersSampler(policy), Drawers(), read_calls, Is(), EpisodeLimits(2, 16), "job"
    )
    prompts = [
        Prompt(int(digit), (WORDS.index("which"),), {"digit": digit, "tools": [FUNCTION]}) for digit in DIGITS
    ]
    means = []
    for step in range(STEPS):
        sampling = Sampling(GROUP, 1.0, 1, job_seed=seed, step=step, batch=f"train/{step}")

        async def sample(sampling: Sampling = sampling) -> list[Any]:
            return [answer async for answer in sampler.sample(prompts, sampling)]

        rollouts_PG = grouped(asyncio.run(sample()), len(prompts), GROUP)
        rewards_PG = [
            [reward(rollout, prompt.item["digit"]) for rollout in rollouts]
            for prompt, rollouts in zip(prompts, rollouts_PG, strict=True)
        ]
        means.append(statistics.fmean(reward for rewards in rewards_PG for reward in rewards))
        for prompt, rollouts, rewards in zip(prompts, rollouts_PG, rewards_PG, strict=True):
            trainer.add(Group(prompt, rollouts, tuple(map(Grade, rewards))))
        trainer.step()
    return means
