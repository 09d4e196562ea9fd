"""Start the ranks of an attempt with torch's elastic launcher, the library behind torchrun, and wait for their end.

The processes are forked, which saves each of them the imports, and stay in the process group of this one, which the
supervisor kills. This one uses no GPU, and no rank returns from `entry`. The first rank that exits ends all others,
and nothing is restarted here: the job resumes from its last checkpoint in another attempt.

Each machine of a group has a launcher. They meet at the store of the first one, by torch's static rendezvous.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Self

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.numa.binding import AffinityMode, NumaOptions

from core.settings import Settings
from worker import forking, process

# Machines with another version never meet, because orders are pickles of classes of this package.
RUN = f"regraft-{version('regraft-server')}"


class RanksFailed(Exception):
    """A rank other than the run's own has failed first."""


class MembersMissing(Exception):
    """The run cannot start: machines of its group did not come to the rendezvous."""


@dataclass(frozen=True)
class Group:
    """The machines that share a run, each with the same number of ranks."""

    nodes: int = 1
    node_rank: int = 0  # of this machine; 0 has the run
    rendezvous: str = "localhost:0"  # host:port of machine 0, where its launcher listens
    patience_seconds: float = 600.0

    @classmethod
    def of(cls, settings: Settings) -> Self:
        if settings.nodes == 1:
            return cls()
        return cls(settings.nodes, settings.node_rank, settings.rendezvous, settings.patience_seconds)

    def missing(self) -> MembersMissing:
        return MembersMissing(
            f"not all of {self.nodes} machines came to {self.rendezvous} within {self.patience_seconds:g} s "
            "(REGRAFT_PATIENCE_SECONDS). Start `regraft-server member` on every other machine of the group, with the "
            "same version, REGRAFT_RENDEZVOUS, REGRAFT_NODES and REGRAFT_RANKS, and its own REGRAFT_NODE_RANK"
        )


def launch(entry: Callable[..., None], *arguments: Any, ranks: int, group: Group | None = None) -> int:
    """Run `entry` in each rank of this machine, and return the exit status of the rank that ended the others.

    On machine 0 that is rank 0, the run; on the others any rank that has seen the end of the run.

    Raises:
        RanksFailed: another rank has failed first.
        MembersMissing: the group is not complete.
    """
    group = group or Group()
    # The launcher logs each end of a process as an error, with the traceback that the process has printed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if sys.platform == "linux" and group.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    try:
        elastic_launch(launch_config(ranks, group), _run_rank)(entry, *arguments)
    except DistError as cause:
        raise group.missing() from cause
    except ChildFailedError as cause:
        codes = {rank: failure.exitcode for rank, failure in cause.failures.items()}
        if 0 in codes:
            return process.DONE if codes[0] == process.ENDED else codes[0]
        [(rank, code), *_] = codes.items()
        if group.node_rank > 0 and code == process.ENDED:
            return process.DONE
        raise RanksFailed(f"rank {rank} {_how(code)}; the job's log may have the reason") from None
    raise AssertionError("each rank exits with a status that is not 0")


def launch_config(ranks: int, group: Group) -> LaunchConfig:
    """Build the launcher's configuration without a call to CUDA: a process that has counted its GPUs by CUDA cannot
    fork ranks that use them.
    """
    config = LaunchConfig(
        min_nodes=group.nodes,
        max_nodes=group.nodes,
        nproc_per_node=ranks,
        run_id=RUN,
        max_restarts=0,
        start_method="fork" if forking.FORKS else "spawn",
        signals_to_handle="SIGQUIT",  # SIGTERM is ours: it drains the run
        numa_options=NumaOptions(
            AffinityMode.NODE
        ),  # without any, it asks torch.cuda.is_available() for its own
        **_rendezvous(group),
    )
    config.numa_options = None  # ranks run on all CPUs
    return config


def _run_rank(entry: Callable[..., None], *arguments: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGQUIT):  # the launcher's handlers are not for its ranks
        signal.signal(number, signal.SIG_DFL)
    entry(*arguments)


def _rendezvous(group: Group) -> dict[str, Any]:
    if group.nodes == 1:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": group.rendezvous, "local_addr": "127.0.0.1"}
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": group.rendezvous,
        "rdzv_configs": {"rank": group.node_rank, "timeout": max(1, round(group.patience_seconds))},
    }


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"
