"""The GPUs and nodes of a job that chose them (docs/adr/0026-gpus-of-a-job.md). Others have those of their class."""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, func, true

from core.database.tables import Job
from core.errors import InvalidRequest
from core.registry import BaseModelEntry
from core.settings import Settings


@dataclass(frozen=True)
class Resources:
    """Args:
    gpus: of each node.
    """

    gpus: int
    nodes: int

    @property
    def total(self) -> int:
        return self.gpus * self.nodes

    def __str__(self) -> str:
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return gpus if self.nodes == 1 else f"{gpus} on each of {self.nodes} nodes"


def resources_of(settings: Settings, gpu_class: str, gpus: int | None, nodes: int | None) -> Resources | None:
    """Fill the choices of a job with the sizes of its class. None: its class has no choice."""
    sizes = settings.hardware.of(gpu_class).sizes
    return None if sizes is None else Resources(gpus or sizes.gpus, nodes or sizes.nodes)


def with_as_many(settings: Settings, gpu_class: str, chosen: Resources | None) -> ColumnElement[bool]:
    """Whether a job of the class has these resources, so that its speed is comparable."""
    sizes = settings.hardware.of(gpu_class).sizes
    if sizes is None or chosen is None:
        return true()
    gpus, nodes = func.coalesce(Job.gpus, sizes.gpus), func.coalesce(Job.nodes, sizes.nodes)
    return and_(gpus == chosen.gpus, nodes == chosen.nodes)


def refuse_beyond(settings: Settings, gpu_class: str, gpus: int | None, nodes: int | None) -> None:
    """Check what a request chose against what the operator allows.

    Raises:
        InvalidRequest: the class has no choice, or not so many.
    """
    if gpus is None and nodes is None:
        return
    known = settings.hardware.of(gpu_class)
    sizes = known.sizes
    if sizes is None:
        raise InvalidRequest(
            f"Jobs of the class '{gpu_class}' have the GPUs of its workers, and cannot choose 'resources'. The "
            "operator can allow it with maxGpus and maxNodes of a pool of the dispatcher.",
            param="resources",
        )
    least = known.sampling_gpus + 1
    if gpus is not None and not least <= gpus <= sizes.max_gpus:
        why = "" if least == 1 else f", of which {least - 1} only sample"
        raise InvalidRequest(
            f"'resources.gpus' is {gpus}, and jobs of the class '{gpu_class}' have {least} to {sizes.max_gpus} GPUs on "
            f"each node{why}.",
            param="resources.gpus",
        )
    if nodes is not None and nodes > sizes.max_nodes:
        raise InvalidRequest(
            f"'resources.nodes' is {nodes}, and jobs of the class '{gpu_class}' have at most {sizes.max_nodes}.",
            param="resources.nodes",
        )


def refuse_small(
    settings: Settings, gpu_class: str, chosen: Resources, name: str, model: BaseModelEntry
) -> None:
    """Check that an engine of the model has its GPUs.

    Raises:
        InvalidRequest: it needs more than those of a node that sample.
    """
    sampling = settings.hardware.of(gpu_class).sampling_gpus or chosen.gpus
    if name not in settings.samplers and model.tensor_parallel > sampling:
        raise InvalidRequest(
            f"'resources.gpus' is {chosen.gpus}, and an engine of '{name}' needs {model.tensor_parallel} GPUs "
            "(tensor_parallel).",
            param="resources.gpus",
        )
