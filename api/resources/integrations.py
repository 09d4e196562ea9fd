"""The `integrations` of a job, as requested."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from core.errors import InvalidRequest
from core.strict import StrictModel

# The characters that all services accept; for Trackio and TensorBoard the name becomes one of a file or folder.
Project = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^\w[\w .-]*$")]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]
Entity = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^\w[\w.-]*$")]
Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f]+$")]


class Place(StrictModel):
    """The location of a job's run in a service."""

    project: Project  # in MLflow: the experiment
    name: Name | None = None  # of the run; default: the id of the job
    tags: Annotated[list[Tag], Field(max_length=32)] | None = None


class WandbPlace(Place):
    entity: Entity | None = None


class Wandb(StrictModel):
    type: Literal["wandb"]
    wandb: WandbPlace


class Mlflow(StrictModel):
    type: Literal["mlflow"]
    mlflow: Place


class Trackio(StrictModel):
    type: Literal["trackio"]
    trackio: Place


class TensorBoard(StrictModel):
    type: Literal["tensorboard"]
    tensorboard: Place


Integration = Annotated[Wandb | Mlflow | Trackio | TensorBoard, Field(discriminator="type")]


def _one_of_each(integrations: list[Integration]) -> list[Integration]:
    kinds = [integration.type for integration in integrations]
    if twice := [kind for kind in kinds if kinds.count(kind) > 1]:
        raise ValueError(f"'{twice[0]}' is listed more than once; a job has one run per service")
    return integrations


Integrations = Annotated[list[Integration], Field(max_length=5), AfterValidator(_one_of_each)]


def to_rows(requested: Sequence[Integration] | None, enabled: Sequence[str]) -> list[dict[str, Any]]:
    """The integrations as the job stores them. Raise InvalidRequest for one that is not enabled."""
    for index, integration in enumerate(requested or []):
        if integration.type not in enabled:
            known = f"enabled: {', '.join(enabled)}" if enabled else "none is enabled"
            message = (
                f"The integration '{integration.type}' is not enabled on this server ({known}); the operator enables "
                "it in REGRAFT_INTEGRATIONS. Without it, the metrics are available at /v1/regraft/jobs/{id}/metrics."
            )
            raise InvalidRequest(message, param=f"integrations[{index}].type")
    return [integration.model_dump(mode="json") for integration in requested or []]
