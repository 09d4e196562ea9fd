"""A rank of a run on another machine: computes for a run, and exits with it. See worker/learn/members.py."""

import argparse
import logging
import os
import signal
import sys

from core.settings import Settings
from core.telemetry import logs
from worker import process
from worker.learn.members import ReadAhead, Stranger, wait_for_run
from worker.learn.rank import serve  # imports torch before there is a run

log = logging.getLogger("worker.learn.member")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.learn.member")
    parser.add_argument(
        "parent", type=int, help="process id of `regraft-server member`; this process exits with it"
    )
    parser.add_argument("gpu", type=int, help="index of the GPU to use")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    settings = Settings()
    logs.configure([logs.handler(settings.log_format, sys.stdout)])
    line = wait_for_run(settings.leader, settings.ranks_key.encode())
    # The run ends this process. To stop the machine, stop the run or wait for its next checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.info("joined the run at %s, on GPU %d if it uses GPUs", settings.leader, args.gpu)
    serve(ReadAhead(line, gone), gpu=args.gpu)


def gone(cause: BaseException) -> None:
    """Exit immediately, even during a computation."""
    if isinstance(cause, Stranger):
        log.error("%s", cause)
        os._exit(1)
    log.info("the run has ended")
    os._exit(0)


if __name__ == "__main__":
    main()
