"""Distributing the packs of a step over ranks: all answers once, evenly, and reproducibly."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from bench.deal import group, step, tokens
from worker.training.partition import deal
from worker.types import Pack, TrainingSequence


def pack(prompt: int, *lengths: int) -> Pack:
    """A prompt of so many tokens, and answers whose inputs have so many."""
    answers = [TrainingSequence((0,) * (n + 1), (0.0,) * (n + 1), (1.0,) * (n + 1), 1.0) for n in lengths]
    return Pack((prompt,) * prompt, tuple(answers))


def shares(packs: Sequence[Pack], ranks: int, *, rows: bool = False) -> list[int]:
    return [tokens(hand) for hand in deal(packs, ranks, rows=rows)]


def test_one_group_is_cut_between_answers_and_its_prompt_is_computed_on_each_rank() -> None:
    hands = deal([pack(10, 30, 20, 20, 10)], 2)

    assert [tokens(hand) for hand in hands] == [50, 50]
    assert [len(hand[0].sequences) for hand in hands] == [2, 2]


def test_groups_that_fill_the_ranks_evenly_are_not_cut() -> None:
    assert shares([pack(10, 30), pack(10, 30), pack(10, 10), pack(10, 10)], 2) == [60, 60]


def test_a_cut_that_costs_more_than_it_saves_is_not_made() -> None:
    assert shares([pack(100, 5, 5)], 2) == [105, 105]
    assert shares([pack(100, 5)], 2) == [105, 0]


def test_an_answer_in_a_row_of_its_own_pays_for_its_prompt() -> None:
    """Two short answers to a long prompt cost more than a long answer to a short one."""
    packs = [pack(100, 5, 5), pack(5, 100), pack(5, 100)]

    assert shares(packs, 2) == [110, 210]
    assert [sum(len(one.sequences) for one in hand) for hand in deal(packs, 2, rows=True)] == [2, 2]


def test_rank_0_has_a_pack_whenever_there_is_one() -> None:
    assert [bool(hand) for hand in deal([pack(3, 4)], 3)] == [True, False, False]
    assert deal([], 3) == [[], [], []]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_answer_is_computed_once_under_its_own_prompt(ranks: int, rows: bool) -> None:
    draw = random.Random(1)
    packs = [group(draw) for _ in range(5)] + [pack(7, 0), pack(7, 0, 0)]

    hands = deal(packs, ranks, rows=rows)

    assert len(hands) == ranks
    assert answers(pack for hand in hands for pack in hand) == answers(packs)
    assert hands == deal(packs, ranks, rows=rows)


def answers(packs: Iterable[Pack]) -> Counter[tuple[tuple[int, ...], TrainingSequence]]:
    return Counter((one.prompt_ids, answer) for one in packs for answer in one.sequences)


def test_eight_ranks_are_busy_with_the_default_batch() -> None:
    draw = random.Random(2)
    busy = [
        sum(found) / (8 * max(found)) for found in (shares(step(draw) or [group(draw)], 8) for _ in range(20))
    ]

    assert sum(busy) / len(busy) >= 0.9
