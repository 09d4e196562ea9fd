"""Exporters of a job's metrics: OpenAI's `integrations` for W&B, extended by MLflow, Trackio and TensorBoard.

A job chooses the project and run name in a service, never the service itself: its address and key belong to the
operator, in the environment of the workers (docs/howto/integrations.md).
"""

from typing import Any, Literal, get_args

from core.database.tables import Job

Kind = Literal["wandb", "mlflow", "trackio", "tensorboard"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Stored with the method, because both are read once, at the start of a run.
_KEY = "integrations"


def pin(body: dict[str, Any], integrations: list[dict[str, Any]]) -> dict[str, Any]:
    """`Job.body` of a job that was created with these integrations."""
    return body | {_KEY: integrations} if integrations else body


def requested_integrations(job: Job) -> list[dict[str, Any]]:
    """The job's integrations as requested: {"type": "wandb", "wandb": {"project": ..., ...}}."""
    found: list[dict[str, Any]] = job.body.get(_KEY, [])
    return found


def of_method(job: Job) -> dict[str, Any]:
    """The object of the job's method, without the integrations."""
    return {name: value for name, value in job.body.items() if name != _KEY}


def render(job: Job) -> list[dict[str, Any]]:
    """The job's integrations as the API shows them. W&B's has the id of its run, as at OpenAI."""
    return [
        integration | {"wandb": integration["wandb"] | {"run_id": job.id}}
        if integration["type"] == "wandb"
        else integration
        for integration in requested_integrations(job)
    ]
