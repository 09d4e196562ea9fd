"""Turns of jobs on the device that they share: in which order they get them, and how long they keep them."""

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from worker.sharing.turns import ASK, DONE, GRANT, DeviceTurns, SharedClock, TurnsLost
from worker.supervisor.turn_server import TurnQueue, TurnServer


class Time:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "turns"


@pytest.fixture
def connect(address: Path) -> Iterator[Callable[[], socket.socket]]:
    """Clients of a server, as bytes."""
    server = TurnServer(address)
    clients: list[socket.socket] = []

    def client() -> socket.socket:
        clients.append(socket.socket(socket.AF_UNIX))
        clients[-1].settimeout(60)
        clients[-1].connect(str(address))
        return clients[-1]

    yield client
    for one in clients:
        one.close()
    server.close()


class Worker:
    """Grants each turn at once, and keeps what it was sent. `before` is called before each grant."""

    def __init__(self, address: Path, before: Callable[[], object] = lambda: None) -> None:
        self.messages = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._before = before
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener:
            self._client = self._listener.accept()[0]
        with self._client as client:
            while message := client.recv(1):
                self.messages += message
                if message == ASK:
                    self._before()
                    client.sendall(GRANT)

    def heard(self) -> bytes:
        """All messages up to now. It hears no more."""
        self._client.shutdown(socket.SHUT_RD)
        self._thread.join(60)
        return self.messages


def test_turns_are_given_in_the_order_of_requests() -> None:
    turns: list[str] = []

    def grant(client: str) -> bool:
        turns.append(client)
        return True

    queue = TurnQueue(grant)
    for client in ("first", "second", "third"):
        queue.ask(client)
    for client in ("first", "second", "third"):  # each requests its next turn immediately
        queue.leave(client)
        queue.ask(client)

    assert turns == ["first", "second", "third", "first"]


def test_a_process_gets_a_turn_when_it_asks(connect: Callable[[], socket.socket]) -> None:
    first, second = connect(), connect()

    first.sendall(ASK)
    assert first.recv(1) == GRANT
    first.sendall(DONE)
    second.sendall(ASK)
    assert second.recv(1) == GRANT


def test_a_process_that_dies_loses_its_turn(connect: Callable[[], socket.socket]) -> None:
    first, second = connect(), connect()
    first.sendall(ASK)
    assert first.recv(1) == GRANT

    second.sendall(ASK)
    first.close()

    assert second.recv(1) == GRANT


def test_one_that_dies_while_it_waits_delays_nobody(connect: Callable[[], socket.socket]) -> None:
    first, second, third = connect(), connect(), connect()
    first.sendall(ASK)
    assert first.recv(1) == GRANT

    second.sendall(ASK)
    third.sendall(ASK)
    second.close()
    first.sendall(DONE)

    assert third.recv(1) == GRANT


def test_a_turn_is_kept_until_its_second_is_over(address: Path) -> None:
    time = Time()
    worker, turns = Worker(address), DeviceTurns(address, clock=time)

    with turns:
        time.now += 0.9
        turns.offer()
        time.now += 0.2
        turns.offer()
        turns.offer()

    assert worker.heard() == ASK + DONE + ASK + DONE


def test_a_turn_ends_when_the_device_has_computed_what_was_queued(address: Path) -> None:
    """Kernels are queued: the next process would else compute beside them."""
    time = Time()
    worker, turns = Worker(address), DeviceTurns(address, clock=time)
    heard = []
    turns.synchronize_with(lambda: heard.append(worker.messages))

    with turns:
        time.now += 1.1
        turns.offer()

    assert (heard, worker.heard()) == ([ASK, ASK + DONE + ASK], ASK + DONE + ASK + DONE)


def test_a_turn_ends_also_if_the_device_has_failed(address: Path) -> None:
    worker, turns = Worker(address), DeviceTurns(address, clock=Time())

    def fail() -> None:
        raise RuntimeError("CUDA error")

    turns.synchronize_with(fail)
    with pytest.raises(RuntimeError, match="CUDA error"), turns:
        pass

    assert worker.heard() == ASK + DONE


def test_what_computes_inside_of_a_turn_asks_for_no_other(address: Path) -> None:
    worker, turns = Worker(address), DeviceTurns(address, clock=Time())

    def compute() -> None:
        with turns:
            turns.offer()

    with turns:
        compute()

    assert worker.heard() == ASK + DONE


def test_threads_of_a_process_share_its_turn(address: Path) -> None:
    worker, turns = Worker(address), DeviceTurns(address, clock=Time())

    def compute() -> None:
        with turns:
            pass

    with turns:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join(60)

    assert worker.heard() == ASK + DONE


def test_the_time_of_waiting_is_a_phase_of_its_own(address: Path) -> None:
    """So that usage, budgets and costs are those of a job that runs alone."""
    time = Time()

    def wait() -> None:
        time.now += 7.0

    worker, turns = Worker(address, before=wait), DeviceTurns(address, clock=time)
    clock = SharedClock(turns, time)

    with clock("training"), turns:
        time.now += 0.5
    with clock("eval"):
        time.now += 1.0

    assert clock.seconds == {"training": 0.5, "waiting": 7.0, "eval": 1.0}
    worker.heard()


def test_waiting_is_no_sign_of_a_hung_run(address: Path) -> None:
    """This turn is granted only after the process has shown that it lives."""
    beaten = threading.Event()
    worker, turns = (
        Worker(address, before=lambda: beaten.wait(60)),
        DeviceTurns(address, beaten.set, beat_seconds=0.01),
    )

    with turns:
        pass

    assert beaten.is_set()
    worker.heard()


def test_a_worker_without_a_free_descriptor_accepts_later_and_gives_turns_meanwhile(address: Path) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")]

    def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
        if joined and failures:
            raise failures.pop()
        return listener.accept()

    joined: list[DeviceTurns] = []
    server = TurnServer(address, accept)
    first = DeviceTurns(address)
    with first:
        joined.append(first)
    second = DeviceTurns(address)

    for turns in (first, second):
        with turns:
            pass

    assert failures == []
    server.close()


def test_a_worker_that_is_gone_ends_the_run(address: Path) -> None:
    server, turns = TurnServer(address), DeviceTurns(address)
    with turns:
        server.close()

    with pytest.raises(TurnsLost), turns:
        pass


def test_a_turn_that_was_lost_when_it_was_offered_leaves_nobody_waiting_for_it(address: Path) -> None:
    time, server = Time(), TurnServer(address)
    turns = DeviceTurns(address, clock=time)

    def lose() -> None:
        with turns:
            server.close()
            time.now += 2.0
            turns.offer()

    def enter() -> None:
        with pytest.raises(TurnsLost), turns:
            pass

    with pytest.raises(TurnsLost):
        lose()
    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(60)

    assert not thread.is_alive()
