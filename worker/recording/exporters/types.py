"""The interface between the worker and a service that receives metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from worker.types import Ended


@dataclass(frozen=True)
class RunInfo:
    """The description of the job that a service receives."""

    job_id: str
    project: str
    name: str
    entity: str | None
    tags: tuple[str, ...]
    config: Mapping[str, Any]  # flat: the requested hyperparameters, and the values chosen for "auto"


class Exporter(Protocol):
    """One service. One thread calls the methods in this order. They may block and may raise any exception; failed calls
    are retried."""

    def start(self, run_info: RunInfo) -> int | None:
        """Open the run of this job, or resume that of an earlier attempt. Returns the last step that it has."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one step. Steps are in order and exclude those that the run already has."""

    def finish(self, ended: Ended) -> None:
        """Flush the remaining metrics and report how the attempt ended."""
