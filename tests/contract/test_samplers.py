"""What any Sampler must do. A new one is added to the parameters of `sampler`."""

import asyncio
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from core.registry import BaseModelEntry
from tests.fakes import GuessingSampler, Skill
from worker.model.policy import Policy, load_base
from worker.rollout.samplers import Answer, Sampler, Sampling, grouped
from worker.rollout.samplers.transformers import TransformersSampler
from worker.rollout.samplers.vllm import VllmSampler, installed
from worker.types import Prompt, Rollout

PROMPTS = [Prompt(line, tuple(range(6, 6 + length)), {"answer": "red"}) for line, length in ((1, 3), (2, 7))]
SAMPLING = Sampling(group_size=3, temperature=1.0, max_completion_tokens=12, job_seed=1, step=0)
VLLM = pytest.param(
    "vllm",
    marks=[pytest.mark.slow, pytest.mark.skipif(installed() is None, reason="vLLM is not installed")],
)


def policy_on(folder: Path) -> Policy:
    entry = BaseModelEntry(path=folder, dtype="float32", context=128)
    return Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=0)


@pytest.fixture(scope="module", params=["guessing", "transformers", VLLM])
def sampler(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Sampler]:
    match request.param:
        case "guessing":
            yield GuessingSampler(Skill(0.5))
        case "transformers":
            yield TransformersSampler(policy_on(tiny_model))
        case "vllm":
            vllm = VllmSampler(policy_on(tiny_model), kv_cache_bytes=1 << 24, threads=1)
            yield vllm
            vllm.close()


def answers(sampler: Sampler, sampling: Sampling = SAMPLING) -> list[Answer]:
    async def collect() -> list[Answer]:
        return [answer async for answer in sampler.sample(PROMPTS, sampling)]

    return asyncio.run(collect())


def rollouts(sampler: Sampler, sampling: Sampling = SAMPLING) -> list[tuple[Rollout, ...]]:
    return grouped(answers(sampler, sampling), len(PROMPTS), sampling.group_size)


def test_each_member_of_each_group_is_answered_once(sampler: Sampler) -> None:
    places = [(answer.prompt, answer.member) for answer in answers(sampler)]

    assert sorted(places) == list(product(range(len(PROMPTS)), range(SAMPLING.group_size)))


def test_each_token_has_its_log_probability_and_there_are_no_more_than_asked_for(sampler: Sampler) -> None:
    for rollout in (rollout for group in rollouts(sampler) for rollout in group):
        assert 1 <= len(rollout.output_ids_T) <= SAMPLING.max_completion_tokens
        assert len(rollout.logprobs_T) == len(rollout.output_ids_T)
        assert all(logprob <= 0 for logprob in rollout.logprobs_T)


def test_an_answer_that_did_not_stop_has_all_the_tokens_it_may_have(sampler: Sampler) -> None:
    for rollout in (rollout for group in rollouts(sampler) for rollout in group):
        full = len(rollout.output_ids_T) == SAMPLING.max_completion_tokens
        assert rollout.finish_reason == "stop" or full


def test_the_same_step_of_the_same_job_is_sampled_alike_again(sampler: Sampler) -> None:
    """A job that is resumed after a crash repeats the steps behind its checkpoint."""
    first, again = rollouts(sampler), rollouts(sampler)

    assert [[r.text for r in group] for group in first] == [[r.text for r in group] for group in again]


def test_a_reader_that_leaves_early_leaves_a_sampler_that_works(sampler: Sampler) -> None:
    async def first_only() -> Answer:
        async for answer in sampler.sample(PROMPTS, SAMPLING):
            return answer
        raise AssertionError("no answer at all")

    asyncio.run(first_only())

    assert len(answers(sampler)) == len(PROMPTS) * SAMPLING.group_size
