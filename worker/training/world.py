"""The torch.distributed process group of one attempt: NCCL for tensors on GPUs, gloo on CPUs and for orders.

Rank 0 is the run: it samples, grades, steps the optimizer and uses the database. The others wait for its orders
(worker/training/distributed.py) and take part in collective operations. worker/training/launch.py starts the processes.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.nn import Parameter

from worker.out_of_memory import Shortage, is_out_of_memory
from worker.refusals import UserMistake
from worker.training import peer_watchdog

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


LAUNCHER_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}


POLL_SECONDS = 1.0
SHORTAGE, MISTAKE = "out_of_memory", "mistake"  # keys of the store


class BrokenWorld(Exception):
    """A collective operation failed: another rank has exited, or it has not answered in time."""


class World:
    """This process's place among the ranks of a run."""

    def __init__(self, rank: int, size: int, local_size: int, local_rank: int, store: "Store") -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self.local_size = local_size  # processes on this machine
        self.local_rank = local_rank
        self._giving = threading.RLock()  # an order and the collective operations that belong to it
        self._left = threading.Event()
        self._alive: threading.Thread | None = None
        self._meshes: dict[int, DeviceMesh] = {}  # by the degree of sharding

    @classmethod
    def join(cls, seconds: float, store: "Store | None" = None, *, rank: int = -1, size: int = -1) -> Self:
        """Join the process group that the environment describes, as torchrun sets it, or that of a store.

        Args:
            seconds: the limit for each collective operation, and for the time between two orders of rank 0.
        """
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        limit = timedelta(seconds=seconds)
        if store is None:
            store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
            store.set_timeout(limit)
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        world = cls(rank, size, local_size, int(os.environ.get("LOCAL_RANK", 0)), store)
        forget_launcher(os.environ)
        if world.rank == 0:
            world._keep_alive(seconds / 4)
        return world

    def _keep_alive(self, seconds: float) -> None:
        """Give an empty order from time to time, so that the other ranks notice a lost machine while they wait."""

        def give() -> None:
            while not self._left.wait(seconds):
                try:
                    self.give([None] * self.size)
                except BrokenWorld:
                    return  # the next order will show it

        self._alive = threading.Thread(target=give, name="orders", daemon=True)
        self._alive.start()

    def watch_machines(
        self,
        limit_seconds: float,
        on_vanished: Callable[[int], None],
        *,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """Have `on_vanished` called, in a thread, with the number of a machine that has not answered for the limit.

        The first machine watches all others, and they watch it. One rank of each does. It calls `on_answer` whenever
        the machine with the store has answered.
        """
        if self.size == self.local_size or self.local_rank > 0:
            return
        others = range(self.local_size, self.size, self.local_size) if self.rank == 0 else [0]
        store = self._store.clone()  # type: ignore[attr-defined]  # its stub is missing
        present = peer_watchdog.Presence(store, self.rank, others, limit_seconds)
        end = lambda rank: on_vanished(rank // self.local_size)  # noqa: E731
        peer_watchdog.keep(present, end, self._left, on_answer)

    def report(self, shortage: Shortage) -> None:
        """Tell rank 0 that this rank has run out of memory in an operation of all ranks, and has left it."""
        self._store.set(SHORTAGE, json.dumps(asdict(shortage)))

    def refuse(self, mistake: UserMistake) -> None:
        """Tell rank 0 that this rank cannot do its part of the job, which no other attempt could. It records that."""
        said = {"code": mistake.code, "message": mistake.message, "param": mistake.param}
        self._store.set(MISTAKE, json.dumps(said))

    def watch_ranks(
        self, on_shortage: Callable[[Shortage], None], on_mistake: Callable[[UserMistake], None]
    ) -> None:
        """Have one of them called, in a thread, with what another rank reports. On rank 0.

        Its own thread may be in an operation of all ranks, and would wait for the rank until the limit.
        """
        store = self._store.clone()  # type: ignore[attr-defined]  # its stub is missing

        def watch() -> None:
            while not self._left.wait(POLL_SECONDS):
                try:
                    if store.check([SHORTAGE]):
                        on_shortage(Shortage(**json.loads(store.get(SHORTAGE))))
                        return
                    if store.check([MISTAKE]):
                        on_mistake(UserMistake(**json.loads(store.get(MISTAKE))))
                        return
                except RuntimeError:  # the run has ended, or the machine with the store is lost
                    return

        threading.Thread(target=watch, name="ranks", daemon=True).start()

    def wait_for_end(self) -> None:
        """Wait until the machine with the store has left it."""
        try:
            while not self._left.wait(POLL_SECONDS):
                self._store.check([SHORTAGE])
        except RuntimeError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        if self._alive is not None:
            self._alive.join()
        dist.destroy_process_group()

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Keep other orders back until the collective operations of this one are done."""
        with self._giving:
            yield

    def give(self, orders_R: Sequence[Any]) -> None:
        """Send one order to each rank; the one of rank 0 is ignored. Raises BrokenWorld."""
        with self._giving, _collective():
            dist.scatter_object_list([None], list(orders_R), src=0)

    def receive(self) -> Any:
        """Wait for the next order of rank 0. Raises BrokenWorld."""
        order: list[Any] = [None]
        with _collective():
            dist.scatter_object_list(order, None, src=0)
        return order[0]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors of all ranks with those of rank 0. Raises BrokenWorld."""
        if not tensors:
            return
        vector = flat(tensors)
        with _collective():
            dist.broadcast(vector, 0)
        if self.rank > 0:
            with torch.no_grad():
                for tensor, value in zip(tensors, shaped(vector, tensors), strict=True):
                    tensor.copy_(value)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over all ranks. Raises BrokenWorld."""
        vector = flat(tensors)
        with _collective():
            dist.all_reduce(vector)
        return shaped(vector, tensors)

    def sum_gradients(self, parameters: Sequence[Parameter], *, on_all: bool = False) -> None:
        """Leave the sums over all ranks as the gradients of rank 0, or `on_all`; none elsewhere. Raises BrokenWorld."""
        if not parameters:
            return
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        for parameter, gradient in zip(parameters, self.sum(gradients), strict=True):
            parameter.grad = gradient if self.rank == 0 or on_all else None

    def most(self, number: int) -> int:
        """Return the largest of the numbers of all ranks, on all ranks. Raises BrokenWorld."""
        largest = torch.tensor(number)
        with _collective():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def neighbors(self, device: str, degree: int) -> DeviceMesh:
        """Return the `degree` ranks of this machine that share one copy of the base model with this one.

        A collective operation of all ranks. `degree` divides the number of ranks of a machine. Raises BrokenWorld.
        """
        if degree not in self._meshes:
            with _collective():  # a new group, because a model would keep that of all ranks alive
                group, _ = dist.new_subgroups(degree)  # type: ignore[no-untyped-call]
            self._meshes[degree] = DeviceMesh.from_group(group, device)
        return self._meshes[degree]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, in their order, and nothing on others. Raises BrokenWorld."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _collective():
            dist.gather_object(value, values, dst=0)
        return values or []


def forget_launcher(environment: MutableMapping[str, str]) -> None:
    """Remove what the launcher has put there: the process groups of vLLM would look for its store and make none."""
    for name in list(environment):
        if name.startswith("TORCHELASTIC_") or name in LAUNCHER_VARIABLES:
            del environment[name]


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as cause:  # of all backends
        if is_out_of_memory(cause):
            raise
        raise BrokenWorld("another rank of this run has exited or does not answer") from cause


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors, flattened."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def shaped(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Invert `flat`: split into tensors of these shapes."""
    parts = torch.split(vector, [tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
