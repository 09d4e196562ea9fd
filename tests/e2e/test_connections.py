"""Limits of connections of the server as `regraft-server up` starts it."""

import re
import socket
from pathlib import Path

from tests.e2e.conftest import Server


def test_half_a_request_is_closed_and_the_server_may_use_all_descriptors(server: Server) -> None:
    """Without an API key: 900 such connections stopped a server with 1,024 descriptors."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-")

        assert connection.recv(1) == b""

    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    found = re.search(r"Max open files +(\d+) +(\d+)", limits)
    assert found is not None
    assert found[1] == found[2]
