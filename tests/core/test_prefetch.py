"""Threads that work on the next items while the result of one is used."""

from itertools import islice

import pytest

from core.results.prefetch import MAX_AHEAD, ahead


class Worker:
    """Doubles numbers, and remembers which ones; a negative one is an error."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.discarded: list[int] = []

    def __call__(self, number: int) -> int:
        self.begun.append(number)
        if number < 0:
            raise ValueError(number)
        return 2 * number


def test_results_come_in_the_order_of_the_items() -> None:
    assert list(ahead(Worker(), range(50), print)) == list(range(0, 100, 2))
    assert list(ahead(Worker(), [], print)) == []


@pytest.mark.parametrize(("used", "most"), [(1, 1), (2, 1 + 2), (3, 2 + MAX_AHEAD), (10, 9 + MAX_AHEAD)])
def test_the_fewer_results_are_used_the_fewer_are_computed(used: int, most: int) -> None:
    work = Worker()

    results = ahead(work, range(100), work.discarded.append)
    assert list(islice(results, used)) == list(range(0, 2 * used, 2))
    results.close()

    assert used <= len(work.begun) <= most
    assert sorted(work.discarded) == sorted(2 * number for number in work.begun if number >= used)


def test_an_error_rises_at_its_place_and_leaves_nothing_behind() -> None:
    work = Worker()
    results = ahead(work, [1, 2, -1, 3, 4], work.discarded.append)

    assert list(islice(results, 2)) == [2, 4]
    with pytest.raises(ValueError, match="-1"):
        next(results)
    assert set(work.begun) - {1, 2, -1} == {number // 2 for number in work.discarded}
