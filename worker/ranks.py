"""Several processes for one run, each with the model on a GPU of its own: the first is the run, the others help it.

The run (rank 0) samples, grades, steps the optimizer and talks to the database. A helper computes the gradient of
the groups that it is sent, and knows of nothing else. They speak over a pair of sockets that only they have: an adapter
and its gradient are small, so that this needs no collective library, and no port that anybody could reach. Helpers on
other machines are in worker/members.py.

Nothing here imports torch: the processes are started before the run has, and start up beside it.
"""

import os
import pickle
import socket
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from core.methods import Resolved
from core.registry import BaseModelEntry
from worker.types import Pack

if TYPE_CHECKING:
    from worker.gradient import Totals
    from worker.members import Members
    from worker.policy import Policy


@dataclass(frozen=True)
class Model:
    """What every rank of a run loads, so that all compute the same."""

    name: str
    entry: BaseModelEntry
    cache: Path
    settings: Resolved
    seed: int
    checkpointed: bool  # activations are computed twice

    def load(self, device: str) -> "Policy":
        from worker.policy import Policy, load_base

        base = load_base(self.name, self.entry, self.cache, device, self.settings.chat_template)
        policy = Policy(base, rank=self.settings.lora_rank, alpha=self.settings.lora_alpha, seed=self.seed)
        if self.checkpointed:
            policy.checkpoint_layers()
        return policy


# What a helper is sent. It answers Ready to the first of these and Part to Collect, and ends with the connection.


@dataclass(frozen=True)
class Start:
    model: Model
    device: str  # "cuda" alone: the rank has one of its own
    threads: int  # of torch; 0: its own choice
    token_budget: int
    held_to: str


@dataclass(frozen=True)
class Weights:
    """The adapter as it is now."""

    vector: NDArray[np.float32]


@dataclass(frozen=True)
class Reference:
    """The adapter of the KL's reference."""

    vector: NDArray[np.float32]


@dataclass(frozen=True)
class Add:
    packs: Sequence[Pack]
    std: float


@dataclass(frozen=True)
class Again:
    std: float


@dataclass(frozen=True)
class Collect:
    pass


@dataclass(frozen=True)
class End:
    pass


Message = Start | Weights | Reference | Add | Again | Collect | End


@dataclass(frozen=True)
class Ready:
    pass


@dataclass(frozen=True)
class Part:
    """What came of the packs since the last Collect: their gradient, summed, and what was counted."""

    gradient: NDArray[np.float32]
    totals: "Totals"


class Line:
    """One end of the connection between two ranks.

    As multiprocessing's Connection, but arrays are neither copied nor given new memory each time: 168 MB there and
    back took that 0.9 s, and take this 0.1.
    """

    SEAL = 0  # bytes before each pickle that say whose it is: nobody else has this pair of sockets

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._arrays: list[bytearray] = []  # what was received last

    def send(self, message: Any) -> None:
        """Raises OSError where nobody listens any more."""
        arrays: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        parts = [memoryview(pickled), *(array.raw() for array in arrays)]
        sizes = [part.nbytes for part in parts]
        head = struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes)
        self._end.sendall(head + self._seal(head + pickled))
        for part in parts:
            self._end.sendall(part)

    def receive(self) -> Any:
        """The next message. Its arrays are good until the next one with arrays.

        Raises EOFError, or OSError, where nobody speaks any more.
        """
        head = self._read(bytearray(8))
        [number] = struct.unpack("<Q", head)
        head += self._read(bytearray(8 * number))
        pickled, *arrays = struct.unpack_from(f"<{number}Q", head, 8)
        seal = self._read(bytearray(self.SEAL))
        content = self._read(bytearray(pickled))
        self._check(seal, head + content)
        buffers = [self._read(one) for one in self._room(arrays)]
        return pickle.loads(content, buffers=buffers if arrays else None)

    def _seal(self, content: bytes) -> bytes:
        return b""

    def _check(self, seal: bytearray, content: bytearray) -> None:
        """Whether it is the other side's, before it is unpickled."""

    def _room(self, sizes: list[int]) -> list[bytearray]:
        """Where arrays of these many bytes go."""
        if not sizes:
            return []
        if sizes != [len(one) for one in self._arrays]:
            self._arrays = [bytearray(size) for size in sizes]
        return self._arrays

    def _read(self, into: bytearray) -> bytearray:
        left = memoryview(into)
        while left:
            read = self._end.recv_into(left)
            if read == 0:
                raise EOFError
            left = left[read:]
        return into

    def close(self) -> None:
        self._end.close()


class RankLost(Exception):
    """A helper ended in the middle of a run. The step cannot be completed without it."""


class TooFewGpus(Exception):
    """Each rank needs a GPU of its own."""


class Helper(ABC):
    """Another rank of this run, as rank 0 sees it."""

    def __init__(self, rank: int, line: Line) -> None:
        self.rank = rank
        self._line = line

    def own(self, device: str) -> str:
        """Which of those of a kind it is to use."""
        return device

    def send(self, message: Message) -> None:
        """Raises RankLost."""
        try:
            self._line.send(message)
        except OSError as cause:
            raise self._lost() from cause

    def receive(self) -> Any:
        """Its answer, waited for. Raises RankLost."""
        try:
            return self._line.receive()
        except (EOFError, OSError) as cause:
            raise self._lost() from cause

    @abstractmethod
    def _lost(self) -> RankLost:
        """What to say of one that does not listen any more."""

    def close(self) -> None:
        """End it; whatever it computes is not wanted any more."""
        self._line.close()


class Child(Helper):
    """A rank on this machine."""

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # No session of its own: whoever kills the run's process group has the helpers killed, too.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "worker.rank", str(os.getpid()), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        super().__init__(rank, Line(ours))

    def own(self, device: str) -> str:
        return f"cuda:{self.rank}" if device == "cuda" else device

    def _lost(self) -> RankLost:
        # Its end of the connection is closed, so it is ending or has ended.
        status = self.process.wait()
        return RankLost(
            f"rank {self.rank} ended with status {status}; if it said why, that is in the job's log"
        )

    def close(self) -> None:
        super().close()
        self.process.kill()
        self.process.wait()


class Ranks:
    """The processes of one run, this one included, from `with` to its end."""

    def __init__(self, count: int, members: "Members | None" = None) -> None:
        """`count` of them on this machine, and the members on others."""
        self.count = count
        self.total = count + (members.count if members else 0)
        self.helpers: list[Helper] = []
        self._members = members

    def __enter__(self) -> Self:
        if self._members is not None:
            self._members.listen()
        # On Linux they die with the thread that starts them (PR_SET_PDEATHSIG), so it should be one that lasts.
        for rank in range(1, self.count):
            self.helpers.append(Child(rank))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        for helper in self.helpers:
            helper.close()
        if self._members is not None:
            self._members.close()

    def start(self, model: Model, *, device: str, threads: int, token_budget: int, held_to: str) -> None:
        """Have the others load the model, while this process does; on "cuda" each to the GPU of its number.

        Members are waited for. Raises RankLost, and MembersMissing of worker/members.py.
        """
        if self._members is not None and len(self.helpers) < self.total - 1:
            self.helpers += self._members.gather(self.count)
        for helper in self.helpers:
            helper.send(Start(model, helper.own(device), threads, token_budget, held_to))

    def wait(self) -> None:
        """Until all have loaded it. Raises RankLost."""
        for helper in self.helpers:
            helper.receive()
