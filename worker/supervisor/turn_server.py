"""Give turns on the worker's device to the processes of its jobs (worker/sharing/turns.py), in the order of requests.

A process that dies loses its turn with its connection.
"""

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from worker.sharing.turns import ASK, DONE, GRANT

log = logging.getLogger(__name__)
T = TypeVar("T")
Accept = Callable[[socket.socket], tuple[socket.socket, Any]]
RETRY_SECONDS = 1.0  # of a connection that could not be accepted


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
    """Listens at the Unix socket `address` from its construction to `close`. Raises OSError: it cannot."""

    def __init__(self, address: Path, accept: Accept = socket.socket.accept) -> None:
        self._take = accept
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._queue = TurnQueue(_grant)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ends, self._end = socket.socketpair()
        self._selector.register(self._ends, selectors.EVENT_READ)
        self._accepts_at: float | None = None  # once a connection could not be accepted
        self._thread = threading.Thread(target=self._serve, name="turns", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as cause:  # the system has no other thread now
            self._close_all()
            raise OSError(errno.EAGAIN, str(cause)) from cause

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
            for key, _ in self._selector.select(self._until_accepting()):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._ends:
                    return
                if ready is self._listener:
                    self._accept()
                else:
                    self._read_requests(ready)

    def _accept(self) -> None:
        try:
            client, _ = self._take(self._listener)
        except OSError as cause:
            # No descriptor is free, until a job ends. The jobs that are connected keep their turns.
            log.warning("a job could not connect for its turns: %s; retrying", cause)
            self._selector.unregister(self._listener)
            self._accepts_at = time.monotonic() + RETRY_SECONDS
            return
        self._selector.register(client, selectors.EVENT_READ)

    def _until_accepting(self) -> float | None:
        """Return how long to wait before the next connection is accepted; None: until there is one."""
        if self._accepts_at is None:
            return None
        if (seconds := self._accepts_at - time.monotonic()) > 0:
            return seconds
        self._accepts_at = None
        self._selector.register(self._listener, selectors.EVENT_READ)
        return None

    def _read_requests(self, client: socket.socket) -> None:
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
        self._listener.close()
        self._selector.close()
        self._end.close()


def _grant(client: socket.socket) -> bool:
    try:
        client.sendall(GRANT)
    except OSError:  # it has died, which the selector reports next
        return False
    return True
