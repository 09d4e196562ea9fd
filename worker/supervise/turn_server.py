"""Give turns on the worker's device to the processes of its jobs (worker/sharing/turns.py), in the order of requests.

A process that dies loses its turn with its connection.
"""

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from worker.sharing.turns import ASK, DONE, GRANT

T = TypeVar("T")


class TurnQueue(Generic[T]):
    """Gives one turn at a time, in the order of requests. `grant` returns False for one that is gone."""

    def __init__(self, grant: Callable[[T], bool]) -> None:
        self._grant = grant
        self._waiting: deque[T] = deque()
        self._current: T | None = None

    def ask(self, client: T) -> None:
        self._waiting.append(client)
        self._give()

    def leave(self, client: T) -> None:
        """End the turn of this client, or its waiting."""
        if self._current is client:
            self._current = None
        with contextlib.suppress(ValueError):
            self._waiting.remove(client)
        self._give()

    def _give(self) -> None:
        while self._current is None and self._waiting:
            client = self._waiting.popleft()
            if self._grant(client):
                self._current = client


class TurnServer:
    """Listens at the Unix socket `address` from its construction to `close`."""

    def __init__(self, address: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._queue = TurnQueue(_grant)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ends, self._end = socket.socketpair()
        self._selector.register(self._ends, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="turns", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has failed
            self._end.send(b"x")
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._listen()
        finally:
            self._close_all()  # so that no job waits for a turn that nothing gives

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._ends:
                    return
                if ready is self._listener:
                    self._selector.register(ready.accept()[0], selectors.EVENT_READ)
                else:
                    self._hear(ready)

    def _hear(self, client: socket.socket) -> None:
        try:
            said = client.recv(64)
        except OSError:
            said = b""
        for number in said:
            match bytes([number]):
                case message if message == ASK:
                    self._queue.ask(client)
                case message if message == DONE:
                    self._queue.leave(client)
        if not said:
            self._selector.unregister(client)
            client.close()
            self._queue.leave(client)

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._end.close()


def _grant(client: socket.socket) -> bool:
    try:
        client.sendall(GRANT)
    except OSError:  # it has died, which the selector reports next
        return False
    return True
