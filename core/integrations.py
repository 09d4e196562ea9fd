"""Where a job's metrics are sent besides: OpenAI's `integrations`, with MLflow and Trackio beside W&B.

A job says where in a service they go, and never which service: addresses and keys are the operator's, in the
environment of the workers (docs/integrations.md).
"""

from typing import Any, Literal, get_args

from core.models import Job

Kind = Literal["wandb", "mlflow", "trackio"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Kept beside what was asked of the method: it is read with it, once, when a run begins.
_KEY = "integrations"


def kept(reinforcement: dict[str, Any], integrations: list[dict[str, Any]]) -> dict[str, Any]:
    """`Job.reinforcement` of a job that was created with these."""
    return reinforcement | {_KEY: integrations} if integrations else reinforcement


def asked(job: Job) -> list[dict[str, Any]]:
    """The job's integrations as they were sent: {"type": "wandb", "wandb": {"project": ..., ...}}."""
    found: list[dict[str, Any]] = job.reinforcement.get(_KEY, [])
    return found


def of_method(job: Job) -> dict[str, Any]:
    """method.reinforcement alone."""
    return {name: value for name, value in job.reinforcement.items() if name != _KEY}


def shown(job: Job) -> list[dict[str, Any]]:
    """The job's integrations as it shows them. W&B's has the id of its run, as at OpenAI."""
    return [
        one | {"wandb": one["wandb"] | {"run_id": job.id}} if one["type"] == "wandb" else one
        for one in asked(job)
    ]
