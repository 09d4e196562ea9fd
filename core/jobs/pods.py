"""The state of a queued job's Kubernetes Job, as the dispatcher notes it in the row (worker/dispatch)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from core.database.tables import Job


class PodState(StrEnum):
    """The state of the Kubernetes Job of a queued job."""

    QUOTA = "quota"  # suspended, until Kueue admits it
    STARTING = "starting"
    ENDED = "ended"  # it has ended, and its worker had claimed no job
    REFUSED = "refused"
    TOO_LARGE = "too_large"  # the operator has lowered what jobs may choose


@dataclass(frozen=True)
class PodNote:
    """Args:
    queue: of Kueue; empty if the Kubernetes Job is in none.
    """

    state: PodState
    queue: str = ""

    def to_row(self, epoch: int) -> dict[str, Any]:
        """Valid as long as the job has this epoch."""
        return {"epoch": epoch, "state": self.state.value, "queue": self.queue}


def note(session: Session, job_id: str, epoch: int, noted: PodNote) -> None:
    """Write the note, unless the job has been claimed or cancelled since."""
    same = (Job.id == job_id) & (Job.epoch == epoch) & (Job.status == "queued")
    change = update(Job).where(same).values(pod=noted.to_row(epoch))
    session.execute(change.execution_options(synchronize_session=False))


def is_current(pod: Mapping[str, Any] | None, epoch: int) -> bool:
    """Whether there is a note, and it is about the next attempt of the job."""
    return pod is not None and pod["epoch"] == epoch


def is_without_quota(pod: Mapping[str, Any] | None, epoch: int) -> bool:
    """Whether the Kubernetes Job of a queued job waits for quota of Kueue."""
    return pod is not None and pod["epoch"] == epoch and PodState(pod["state"]) == PodState.QUOTA


def waits_for(pod: Mapping[str, Any] | None, epoch: int, gpu_class: str) -> str:
    """The reason that a queued job shows."""
    if pod is None or pod["epoch"] != epoch:
        return f"a pod of class {gpu_class} will be started for it"
    match PodState(pod["state"]):
        case PodState.QUOTA:
            return f"waits for quota of {pod['queue']}"
        case PodState.STARTING:
            return f"a pod of class {gpu_class} is starting for it"
        case PodState.ENDED:
            return f"a pod of class {gpu_class} ended before it claimed the job, another one will be started"
        case PodState.REFUSED:
            return "Kubernetes refuses to start a pod for it, the log of the dispatcher has the reason"
        case PodState.TOO_LARGE:
            return f"it chose more gpus or nodes than jobs of class {gpu_class} may have now"
