"""A client that leaves ends what the server computes for it, at once."""

import json
import socket
from pathlib import Path

import psutil

from tests.attacks.conftest import Attacked, eventually

# A second; on a machine whose cores are all taken it may be more. The graders would run for 100.
AT_ONCE = 5.0


def test_a_client_that_leaves_ends_its_grader(attacked: Attacked) -> None:
    before = set(attacked.process.children(recursive=True))
    with request(attacked, "def grade(sample, item):\n    while True: pass"):
        eventually(lambda: bool(spinning(attacked, before)), 30)
        graders = spinning(attacked, before)

    eventually(lambda: not any(grader.is_running() for grader in graders), AT_ONCE)


def test_a_client_that_leaves_while_it_waits_is_not_served_later(attacked: Attacked, tmp_path: Path) -> None:
    """More than a project may run at once. All leave, and the next one is served at once."""
    waiting = [request(attacked, f"def grade(sample, item):\n    while True: pass\n# {n}") for n in range(12)]
    for connection in waiting:
        connection.close()

    assert attacked.serves()


def request(attacked: Attacked, source: str) -> socket.socket:
    """A connection with a run on it. Closing it is hanging up."""
    grader = {"type": "python", "name": "p", "source": source}
    body = json.dumps({"grader": grader, "model_sample": "x"}).encode()
    head = (
        "POST /v1/fine_tuning/alpha/graders/run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {attacked.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", attacked.server.port))
    connection.sendall(head.encode() + body)
    return connection


def spinning(attacked: Attacked, before: set[psutil.Process]) -> list[psutil.Process]:
    """Processes of the server that were not there before, have no children and compute: graders at work."""
    found = []
    for process in attacked.process.children(recursive=True):
        try:
            if process not in before and not process.children() and process.cpu_times().user > 0.3:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found
