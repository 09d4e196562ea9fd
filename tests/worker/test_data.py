"""The order of the prompts: what each seed has always given, without shuffling a file for every prompt."""

import random
from typing import Any

import pytest

from core.storage.datasets import Example
from worker.rollout.prompts import NoPassRate, PromptStream, PromptTooLong, tokenize
from worker.sampling import Sampling
from worker.types import Prompt


def prompts(count: int) -> list[Any]:
    return [Prompt(line, (1,), {}) for line in range(1, count + 1)]


def lines(of: list[Prompt]) -> list[Any]:
    return [prompt.line for prompt in of]


def shuffled_epoch(seed: int, epoch: int, count: int) -> list[int]:
    """The definition of the order: a job that resumes must find it again, so it may not change."""
    order = list(range(1, count + 1))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


@pytest.mark.parametrize(("rows", "batch_size"), [(10, 4), (7, 7), (5, 3), (3, 8), (1, 1)])
def test_batches_follow_the_shuffled_epochs_and_may_straddle_them(rows: int, batch_size: int) -> None:
    stream = PromptStream(prompts(rows), batch_size=batch_size, seed=5)
    endless = [line for epoch in range(40) for line in shuffled_epoch(5, epoch, rows)]

    for step in range(1, 12):
        first = (step - 1) * batch_size
        assert lines(stream.batch(step)) == endless[first : first + batch_size]


def test_a_run_that_resumes_in_the_middle_finds_the_same_batches() -> None:
    whole = PromptStream(prompts(10), batch_size=4, seed=5)
    from_the_start = [lines(whole.batch(step)) for step in range(1, 9)]

    resumed = PromptStream(prompts(10), batch_size=4, seed=5)
    assert [lines(resumed.batch(step)) for step in range(6, 9)] == from_the_start[5:]
    assert lines(resumed.batch(1)) == from_the_start[0], "also backwards"


def test_a_row_that_a_batch_has_twice_gets_other_seeds_the_second_time() -> None:
    """Equal groups would teach no more than one of them. A row that is there once has the seeds of its line."""
    stream = PromptStream(prompts(3), batch_size=7, seed=5)
    sampling = Sampling(group_size=2, temperature=1.0, max_completion_tokens=8, job_seed=3, step=1)

    batch = stream.batch(1)
    assert len({sampling.seed(prompt, member) for prompt in batch for member in (0, 1)}) == 14
    assert len({sampling.turn_seed(prompt, member) for prompt in batch for member in (0, 1)}) == 14
    assert [sampling.seed(prompt, 0) for prompt in batch[:3]] == [
        sampling.seed(Prompt(prompt.line, prompt.ids, {}), 0) for prompt in batch[:3]
    ]


def test_an_epoch_is_shuffled_once_and_only_the_last_two_are_kept() -> None:
    stream = PromptStream(prompts(1000), batch_size=7, seed=1)
    first = stream.order(0)

    for step in range(1, 144):  # the last one straddles two epochs
        stream.batch(step)
    assert stream.order(0) is first

    for step in range(144, 1000):
        stream.batch(step)
    again = stream.order(0)
    assert again == first and again is not first, "memory does not grow with the epochs"


def test_stand_ins_are_all_prompts_outside_the_batch_in_an_order_of_the_step() -> None:
    stream = PromptStream(prompts(12), batch_size=4, seed=5)
    batch = set(lines(stream.batch(2)))
    rest = [line for line in range(1, 13) if line not in batch]
    random.Random("5/others/2").shuffle(rest)

    assert lines(stream.others(2)) == rest
    assert lines(stream.others(3)) != rest


def rated(*rates: Any) -> list[Any]:
    return [Prompt(line, (1,), {"pass_rate": rate}) for line, rate in enumerate(rates, start=1)]


def test_prompts_come_as_in_the_file_in_every_epoch() -> None:
    stream = PromptStream(prompts(5), batch_size=2, seed=5, order="file")

    assert [lines(stream.batch(step)) for step in (1, 2, 3, 4)] == [[1, 2], [3, 4], [5, 1], [2, 3]]


def test_the_easiest_prompts_come_first() -> None:
    stream = PromptStream(rated(0.1, 1, 0.5, 0.5), batch_size=4, seed=5, order="easiest_first")

    assert lines(stream.batch(1)) == lines(stream.batch(2)) == [2, 3, 4, 1]


@pytest.mark.parametrize("rate", [None, "half", True])
def test_a_row_without_a_pass_rate_is_named(rate: Any) -> None:
    with pytest.raises(NoPassRate, match="line 2 has none"):
        PromptStream(rated(0.5, rate), batch_size=1, seed=5, order="easiest_first")


def test_prompts_are_rendered_with_the_tools_of_their_row() -> None:
    tools = [{"type": "function", "function": {"name": "time"}}]
    examples = [Example(1, [], {"tools": tools}), Example(2, [], {"tools": None})]

    made = tokenize(
        examples, lambda messages, tools: [len(tools)], file="file-1", context=10, max_completion_tokens=7
    )

    assert [prompt.ids for prompt in made] == [(1,), (0,)]


def test_a_prompt_that_leaves_no_room_for_the_token_of_a_teachers_server_is_too_long() -> None:
    """The server completes the prompt and the longest answer by a token."""
    examples = [Example(1, [], {})]
    room: dict[str, Any] = {"file": "file-1", "context": 10, "max_completion_tokens": 7}

    assert len(tokenize(examples, lambda messages, tools: [1, 2, 3], **room)) == 1
    with pytest.raises(PromptTooLong, match="7 and 1 that the teacher's server adds: line 1: 3 tokens"):
        tokenize(examples, lambda messages, tools: [1, 2, 3], added=1, **room)
