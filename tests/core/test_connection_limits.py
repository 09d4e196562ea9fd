"""Connections that cost a descriptor and send no request, against a real server behind a socket."""

import ast
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from core.connections import ConnectionLimit, client_of, limited, trusted_proxies
from core.settings import Settings
from core.telemetry.metrics import served

ROOT = Path(__file__).parents[2]
STARTS_A_SERVER = {"uvicorn.Config", "uvicorn.run", "serve_http", "start_http_server"}
PATIENCE = 60.0  # of a test on a busy machine
HALF = b"GET / HTTP/1.1\r\nHost: a\r\nX-"
WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"

Connect = Callable[[], socket.socket]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers when the whole body has arrived."""
    while (await receive()).get("more_body"):
        pass
    await PlainTextResponse("here")(scope, receive, send)


@contextmanager
def serving(limit: ConnectionLimit, header_seconds: float) -> Iterator[Connect]:
    """Serve the application, and return a function that opens a connection."""
    config = uvicorn.Config(
        app,
        log_level="critical",
        log_config=None,
        lifespan="off",
        ws="none",
        http=limited(limit, header_seconds),
        timeout_keep_alive=10 * round(PATIENCE),
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as opened:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection(listening.getsockname(), timeout=PATIENCE))

        try:
            yield connect
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


def is_closed(connection: socket.socket) -> bool:
    """Wait for the server to close the connection without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def answered(connection: socket.socket) -> bool:
    """Whether the server answers. Reads one response and nothing after it."""
    received = b""
    while not received.endswith(b"here"):
        more = connection.recv(1)
        if not more:
            return False
        received += more
    return received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"G", HALF], ids=["nothing", "a byte", "half a header"])
def test_a_connection_that_does_not_send_its_header_is_closed(sent: bytes) -> None:
    with serving(ConnectionLimit(0), header_seconds=1.0) as connect:
        connection = connect()
        connection.sendall(sent)

        assert is_closed(connection)


def test_a_header_that_arrives_byte_by_byte_is_not_given_more_time() -> None:
    with serving(ConnectionLimit(0), header_seconds=1.0) as connect:
        connection = connect()
        connection.sendall(HALF)
        readable: list[socket.socket] = []
        while not readable:
            connection.sendall(b"a")
            readable, _, _ = select.select([connection], [], [], 0.05)

        assert is_closed(connection)


def test_the_second_header_of_a_connection_has_the_same_time() -> None:
    with serving(ConnectionLimit(0), header_seconds=1.0) as connect:
        connection = connect()
        connection.sendall(WHOLE)
        assert answered(connection)

        connection.sendall(HALF)

        assert is_closed(connection)


def test_half_a_header_behind_a_whole_request_has_the_same_time() -> None:
    """Also if both arrive at once: the half is read before the response, and nothing arrives after it."""
    with serving(ConnectionLimit(0), header_seconds=1.0) as connect:
        connection = connect()
        connection.sendall(WHOLE + HALF)
        assert answered(connection)

        assert is_closed(connection)


def test_a_whole_request_behind_another_is_answered() -> None:
    with serving(ConnectionLimit(0), header_seconds=1.0) as connect:
        connection = connect()
        connection.sendall(WHOLE + WHOLE + HALF)

        assert [answered(connection), answered(connection)] == [True, True]
        assert is_closed(connection)


def test_a_body_may_take_longer_than_a_header() -> None:
    """The first connection is closed after the time of a header; the second one, which began before, is not."""
    with serving(ConnectionLimit(0), header_seconds=1.0) as connect:
        slow = connect()
        slow.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na")
        for _ in range(2):
            assert is_closed(connect())

        slow.sendall(b"b")

        assert answered(slow)


def test_an_address_has_a_number_of_connections_and_gets_back_those_it_closes() -> None:
    with serving(ConnectionLimit(3), header_seconds=PATIENCE) as connect:
        kept = [connect() for _ in range(3)]
        for connection in kept:
            connection.sendall(WHOLE)
            assert answered(connection)

        assert is_closed(connect())

        kept[0].close()
        assert eventually_answered(connect)


def eventually_answered(connect: Connect) -> bool:
    """The server notices a closed connection a moment later. Until then it closes new ones."""
    for _ in range(1000):
        connection = connect()
        try:
            connection.sendall(WHOLE)
            if answered(connection):
                return True
        except OSError:
            continue
    return False


def test_a_trusted_proxy_has_connections_without_a_limit() -> None:
    settings = Settings(
        sso_header="X-User",
        sso_proxies=("10.0.3.0/24",),
        sso_rules=({"user": "*", "project": "p", "scope": "read"},),
    )
    is_proxy = trusted_proxies("192.0.2.1,fd00::/8", settings)
    limit = ConnectionLimit(1, is_proxy)

    entered = {
        address: [limit.enter(address) for _ in range(2)]
        for address in ("192.0.2.1", "fd00::7", "10.0.3.9", "192.0.2.2", "10.0.4.1")
    }

    assert entered == {
        "192.0.2.1": [True, True],
        "fd00::7": [True, True],
        "10.0.3.9": [True, True],
        "192.0.2.2": [True, False],
        "10.0.4.1": [True, False],
    }


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
    ],
)
def test_an_ipv6_host_counts_with_its_network(one: str, other: str, same: bool) -> None:
    assert (client_of(one) == client_of(other)) is same


def test_every_server_of_the_service_has_these_limits() -> None:
    """API, inference server and metrics: each server gets `**connection_options(settings)`.

    The engine of a job listens on a Unix socket in a private folder, and has the job as its one client.
    """
    servers = {
        f"{file.relative_to(ROOT)}:{call.lineno}": [ast.unparse(option.value) for option in call.keywords]
        for package in ("api", "core", "graders", "worker")
        for file in (ROOT / package).rglob("*.py")
        if file != ROOT / "worker/engine/child.py"
        and any(name in file.read_text() for name in STARTS_A_SERVER)
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in STARTS_A_SERVER
    }

    assert len(servers) >= 3
    assert [at for at, options in servers.items() if "connection_options(settings)" not in options] == []


def test_metrics_close_connections_of_an_address_that_has_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.1")  # by default this machine is exempt
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as opened:
        address = listening.getsockname()
        with served(listening, Settings(connections_per_address=1)):
            first, second = (
                opened.enter_context(socket.create_connection(address, timeout=PATIENCE)) for _ in range(2)
            )

            assert is_closed(second)
            first.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            assert first.recv(15) == b"HTTP/1.1 200 OK"
