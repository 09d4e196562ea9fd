"""Run the ranks of a job that several machines share, each with the model on its own GPU. Rank 0 is the run.

One machine alone uses torch.distributed (worker/learn/distributed.py).

Rank 0 samples, grades, steps the optimizer and uses the database. The other ranks only compute gradients of the groups
that rank 0 sends, over a private socket pair: an adapter and its gradient are small, so no collective library and no
open port are needed. Ranks on other machines are in worker/learn/members.py.

Imports no torch, so that the processes start before rank 0 has imported it, in parallel.
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
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.registry import BaseModelEntry
from worker.learn.totals import Totals
from worker.types import Pack

if TYPE_CHECKING:
    from worker.model.policy import Policy
    from worker.model.support import ForwardVerdict


@dataclass(frozen=True)
class Model:
    """The model and settings that every rank of a run loads."""

    name: str
    entry: BaseModelEntry
    cache: Path
    settings: Resolved | ResolvedOffline
    seed: int
    checkpointed: bool  # activations are computed twice
    sampled: bool  # by rank 0 with the transformers sampler, whose decode limits the choice of a forward pass

    def load(self, device: str) -> "Policy":
        from worker.model.policy import Policy, load_base

        base = load_base(
            self.name,
            self.entry,
            self.cache,
            device,
            self.settings.chat_template,
            self.settings.chat_template_kwargs,
        )
        policy = Policy(
            base,
            rank=self.settings.lora_rank,
            alpha=self.settings.lora_alpha,
            seed=self.seed,
            targets=self.settings.lora_targets,
        )
        if self.checkpointed:
            policy.checkpoint_layers()
        return policy

    def load_checked(self, device: str) -> "Policy":
        """Load it, and choose the forward pass. Raises UnsupportedModel."""
        policy = self.load(device)
        self.check(policy)
        return policy

    def check(self, policy: "Policy") -> "ForwardVerdict":
        """Choose the forward pass, by the same rule on every rank.

        Raises:
            UnsupportedModel: none is right.
        """
        from worker.model import verdicts

        return verdicts.probed(
            policy, self.entry, self.cache, sampled=self.sampled, targets=self.settings.lora_targets
        )


# Messages to a rank. It replies Ready to the first of these and Part to Collect, and exits with the connection.


@dataclass(frozen=True)
class Start:
    model: Model
    device: str  # "cuda" without an index: the rank sees only its own GPU
    threads: int  # of torch; 0: torch's default
    token_budget: int
    held_to: str


@dataclass(frozen=True)
class Weights:
    """The current adapter."""

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
    """The summed gradient and totals of all packs since the last Collect."""

    gradient: NDArray[np.float32]
    totals: Totals


class Line:
    """One end of the connection between two ranks.

    Like multiprocessing's Connection, but without copies of arrays or new allocations: a round trip of 168 MB takes
    0.1 s instead of 0.9 s.
    """

    SEAL = 0  # bytes of HMAC before each pickle; none for a private socket pair

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._arrays: list[bytearray] = []  # buffers of the last message

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the peer is gone."""
        arrays: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        parts = [memoryview(pickled), *(array.raw() for array in arrays)]
        sizes = [part.nbytes for part in parts]
        head = struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes)
        self.end.sendall(head + self._seal(head + pickled))
        for part in parts:
            self.end.sendall(part)

    def receive(self) -> Any:
        """Receive a message. Its arrays are valid until the next message with arrays.

        Raises EOFError or OSError if the peer is gone.
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
        """Authenticate a message before it is unpickled."""

    def _room(self, sizes: list[int]) -> list[bytearray]:
        """Return buffers of these sizes."""
        if not sizes:
            return []
        if sizes != [len(one) for one in self._arrays]:
            self._arrays = [bytearray(size) for size in sizes]
        return self._arrays

    def _read(self, into: bytearray) -> bytearray:
        left = memoryview(into)
        while left:
            read = self.end.recv_into(left)
            if read == 0:
                raise EOFError
            left = left[read:]
        return into

    def close(self) -> None:
        self.end.close()


class RankLost(Exception):
    """A rank exited during a run, so the step cannot be completed."""


class TooFewGpus(Exception):
    """There are fewer GPUs than ranks; each rank needs its own."""


class Helper(ABC):
    """Rank 0's handle on another rank of this run."""

    def __init__(self, rank: int, line: Line) -> None:
        self.rank = rank
        self.line = line

    def own(self, device: str) -> str:
        """Which of those of a kind it is to use."""
        return device

    def send(self, message: Message) -> None:
        """Raises RankLost."""
        try:
            self.line.send(message)
        except OSError as cause:
            raise self._lost() from cause

    def receive(self) -> Any:
        """Wait for the reply. Raises RankLost."""
        try:
            return self.line.receive()
        except (EOFError, OSError) as cause:
            raise self._lost() from cause

    @abstractmethod
    def _lost(self) -> RankLost:
        """Describe why the rank is gone."""

    def close(self) -> None:
        """End the rank, even during a computation."""
        self.line.close()


class Child(Helper):
    """A rank on this machine."""

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # In the run's process group, so that a kill of the group includes the ranks.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "worker.learn.rank", str(os.getpid()), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        super().__init__(rank, Line(ours))

    def own(self, device: str) -> str:
        return f"cuda:{self.rank}" if device == "cuda" else device

    def _lost(self) -> RankLost:
        # Its end of the connection is closed, so it has exited or is about to.
        status = self.process.wait()
        return RankLost(f"rank {self.rank} exited with status {status}; the job's log may have the reason")

    def close(self) -> None:
        super().close()
        self.process.kill()
        self.process.wait()


class RemoteRanks(Protocol):
    """The ranks of this run on other machines: Members of worker/learn/members.py."""

    @property
    def count(self) -> int: ...

    def listen(self) -> None: ...

    def gather(self, first: int) -> Sequence[Helper]: ...

    def close(self) -> None: ...


class Ranks:
    """The ranks of one run, including this process, for the duration of the context."""

    def __init__(self, count: int, members: RemoteRanks | None = None) -> None:
        """`count` ranks on this machine, and `members` on others."""
        self.count = count
        self.total = count + (members.count if members else 0)
        self.helpers: list[Helper] = []
        self._members = members

    def __enter__(self) -> Self:
        if self._members is not None:
            self._members.listen()
        # On Linux they die with the thread that starts them (PR_SET_PDEATHSIG), so start them in a long-lived one.
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
        """Start loading the model on the other ranks; on "cuda" each on the GPU of its index.

        Waits for members. Raises RankLost, and MembersMissing of worker/learn/members.py.
        """
        if self._members is not None and len(self.helpers) < self.total - 1:
            self.helpers += self._members.gather(self.count)
        for helper in self.helpers:
            helper.send(Start(model, helper.own(device), threads, token_budget, held_to))

    def wait(self) -> None:
        """Wait until all ranks have loaded the model. Raises RankLost."""
        for helper in self.helpers:
            helper.receive()
