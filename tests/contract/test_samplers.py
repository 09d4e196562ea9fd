"""What any Sampler must do. A new one is added to the parameters of `sampler`."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from core.registry import BaseModelEntry
from tests.fakes import GuessingSampler, Skill
from tests.own_engines import with_forked_engines
from worker.model.policy import Policy, load_base
from worker.packages import vllm_version
from worker.sampling import Answer, Sampler, Sampling, TurnSampler, grouped
from worker.sampling.transformers import TransformersSampler
from worker.sampling.vllm import VllmSampler
from worker.types import Prompt, Rollout

PROMPTS = [Prompt(line, tuple(range(6, 6 + length)), {"answer": "red"}) for line, length in ((1, 3), (2, 7))]
SAMPLING = Sampling(group_size=3, temperature=1.0, max_completion_tokens=12, job_seed=1, step=0)
VLLM = pytest.param(
    "vllm",
    marks=[pytest.mark.slow, pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")],
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
            vllm = with_forked_engines(policy_on(tiny_model), kv_cache_bytes=1 << 24, threads=1)
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


@pytest.fixture
def turn_sampler(sampler: Sampler) -> TurnSampler:
    if isinstance(sampler, GuessingSampler):
        pytest.skip("it samples no turns")
    assert isinstance(sampler, TransformersSampler | VllmSampler)
    return sampler


def turns(sampler: TurnSampler, prompts: list[Prompt], *, late: bool) -> list[tuple[int, ...]]:
    """The turns of members 0 and 1 of each prompt: together, or each one when the one before it has ended."""

    async def ask() -> list[Rollout]:
        async with sampler.turns(LONG) as turns:
            wanted = [turns.next(prompt, member) for prompt, member in product(prompts, range(2))]
            return [await one for one in wanted] if late else await asyncio.gather(*wanted)

    return [rollout.output_ids_T for rollout in asyncio.run(ask())]


LONG = replace(SAMPLING, max_completion_tokens=60)


def test_a_turn_is_the_same_whenever_it_is_asked_for(turn_sampler: TurnSampler) -> None:
    together = turns(turn_sampler, PROMPTS, late=False)

    assert turns(turn_sampler, PROMPTS, late=True) == together
    assert len(set(together)) == 4, "each turn has its own seed"


def test_a_turn_that_is_asked_for_while_others_are_sampled_joins_them(turn_sampler: TurnSampler) -> None:
    expected = turns(turn_sampler, PROMPTS, late=False)

    async def ask() -> list[Rollout]:
        async with turn_sampler.turns(LONG) as turns:
            first = [asyncio.create_task(turns.next(PROMPTS[0], member)) for member in range(2)]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            later = await asyncio.gather(*(turns.next(PROMPTS[1], member) for member in range(2)))
            return [*await asyncio.gather(*first), *later]

    assert [rollout.output_ids_T for rollout in asyncio.run(ask())] == expected


def test_the_turns_of_a_longer_conversation_have_other_seeds(turn_sampler: TurnSampler) -> None:
    longer = replace(PROMPTS[0], ids=(*PROMPTS[0].ids, 9))

    assert LONG.turn_seed(longer, 0) != LONG.turn_seed(PROMPTS[0], 0)


def test_a_turn_that_nobody_waits_for_does_not_disturb_the_others(turn_sampler: TurnSampler) -> None:
    expected = turns(turn_sampler, PROMPTS, late=False)

    async def leave() -> Rollout:
        async with turn_sampler.turns(LONG) as turns:
            left = asyncio.create_task(turns.next(PROMPTS[0], 0))
            other = asyncio.create_task(turns.next(PROMPTS[1], 1))
            await asyncio.sleep(0)
            left.cancel()
            return await other

    assert asyncio.run(leave()).output_ids_T == expected[3]
    assert len(answers(turn_sampler)) == len(PROMPTS) * SAMPLING.group_size
