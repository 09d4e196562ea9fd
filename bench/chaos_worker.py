"""The worker of bench/chaos.py and its runs: regraft's own, which kill themselves on order when they enter a phase.

python -m bench.chaos_worker worker
python -m bench.chaos_worker run PARENT PROGRESS
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import fake_run
from worker import forking, process

ORDERS_FOLDER = "CHAOS_ORDERS"
FAKE = "CHAOS_FAKE"
RUN = "chaos run"  # the name of the process of a run


def main() -> None:
    if sys.argv[1] == "worker":
        work()
    else:
        sys.exit(run(sys.argv[2:]))


def write_order(file: Path, parent: bool, delay: float) -> None:
    """Have the next process that enters the phase with the file's name killed, or its parent, after `delay` seconds."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps([parent, delay]))
    draft.rename(file)


def work() -> None:
    from worker.cli import main as serve
    from worker.supervisor import app, validation

    if os.environ[FAKE]:
        forking.SERVER.preloaded = "worker.backends"  # without torch
    started = app.WorkerService.__init__

    def with_phases(self: Any, *args: Any) -> None:
        started(self, *args)
        self.supervisor.command = lambda progress: [
            sys.executable, "-m", "bench.chaos_worker", "run", str(os.getpid()), str(progress),
        ]  # fmt: skip

    app.WorkerService.__init__ = with_phases  # type: ignore[method-assign]
    mark = dying_on_order(os.getppid())
    validation.check_file = during(mark, "validation", validation.check_file)
    sys.argv = ["regraft-server", "worker"]
    sys.exit(serve())


def run(arguments: list[str]) -> int:
    process.name_this(RUN)
    fake = bool(os.environ[FAKE])
    if fake:
        fake_run.without_torch()
    from worker import child
    from worker.heartbeat import HeartbeatGrader, HeartbeatSampler, HeartbeatTrainer
    from worker.recording.checkpoints import JobCheckpoints

    mark = dying_on_order(int(arguments[0]))
    parts: list[tuple[Any, str, str]] = [
        (HeartbeatSampler, "sample", "sampling"),
        (HeartbeatGrader, "grade", "grading"),
        (HeartbeatTrainer, "step", "update"),
        (JobCheckpoints, "_save", "checkpoint"),
        (JobCheckpoints, "_upload", "upload"),
    ]
    for owner, name, phase in parts:
        setattr(owner, name, during(mark, phase, getattr(owner, name)))
    sys.argv = ["worker.child", *arguments]
    return child.main(fake_run.assemble if fake else None)


def dying_on_order(worker: int) -> Callable[[str], None]:
    """Return the function that a process calls when it enters a phase: it executes the kill order, if there is one.

    Args:
        worker: the process id of a run's worker, which some orders kill.
    """
    orders = Path(os.environ[ORDERS_FOLDER])

    def mark(phase: str) -> None:
        mine = orders / f"{phase}.{os.getpid()}"
        try:
            (orders / phase).rename(mine)  # one process takes it
        except FileNotFoundError:
            return
        parent, delay = json.loads(mine.read_text())
        mine.unlink()
        victim = worker if parent else os.getpid()
        threading.Timer(delay, os.kill, (victim, signal.SIGKILL)).start()

    return mark


def during(mark: Callable[[str], None], phase: str, do: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        mark(phase)
        return do(*args, **kwargs)

    return marked


if __name__ == "__main__":
    main()
