"""What a service that takes metrics is to the rest of the worker."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# interrupted: another attempt goes on with the same run.
Ended = Literal["succeeded", "failed", "interrupted"]


@dataclass(frozen=True)
class Card:
    """What a service is told of the job itself."""

    job_id: str
    project: str
    name: str
    entity: str | None
    tags: tuple[str, ...]
    config: Mapping[str, Any]  # flat: what was asked for, and what "auto" came to


class Sink(Protocol):
    """One service. All of it is called in one thread, in this order, and may take its time or raise whatever it likes:
    what failed is called again."""

    def start(self, card: Card) -> int | None:
        """Open the run of this job; the one of an attempt before, if there was any. The last step that it has."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one step. Steps come in order, and none that the run has already."""

    def finish(self, ended: Ended) -> None:
        """Send what is left, and say how the attempt ended."""
