"""States of jobs, eval runs and pipelines. Queries of many rooms choose rows by them; lifecycles move rows between
them, and the client library waits for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

JOB_EDGES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "validating_files": frozenset({"queued", "failed", "cancelled"}),
        "queued": frozenset({"running", "paused", "cancelled"}),
        "running": frozenset({"queued", "pausing", "succeeded", "failed", "cancelled"}),
        # A run may end before it sees the request to pause.
        "pausing": frozenset({"paused", "succeeded", "failed", "cancelled"}),
        "paused": frozenset({"queued", "cancelled"}),
        "succeeded": frozenset(),
        "failed": frozenset(),
        "cancelled": frozenset(),
    }
)


@dataclass(frozen=True)
class States:
    """States of one kind of rows by what they mean. A paused job is unfinished, and in none of the others."""

    waiting: tuple[str, ...]  # counted as queued by the limits of a project
    running: tuple[str, ...]  # counted as running
    leased: frozenset[str]  # a worker may hold the row
    final: frozenset[str]
    unfinished: frozenset[str]  # all others

    @property
    def stopped(self) -> frozenset[str]:
        """No further step without a request: ended or paused."""
        return self.final | (self.unfinished & {"paused"})


JOB = States(
    waiting=("queued", "validating_files"),
    running=("running", "pausing"),
    leased=frozenset({"validating_files", "running", "pausing"}),
    final=frozenset(state for state, further in JOB_EDGES.items() if not further),
    unfinished=frozenset(state for state, further in JOB_EDGES.items() if further),
)
EVAL_RUN = States(
    waiting=("queued",),
    running=("in_progress",),
    leased=frozenset({"in_progress"}),
    final=frozenset({"completed", "failed", "canceled"}),
    unfinished=frozenset({"queued", "in_progress"}),
)
PIPELINE = States(
    waiting=(),
    running=("running",),
    leased=frozenset({"running", "paused"}),
    final=frozenset({"succeeded", "failed", "cancelled"}),
    unfinished=frozenset({"running", "paused"}),
)
