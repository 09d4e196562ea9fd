"""A rank of a run on another machine: it waits for a run, helps until that ends, and ends. See worker/members.py."""

import argparse
import logging
import os
import signal
import sys

from core import logs
from core.settings import Settings
from worker import process
from worker.members import ReadAhead, Stranger, wait_for_run
from worker.rank import serve  # torch is imported while there is nothing else to do

log = logging.getLogger("worker.member")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.member")
    parser.add_argument("parent", type=int, help="process id of `regraft-server member`: this dies with it")
    parser.add_argument("gpu", type=int, help="which GPU of this machine is its own")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    settings = Settings()
    logs.configure([logs.handler(settings.log_format, sys.stdout)])
    line = wait_for_run(settings.leader, settings.ranks_key.encode())
    # From now on the run decides: whoever ends this machine ends that one too, or waits for its next checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.info("helping the run at %s, on GPU %d if it uses GPUs", settings.leader, args.gpu)
    serve(ReadAhead(line, gone), gpu=args.gpu)


def gone(cause: BaseException) -> None:
    """End this process at once, in the middle of whatever it computes."""
    if isinstance(cause, Stranger):
        log.error("%s", cause)
        os._exit(1)
    log.info("the run has ended")
    os._exit(0)


if __name__ == "__main__":
    main()
