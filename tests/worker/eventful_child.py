"""`python -m tests.worker.eventful_child EVENT PARENT PROGRESS`: worker.child with a rank 1 to which something happens.

drain: the launcher gets SIGTERM in the first step of an attempt. SIGKILL, SIGSTOP: rank 1 gets it in the second step.
none: nothing happens.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from worker import child
from worker.learn.distributed import SumGradients
from worker.learn.world import World


class Eventful(World):
    sums = 0

    def receive(self) -> Any:
        order = super().receive()
        if isinstance(order, SumGradients):
            self.sums += 1
            self.happen(os.environ["EVENT"])
        return order

    def happen(self, event: str) -> None:
        if event == "drain" and self.sums == 1:
            os.kill(os.getppid(), signal.SIGTERM)
        elif event.startswith("SIG") and self.sums == 2:
            os.kill(os.getpid(), signal.Signals[event])


def be_rank(parent: int, progress: Path, stopping: Any, claims: Any) -> None:
    child.be_rank(parent, progress, stopping, claims, Eventful)


if __name__ == "__main__":
    os.environ["EVENT"] = sys.argv.pop(1)
    sys.exit(child.main(rank=be_rank))
