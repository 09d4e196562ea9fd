"""`python -m tests.worker.eventful_child EVENT PARENT PROGRESS`: worker.child with a rank 1 to which something happens.

`... EVENT member PARENT PROGRESS`: worker.members.launcher, whose rank it is.

drain: the launcher gets SIGTERM in the first step of an attempt. SIGKILL, SIGSTOP: rank 1 gets it in the second step.
share: both ranks share one copy of the model, as GPUs do on which it does not fit whole; each that does leaves a file
in the data folder. shard: drain and share. none: nothing happens. The file `sessions` there names the session of each.

Torch seems to be built for CUDA until a rank runs: a launcher that calls CUDA ends, because its ranks could not.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from worker import child
from worker.members import launcher
from worker.training.world import World

if TYPE_CHECKING:
    from worker.model.policy import Policy
    from worker.model.sizing import Machine


class Eventful(World):
    """Orders are known by their names: their modules import transformers and peft, which a launcher does not need."""

    sums = 0

    def give(self, orders_R: Sequence[Any]) -> None:
        super().give(orders_R)
        if method_of(orders_R[0]) in ("collect", "add"):
            self.sums += 1
            if os.environ["EVENT"] in ("drain", "shard") and self.sums == 1:
                os.kill(os.getppid(), signal.SIGTERM)

    def receive(self) -> Any:
        order = super().receive()
        if method_of(order) == "collect":
            self.sums += 1
            if os.environ["EVENT"].startswith("SIG") and self.sums == 2:
                os.kill(os.getpid(), signal.Signals[os.environ["EVENT"]])
        return order


def method_of(order: Any) -> str:
    """The method of the gradient that the order calls."""
    return getattr(getattr(order, "method", None), "__name__", "")


def share_the_base() -> None:
    """Sharding is planned for GPUs only, whose memory is not enough for the whole base model."""
    from worker.model import sharding, sizing

    place = sharding.place

    def noted(policy: "Policy", stand_in: "Policy") -> None:
        place(policy, stand_in)
        Path(os.environ["REGRAFT_DATA_DIR"], f"sharded-{os.getpid()}").touch()

    def all_of_them(machine: "Machine", gpus: int, *, full: bool = False) -> tuple[int, ...]:
        return (gpus,)

    sharding.place = noted
    sizing.degrees_of = all_of_them


def refuse_cuda() -> None:
    vars(torch._C)["_cuda_getDeviceCount"] = poison


def poison() -> NoReturn:
    raise AssertionError("the launcher calls CUDA, which its forked ranks could not use")


def allow_cuda() -> None:
    """Have torch be as it is."""
    if vars(torch._C)["_cuda_getDeviceCount"] is poison:
        del vars(torch._C)["_cuda_getDeviceCount"]


def run_member(parent: int, progress: Path) -> None:
    allow_cuda()
    child.run_member(parent, progress, Eventful)


def run_rank(parent: int, progress: Path, stopping: Any, claim: str) -> None:
    allow_cuda()
    if os.environ["EVENT"] in ("share", "shard"):
        share_the_base()
    child.run_rank(parent, progress, stopping, claim, Eventful)


if __name__ == "__main__":
    os.environ["EVENT"] = sys.argv.pop(1)
    refuse_cuda()
    with Path(os.environ["REGRAFT_DATA_DIR"], "sessions").open("a") as sessions:
        sessions.write(f"{os.getsid(0)}\n")
    if sys.argv[1] == "member":
        del sys.argv[1]
        sys.exit(launcher.main(rank=run_member))
    sys.exit(child.main(rank=run_rank))
