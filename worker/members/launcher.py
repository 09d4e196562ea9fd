"""`python -m worker.members.launcher PARENT PROGRESS`: wait for a run of the group, and be its ranks of this machine.

It touches the file PROGRESS while it waits for a run, and its first rank does while machine 0 answers.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from core.addresses import HostPort
from core.settings import Settings
from core.telemetry import logs
from worker import process
from worker.child import run_member
from worker.heartbeat import Beat, heartbeat_to
from worker.members.gathering import Membership
from worker.training.launch import (
    Group,
    MembersMissing,
    RanksFailed,
    launch,
)  # imports torch before there is a run

log = logging.getLogger("worker.members.launcher")

PAUSE_SECONDS = 0.5  # between two looks for a run


def main(rank: Callable[..., None] = run_member) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.members.launcher")
    parser.add_argument(
        "parent", type=int, help="process id of `regraft-server member`; this process exits with it"
    )
    parser.add_argument("progress", type=Path, help="the file to touch at every sign of life")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    settings = Settings()
    logs.configure([logs.handler(settings.log_format, sys.stdout)])
    wait_for_run(settings.rendezvous, Membership(settings), heartbeat_to(args.progress))
    # The run ends this process. To stop the machine, stop the run or wait for its next checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.info("joining the run at %s as machine %d", settings.rendezvous, settings.node_rank)
    try:
        launch(rank, os.getpid(), args.progress, ranks=settings.ranks, group=Group.of(settings))
    except (RanksFailed, MembersMissing) as cause:
        log.warning("%s", cause)
        return process.FAILED
    log.info("the run has ended")
    return process.DONE


def wait_for_run(rendezvous: str, membership: Membership, beat: Beat) -> None:
    """Return when a launcher listens there. Until then this machine is in the list of machine 0.

    Logs why none can be reached when the reason changes.
    """
    address = HostPort.parse(rendezvous)
    last = ""
    while True:
        beat()
        membership.keep()
        try:
            socket.create_connection(address, timeout=30).close()
        except OSError as cause:  # no run, or the host name does not resolve yet
            said = f"no run at {rendezvous} yet: {cause}"
            if said != last:
                log.info("%s", said)
                last = said
            time.sleep(PAUSE_SECONDS)
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
