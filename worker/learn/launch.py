"""Start the ranks of an attempt with torch's elastic launcher, the library behind torchrun, and wait for their end.

The processes are spawned, so they stay in the process group of this one, which the supervisor kills. The first rank
that exits ends all others, and nothing is restarted here: the job resumes from its last checkpoint in another attempt.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from worker import process


class RanksFailed(Exception):
    """A rank other than the run's own has failed first."""


def launch(entry: Callable[..., None], *arguments: Any, ranks: int) -> int:
    """Run `entry` in each rank, and return the exit status of rank 0, which ends the others by its own end.

    Raises:
        RanksFailed: another rank has exited first.
    """
    # The launcher logs each end of a process as an error, with the traceback that the process has printed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="regraft",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # SIGTERM is ours: it drains the run
    )
    try:
        elastic_launch(config, entry)(*arguments)
    except ChildFailedError as cause:
        codes = {rank: failure.exitcode for rank, failure in cause.failures.items()}
        if 0 in codes:
            return process.DONE if codes[0] == process.ENDED else codes[0]
        [(rank, code), *_] = codes.items()
        raise RanksFailed(f"rank {rank} {_how(code)}; the job's log may have the reason") from None
    raise AssertionError("rank 0 always exits with a status")


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"
