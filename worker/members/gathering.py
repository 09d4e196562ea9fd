"""Which machines of a group are there. Machine 0 claims no job without all of them.

Each other machine keeps a connection to machine 0 open while it waits for a run. The connection is to the port after
that of the rendezvous, where torch listens only during a run. It carries one line: version and machine.
"""

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Self

from core.addresses import HostPort
from core.settings import Settings

log = logging.getLogger(__name__)

VERSION = version("regraft-server")  # machines with another one never meet in a run
CONNECT_SECONDS = 5.0
LOOK_SECONDS = 0.5  # of the thread, for its end
MAX_LINE = 200


def address_of(rendezvous: str) -> HostPort:
    host, port = HostPort.parse(rendezvous)
    return HostPort(host, port + 1)


class Gathering:
    """Machine 0 of a group: listens for the others. `with` listens."""

    def __init__(self, nodes: int, port: int) -> None:
        self.nodes, self.port = nodes, port
        self._machines: dict[socket.socket, int] = {}
        self._lines: dict[socket.socket, bytes] = {}
        self._last: list[int] = []  # missing, as the log has it
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Raises OSError: the port is taken."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listening = socket.create_server(("", self.port), family=family, dualstack_ipv6=dual)
        self._thread = threading.Thread(target=self._serve, args=[listening], name="gathering", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def missing(self) -> list[int]:
        """The machines that are not there, in order."""
        return sorted(set(range(1, self.nodes)) - set(self._machines.copy().values()))

    def is_complete(self) -> bool:
        missing = self.missing
        if missing != self._last:
            self._last = missing
            numbers = ", ".join(map(str, missing))
            log.info(
                f"waiting for the machines {numbers} of the group" if missing else "all machines are there"
            )
        return not missing

    def _serve(self, listening: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, listening:
            selector.register(listening, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(LOOK_SECONDS):
                    if key.fileobj is listening:
                        self._accept(listening, selector)
                    elif isinstance(key.fileobj, socket.socket) and not self._read(key.fileobj):
                        selector.unregister(key.fileobj)
                        self._forget(key.fileobj)
            for member in [*self._lines]:
                self._forget(member)

    def _accept(self, listening: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            member, _ = listening.accept()
            keep_alive(member)
            member.setblocking(False)
        except OSError:  # the other end has left, or no descriptor is free: then it stays ready
            self._closing.wait(LOOK_SECONDS)
            return
        selector.register(member, selectors.EVENT_READ)
        self._lines[member] = b""

    def _read(self, member: socket.socket) -> bool:
        """Returns whether the connection stays."""
        try:
            received = member.recv(MAX_LINE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._lines[member] += received
        line, end, _ = self._lines[member].partition(b"\n")
        if end and member not in self._machines:
            said, _, number = line.decode(errors="replace").partition(" ")
            if said != VERSION or not number.isdecimal():
                log.warning("a machine of another version, %s, is no member of this group", said[:40])
                return False
            self._machines[member] = int(number)
        return bool(received) and len(self._lines[member]) <= MAX_LINE

    def _forget(self, member: socket.socket) -> None:
        del self._lines[member]
        self._machines.pop(member, None)
        member.close()


@contextmanager
def gathered(settings: Settings) -> Iterator[Callable[[], bool]]:
    """Yield what says whether all machines of the group of machine 0 are there. Raises OSError: the port is taken."""
    if settings.nodes == 1:
        yield lambda: True
        return
    with Gathering(settings.nodes, address_of(settings.rendezvous).port) as gathering:
        yield gathering.is_complete


class Membership:
    """Another machine of a group: tells machine 0 that it is there, while it waits for a run."""

    def __init__(self, settings: Settings) -> None:
        self.address = address_of(settings.rendezvous)
        self.line = f"{VERSION} {settings.node_rank}\n".encode()
        self._connection: socket.socket | None = None

    def keep(self) -> None:
        """Connect, unless the connection is there. Call it again and again."""
        if self._connection is not None and self._is_open(self._connection):
            return
        self.close()
        with suppress(OSError):  # machine 0 is not there yet
            connection = socket.create_connection(self.address, timeout=CONNECT_SECONDS)
            keep_alive(connection)
            connection.sendall(self.line)
            connection.settimeout(None)  # with one, Python waits before each recv, MSG_DONTWAIT or not
            self._connection = connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @staticmethod
    def _is_open(connection: socket.socket) -> bool:
        try:
            return connection.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other machine has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
