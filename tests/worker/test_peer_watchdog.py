"""Machines that vanish, by counters in a store."""

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import Store, TCPStore

from worker.training.peer_watchdog import Presence, keep


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def connected(store: TCPStore) -> Store:
    """Another connection to it."""
    other: Store = store.clone()  # type: ignore[attr-defined]  # its stub is missing
    return other


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def test_a_rank_that_counts_is_present_for_as_long_as_the_run_takes(store: TCPStore) -> None:
    clock = Clock()
    first = Presence(store, 0, [8, 16], 60, clock)
    others = [Presence(connected(store), rank, [0], 60, clock) for rank in (8, 16)]

    for _ in range(100):
        clock.now += 50
        for one in (*others, first):
            one.exchange()

        assert [one.vanished() for one in (first, *others)] == [[], [], []]


def test_a_rank_that_stops_counting_has_vanished_after_the_limit(store: TCPStore) -> None:
    clock = Clock()
    first = Presence(store, 0, [8, 16], 60, clock)
    there, gone = (Presence(connected(store), rank, [0], 60, clock) for rank in (8, 16))
    for one in (there, gone, first):
        one.exchange()

    clock.now += 60
    for one in (there, first):
        one.exchange()
    assert first.vanished() == []

    clock.now += 1
    assert first.vanished() == [16]


def test_a_store_that_does_not_answer_is_a_first_machine_that_has_vanished(store: TCPStore) -> None:
    """The exchange never returns, so the time passes without one."""
    clock = Clock()
    member = Presence(store, 8, [0], 60, clock)

    clock.now += 61

    assert member.vanished() == [0]


def test_an_answer_of_the_first_machine_is_a_sign_of_life(store: TCPStore) -> None:
    answered, left = threading.Event(), threading.Event()

    keep(Presence(store, 8, [0], 0.1), lambda rank: None, left, answered.set)

    assert answered.wait(30)
    left.set()


class Silent:
    """A store on a machine without power."""

    def __init__(self) -> None:
        self.power = threading.Event()

    def add(self, key: str, amount: int, /) -> int:
        self.power.wait()
        return amount


def test_the_watch_does_not_wait_for_the_store() -> None:
    silent, found, left = Silent(), threading.Event(), threading.Event()
    lost: list[int] = []

    def vanished(rank: int) -> None:
        lost.append(rank)
        found.set()

    keep(Presence(silent, 8, [0], 0.05), vanished, left)

    assert found.wait(30)
    assert lost == [0]
    left.set()
    silent.power.set()


def test_nobody_is_missed_after_the_end_of_the_run(store: TCPStore) -> None:
    left = threading.Event()
    left.set()
    lost: list[int] = []

    keep(Presence(store, 0, [8], 1e-9), lost.append, left)

    for thread in threading.enumerate():
        if thread.name in ("present", "watch"):
            thread.join(30)
    assert lost == []
