"""Ranks of a run on other machines: the leader's machine runs the job, and its members join the process group.

A member connects to the leader, and both prove that they know the group's key before anything is unpickled. Then it
acts like a rank of the leader's own machine (worker/learn/ranks.py) until the run ends. Every pickle has an HMAC, so
injected messages are rejected. Nothing is encrypted and arrays have no HMAC: an attacker on the network path can read
and alter them.

Imports no torch: `regraft-server member` only supervises the processes that do (worker/learn/member.py).
"""

import hmac
import logging
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from core.settings import Settings
from worker.learn.ranks import Helper, Line, RankLost

log = logging.getLogger(__name__)

# Messages are pickles of classes of this package, so both ends must run the same version.
VERSION = version("regraft-server").encode()

NONCE = 32  # bytes
SEAL = 32  # of SHA-256
HANDSHAKE_SECONDS = 5.0  # a few hundred bytes, from an idle process
RESTART_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two looks for a run


class Stranger(Exception):
    """The peer did not prove that it belongs to this group."""


class MembersMissing(Exception):
    """The run cannot start: machines of its group did not connect."""


class Signed(Line):
    """A Line over a network: each pickle is sealed with a key of this connection, its direction and its number."""

    SEAL = SEAL

    def __init__(self, end: socket.socket, key: bytes, *, sends: bytes, receives: bytes) -> None:
        super().__init__(end)
        self._key = key
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0

    def _seal(self, content: bytes) -> bytes:
        self._sent += 1
        return hmac.digest(self._key, b"%s %d " % (self._sends, self._sent) + content, "sha256")

    def _check(self, seal: bytearray, content: bytearray) -> None:
        self._received += 1
        expected = hmac.digest(self._key, b"%s %d " % (self._receives, self._received) + content, "sha256")
        if not hmac.compare_digest(seal, expected):
            raise Stranger("a message was altered or injected on the network")

    def _room(self, sizes: list[int]) -> list[bytearray]:
        # A member reads ahead, and new data must not overwrite arrays in use.
        return [bytearray(size) for size in sizes]


def admit(end: socket.socket, key: bytes) -> Signed:
    """Do the leader's side of the handshake. Raises Stranger, EOFError or OSError; the caller must then close `end`."""
    ours = secrets.token_bytes(NONCE)
    end.sendall(ours)
    greeting = read_exactly(end, NONCE + SEAL, HANDSHAKE_SECONDS)
    theirs, proof = greeting[:NONCE], greeting[NONCE:]
    both = ours + theirs
    if not hmac.compare_digest(proof, _proof(key, b"member", both)):
        raise Stranger("its REGRAFT_RANKS_KEY or version differs")
    end.sendall(_proof(key, b"leader", both))
    return Signed(end, _proof(key, b"messages", both), sends=b"leader", receives=b"member")


def join(end: socket.socket, key: bytes) -> Signed:
    """Do the member's side. Waits while the leader still reads its files. Raises as `admit`."""
    theirs, ours = read_exactly(end, NONCE), secrets.token_bytes(NONCE)
    both = theirs + ours
    end.sendall(ours + _proof(key, b"member", both))
    if not hmac.compare_digest(read_exactly(end, SEAL, HANDSHAKE_SECONDS), _proof(key, b"leader", both)):
        raise Stranger("the leader's REGRAFT_RANKS_KEY or version differs")
    return Signed(end, _proof(key, b"messages", both), sends=b"member", receives=b"leader")


def _proof(key: bytes, word: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"regraft %s %s " % (VERSION, word) + nonces, "sha256")


def read_exactly(end: socket.socket, size: int, seconds: float | None = None) -> bytes:
    """Receive all bytes within the deadline, so that a slow peer cannot block others."""
    deadline = None if seconds is None else time.monotonic() + seconds
    read = b""
    while len(read) < size:
        if deadline is not None:
            end.settimeout(max(deadline - time.monotonic(), 0.001))
        part = end.recv(size - len(read))
        if not part:
            raise EOFError
        read += part
    end.settimeout(None)
    return read


def notice_loss(end: socket.socket) -> None:
    """Detect a dead machine on an idle connection within a minute (TCP keepalive)."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, 20),
            (socket.TCP_KEEPINTVL, 10),
            (socket.TCP_KEEPCNT, 4),
        ):
            end.setsockopt(socket.IPPROTO_TCP, option, value)


def notice_unread(end: socket.socket) -> None:
    """Detect a dead machine while data is in flight. For the leader only: requires that the peer always reads."""
    if sys.platform == "linux":
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)


class Member(Helper):
    """Rank 0's handle on a rank of another machine."""

    def __init__(self, rank: int, line: Line, address: str) -> None:
        super().__init__(rank, line)
        self.address = address

    def _lost(self) -> RankLost:
        return RankLost(
            f"rank {self.rank}, a member at {self.address}, has disconnected; its log may have the reason"
        )


class Members:
    """Accepts the members of a run, from `listen` to `close`."""

    def __init__(self, address: tuple[str, int], key: bytes, count: int, *, patience_seconds: float) -> None:
        self.address = address
        self.key = key
        self.count = count
        self.patience_seconds = patience_seconds
        self._listening: socket.socket | None = None

    def listen(self) -> None:
        """Open the port; `gather` accepts the connections. Raises OSError if the port is in use."""
        self._listening = socket.create_server(self.address, backlog=self.count + 16)

    def gather(self, first: int) -> list[Member]:
        """Accept all members, as ranks from `first` in order of arrival, then close the port.

        Raises MembersMissing.
        """
        assert self._listening is not None, "listen comes first"
        log.info("waiting for %d ranks of other machines at %s:%d", self.count, *self.address)
        found: list[Member] = []
        deadline = time.monotonic() + self.patience_seconds
        while len(found) < self.count:
            try:
                self._listening.settimeout(max(deadline - time.monotonic(), 0.01))
                end, (host, port, *_) = self._listening.accept()
            except TimeoutError:
                for member in found:
                    member.close()
                raise MembersMissing(self._missing(len(found))) from None
            try:
                line = admit(end, self.key)
            except (Stranger, EOFError, OSError) as cause:
                log.warning("rejected %s:%d as a member of this run: %r", host, port, cause)
                end.close()
                continue
            notice_loss(end)
            notice_unread(end)
            found.append(Member(first + len(found), line, f"{host}:{port}"))
        self.close()
        return found

    def _missing(self, came: int) -> str:
        host, port = self.address
        return (
            f"{came} of {self.count} members have connected to {host}:{port} within {self.patience_seconds:g} s "
            "(REGRAFT_PATIENCE_SECONDS). Start `regraft-server member` on every other machine of the group, with this "
            "one as REGRAFT_LEADER and the same REGRAFT_RANKS and REGRAFT_RANKS_KEY"
        )

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None


def members_of(settings: Settings) -> Members | None:
    """Return the members that a run of this machine waits for; None for a single machine."""
    if settings.nodes == 1:
        return None
    count = (settings.nodes - 1) * settings.ranks
    address = settings.host, settings.ranks_port
    return Members(address, settings.ranks_key.encode(), count, patience_seconds=settings.patience_seconds)


# Member's side.


class ReadAhead:
    """A member's end of a Line. Always reads, so that the leader can tell a busy member from a dead one.

    Calls `gone` in another thread when the run has ended, to abort its computation.
    """

    def __init__(self, line: Line, gone: Callable[[BaseException], None]) -> None:
        self.line = line
        self._gone = gone
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="line", daemon=True).start()

    def send(self, message: Any) -> None:
        self.line.send(message)

    def receive(self) -> Any:
        return self._said.get()

    def _read(self) -> None:
        try:
            while True:
                self._said.put(self.line.receive())
        except BaseException as cause:
            self._gone(cause)


def wait_for_run(leader: str, key: bytes) -> Signed:
    """Retry until a run accepts this member. Logs the reason for a failure when it changes."""
    host, _, port = leader.rpartition(":")
    pause, last = FIRST_PAUSE, ""
    while True:
        try:
            end = socket.create_connection((host, int(port)), timeout=30)
        except OSError as cause:  # no run, or the host name does not resolve yet
            level, said = logging.INFO, f"no run at {leader} yet: {cause}"
        else:
            end.settimeout(None)
            notice_loss(end)
            try:
                return join(end, key)
            except (Stranger, EOFError, OSError) as cause:
                end.close()
                level = logging.WARNING
                said = f"rejected by the run at {leader}, which has ended or has another key: {cause!r}"
        if said != last:
            log.log(level, "%s", said)
            last = said
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def rank_command(gpu: int) -> Sequence[str]:
    return [sys.executable, "-m", "worker.learn.member", str(os.getpid()), str(gpu)]


class Seat:
    """One process of a member, restarted after each run, so that no state of a job survives."""

    def __init__(self, gpu: int, command: Callable[[int], Sequence[str]] = rank_command) -> None:
        self.gpu = gpu
        self.command = command
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        # The child dies with the thread that started it (PR_SET_PDEATHSIG), so the same thread waits for it.
        self.thread = threading.Thread(target=self._keep, name=f"rank {gpu}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Stop without blocking. A waiting process exits at once; one in a run exits with the run."""
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            # Own session: this process forwards Ctrl-C of a terminal.
            self._child = subprocess.Popen(
                self.command(self.gpu), stdin=subprocess.DEVNULL, start_new_session=True
            )
            if self._stopping.is_set():  # `stop` may have missed the new child
                self._child.terminate()
            status = self._child.wait()
            if status != 0 and not self._stopping.is_set():
                log.warning("the process for GPU %d exited with status %d", self.gpu, status)
                self._stopping.wait(RESTART_SECONDS)
