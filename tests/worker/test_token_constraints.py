"""Schemas and budgets of a reasoning model: what may come next, in sampling and in training alike."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry
from core.response_format import response_schema
from graders.build import build
from graders.spec import parse_grader
from graders.types import Grade
from tests.fakes import learn
from tests.present import present
from tests.thinking import FAMILIES, make_thinking_model
from tests.worker.test_training import asked
from worker.clock import Clock
from worker.model.policy import Policy, load_base
from worker.model.token_constraints import grammar_of
from worker.rollout.experience import Rewards
from worker.sampling import Answer, Sampling, grouped
from worker.sampling.transformers import TransformersSampler
from worker.training.contributions import contribution_of
from worker.training.trainer import PeftTrainer
from worker.types import Group, Prompt, Rollout, UpdateMetrics

LETTER = {
    "type": "object",
    "properties": {"letter": {"enum": ["a", "b"]}},
    "required": ["letter"],
    "additionalProperties": False,
}


def load_thinking(family: str, folder: Path) -> Policy:
    make_thinking_model(folder, FAMILIES[family])
    base = load_base(family, BaseModelEntry(path=folder, dtype="float32", context=512), folder, "cpu")
    return Policy(base, rank=1, alpha=1, seed=0)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return {
        name: load_thinking(name, tmp_path_factory.mktemp(name)) for name in ("hybrid", "distill", "harmony")
    }


def sample(
    policy: Policy, *, schema: dict[str, Any] | None = None, budget: int | None = None, tokens: int = 96
) -> tuple[Prompt, Sampling, tuple[Rollout, ...]]:
    prompts = [Prompt(1, tuple(policy.render([{"role": "user", "content": "?"}])), {})]
    sampling = Sampling(
        8,
        1.0,
        tokens,
        job_seed=1,
        step=1,
        response_schema=response_schema(schema) if schema else "",
        thinking_budget=budget,
    )
    [rollouts] = grouped(TransformersSampler(policy).answers(prompts, sampling), 1, 8)
    return prompts[0], sampling, rollouts


@pytest.mark.parametrize("family", ["distill", "harmony"])
def test_a_schema_applies_after_the_thought(policies: dict[Any, Any], family: str) -> None:
    """Noise would hardly ever begin with a brace, and this noise is free until its thought is closed."""
    _, _, rollouts = sample(policies[family], schema=LETTER, budget=20)

    ended = [one for one in rollouts if not one.cut_thought and one.finish_reason == "stop"]
    assert len(ended) >= 4
    assert all(json.loads(one.text)["letter"] in ("a", "b") for one in ended)
    assert all(one.reasoning and one.grammar_start >= 20 for one in ended if one.forced)


def test_a_model_that_opens_its_thoughts_may_think_or_answer_at_once(policies: dict[Any, Any]) -> None:
    """Only the start tag and what the schema allows may begin an answer."""
    policy = policies["hybrid"]
    _, _, rollouts = sample(policy, schema=LETTER, budget=4)

    [think] = policy.reasoning.start_ids
    assert {one.output_ids_T[0] for one in rollouts} <= {think, policy.tokenizer.encode("{")[0]}
    assert all(json.loads(one.text)["letter"] in ("a", "b") for one in rollouts)


def test_a_thought_is_closed_when_its_budget_is_spent(policies: dict[Any, Any]) -> None:
    policy = policies["distill"]
    _, _, rollouts = sample(policy, budget=5)

    assert all(one.grammar_start <= 6 for one in rollouts)
    forced = [one for one in rollouts if one.forced]
    assert forced
    assert all(one.output_ids_T[5] == policy.reasoning.end_ids[0] for one in forced)
    assert all(one.sampled_tokens == len(one.output_ids_T) - 1 for one in forced)


def test_no_budget_leaves_a_thought_alone(policies: dict[Any, Any]) -> None:
    _, _, rollouts = sample(policies["distill"], tokens=12)

    assert any(one.cut_thought and not one.text for one in rollouts)


def update(
    policy: Policy, rollouts: tuple[Rollout, ...] | list[Rollout], prompt: Prompt, sampling: Sampling
) -> UpdateMetrics:
    grades = tuple(Grade(float(number % 2)) for number in range(len(rollouts)))
    settings = asked({"max_completion_tokens": 96})
    trainer = PeftTrainer(policy, settings, token_budget=4096, response_schema=sampling.response_schema)
    return learn(trainer, [Group(prompt, tuple(rollouts), grades)])


@pytest.mark.parametrize("family", ["hybrid", "distill", "harmony"])
@pytest.mark.parametrize("budget", [None, 6])
@pytest.mark.slow
def test_the_trainer_allows_the_tokens_that_the_sampler_allowed(
    policies: dict[Any, Any], family: str, budget: int | None
) -> None:
    policy = policies[family]
    prompt, sampling, rollouts = sample(policy, schema=LETTER, budget=budget)

    metrics = update(policy, rollouts, prompt, sampling)

    assert present(metrics.logprob_gap_max) < 1e-4


@pytest.mark.slow
def test_forced_tokens_are_not_trained_on(policies: dict[Any, Any]) -> None:
    """They are in no ratio, entropy or loss: with nonsense in their place everything stays the same."""
    policy = policies["distill"]
    prompt, sampling, rollouts = sample(policy, budget=5)
    nonsense = [
        Rollout(
            **vars(one)
            | {
                "logprobs_T": tuple(
                    -99.0 if one.forced and at == 5 else value for at, value in enumerate(one.logprobs_T)
                )
            }
        )
        for one in rollouts
    ]
    state = [parameter.detach().clone() for parameter in policy.trainable]
    metrics = update(policy, nonsense, prompt, sampling)
    for parameter, value in zip(policy.trainable, state, strict=True):
        parameter.data.copy_(value)

    assert sum(one.forced for one in rollouts) >= 1
    assert metrics.trained_tokens == sum(one.sampled_tokens for one in rollouts)
    assert present(metrics.logprob_gap_max) < 1e-4
    assert torch.isfinite(torch.tensor(metrics.loss))


@pytest.mark.parametrize(
    ("family", "schema", "budget", "grammar"),
    [
        ("distill", LETTER, None, "start: <[^{end}]>* <[{end}]> answer"),
        ("distill", LETTER, 7, "start: <[^{end}]>{{0,7}} <[{end}]> answer"),
        ("hybrid", LETTER, None, "start: (<[{start}]> <[^{end}]>* <[{end}]>)? answer"),
        ("hybrid", None, None, ""),
    ],
)
def test_vllm_gets_the_same_limits_as_a_grammar(
    policies: dict[Any, Any], family: str, schema: dict[str, Any] | None, budget: int | None, grammar: str
) -> None:
    reasoning = policies[family].reasoning
    sampling = Sampling(
        1, 1.0, 9, 1, 1, response_schema=response_schema(schema) if schema else "", thinking_budget=budget
    )
    [end] = reasoning.end_ids
    first = grammar_of(reasoning, sampling).partition("\n")[0]

    assert first == grammar.format(end=end, start=reasoning.start_ids[0])


def test_an_answer_whose_every_token_was_forced_is_not_in_the_loss() -> None:
    """It was not sampled, so it has no probability to learn from; it is still in the baseline of its group."""
    settings = resolve(Hyperparameters(), rows=2, parameters=1000, context=128)
    forced = Rollout((5, 6), (0.0, 0.0), "", "length", grammar_start=2, forced=2)
    sampled = Rollout((7, 8), (-1.0, -1.0), "x", "stop")
    group = Group(Prompt(1, (1, 2), {}), (forced, sampled), (Grade(0.0), Grade(1.0)))

    share = contribution_of(group, settings, lambda ids: "")

    assert share.pack is not None
    assert [answer.output_ids_T for answer in share.pack.sequences] == [(7, 8)]
    assert share.lengths == (2,)
    assert list(share.rewards_N) == [0.0, 1.0]


def test_graders_get_the_final_answer_and_the_thought_apart(policies: dict[Any, Any]) -> None:
    """`string_check eq` on the text of a thinking model: the thought does not make a right answer wrong."""
    policy = policies["hybrid"]
    ids = policy.tokenizer.encode("<think>6*7=42</think>\n42<end>")
    parts = policy.reasoning.split(ids)
    rollout = Rollout(tuple(ids), (-1.0,) * len(ids), parts.text, "stop", reasoning=parts.thought)
    check = {"type": "string_check", "operation": "eq"}
    grader = {
        "type": "multi",
        "name": "both",
        "graders": {
            "right": check | {"name": "r", "input": "{{sample.output_text}}", "reference": "42"},
            "shown": check | {"name": "s", "input": "{{sample.output_reasoning}}", "reference": "6*7=42"},
        },
        "calculate_output": "right + shown",
    }

    async def answers() -> AsyncIterator[Answer]:
        yield Answer(0, 0, rollout)

    async def graded() -> list[Group]:
        rewards = Rewards(build(parse_grader(grader)))
        return await rewards.grade([Prompt(1, (1,), {})], answers(), 1, Clock())

    [group] = asyncio.run(graded())
    assert group.rewards_G == [2.0]
