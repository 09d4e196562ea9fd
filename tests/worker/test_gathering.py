"""Machine 0 of a group knows which of the others are there."""

import socket
import time
from collections.abc import Callable

import pytest

from core.settings import Settings
from tests.servers import reserve_port
from worker.members.gathering import Gathering, Membership, address_of


def settings_of(port: int, number: int = 0) -> Settings:
    return Settings(nodes=3, node_rank=number, rendezvous=f"127.0.0.1:{port}")


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_group_is_complete_while_all_of_its_machines_are_connected() -> None:
    port = reserve_port()
    first, second = (Membership(settings_of(port, number)) for number in (1, 2))
    first.keep()  # machine 0 is not there yet
    with Gathering(3, port + 1) as gathering:
        assert (gathering.missing, gathering.is_complete()) == ([1, 2], False)
        first.keep()
        first.keep()
        wait_until(lambda: gathering.missing == [2])
        second.keep()
        wait_until(gathering.is_complete)

        first.close()
        wait_until(lambda: gathering.missing == [1])
    second.close()


def test_a_machine_connects_again_to_a_machine_0_that_was_replaced() -> None:
    port = reserve_port()
    membership = Membership(settings_of(port, 1))
    for _ in range(2):
        with Gathering(2, port + 1) as gathering:

            def is_complete(gathering: Gathering = gathering) -> bool:
                membership.keep()
                return gathering.is_complete()

            wait_until(is_complete)
    membership.close()


def test_a_connection_that_is_there_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as machine_0:
        membership = Membership(settings_of(machine_0.getsockname()[1] - 1, 1))
        membership.keep()
        connection, _ = machine_0.accept()

        membership.keep()

        machine_0.setblocking(False)
        with pytest.raises(BlockingIOError):  # no other connection
            machine_0.accept()
        connection.close()
        membership.close()


def test_a_machine_of_another_version_is_none_of_the_group() -> None:
    port = reserve_port()
    with Gathering(2, port + 1) as gathering:
        for line in (b"0.0.0 1\n", b"nonsense\n"):
            with socket.create_connection(address_of(f"127.0.0.1:{port}")) as other:
                other.sendall(line)
                assert other.recv(1) == b""

        assert gathering.missing == [1]
