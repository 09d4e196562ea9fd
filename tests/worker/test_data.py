"""The order of the prompts: what each seed has always given, without shuffling a file for every prompt."""

import random
from typing import Any

import pytest

from worker.rollout.prompts import NoPassRate, PromptStream
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


def test_an_epoch_is_shuffled_once_and_only_the_last_two_are_kept() -> None:
    stream = PromptStream(prompts(1000), batch_size=7, seed=1)
    first = stream.order(0)

    for step in range(1, 144):  # the last one straddles two epochs
        stream.batch(step)
    assert stream.order(0) is first

    for step in range(144, 1000):
        stream.batch(step)
    assert stream.kept_epochs == [5, 6], "memory does not grow with the epochs"


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
