"""The number of vLLM engines of a job and the GPUs of each. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from core.registry import Device


class NotPlaceable(Exception):
    """The engines need more GPUs than the job has."""


@dataclass(frozen=True)
class Placement:
    """The engines of a job. Each is one process for each of its GPUs, or `tensor_parallel` processes on a CPU.

    A job that a fleet samples for has none.
    """

    tensor_parallel: int
    gpus_E: tuple[tuple[str, ...], ...]  # of each engine, as in CUDA_VISIBLE_DEVICES; () on a CPU
    kind: Literal["colocated", "split"] = "colocated"  # split: the trainer uses none of these GPUs

    @property
    def engines(self) -> int:
        return len(self.gpus_E)

    @property
    def processes(self) -> int:
        return self.engines * self.tensor_parallel

    def __str__(self) -> str:
        engines = "1 vLLM engine" if self.engines == 1 else f"{self.engines} vLLM engines"
        degree = f" of tensor parallel degree {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        where = "; ".join(", ".join(gpus) for gpus in self.gpus_E)
        return f"{engines}{degree}" + (f" on GPUs {where}" if any(self.gpus_E) else "")


ONE_ENGINE = Placement(tensor_parallel=1, gpus_E=((),))
NO_ENGINE = Placement(tensor_parallel=1, gpus_E=())


def place(
    *,
    engines: int | Literal["auto"],
    tensor_parallel: int,
    device: Device,
    gpus: tuple[str, ...],
    sampling_gpus: int = 0,
    off_policy: bool = False,
) -> Placement:
    """Give each engine the next `tensor_parallel` GPUs. Automatic: as many engines as these are enough for.

    Colocated, the engines share the GPUs with the trainer: all sample, then all learn. Split, they have the last
    `sampling_gpus` and sample the next batch while the others learn from the last one, which takes `off_policy`.

    Args:
        gpus: of the job, those of the ranks first.
        sampling_gpus: how many of them have no rank. On a CPU, how many processes.

    Raises:
        NotPlaceable: they are not enough.
    """
    if sampling_gpus and off_policy:
        given = gpus[-sampling_gpus:] if device == "cuda" else ("",) * sampling_gpus
        placed = _placed(engines, tensor_parallel, given, "REGRAFT_SAMPLING_GPUS")
        if device == "cpu":
            placed = replace(placed, gpus_E=((),) * placed.engines)
        return replace(placed, kind="split")
    if device == "cpu":
        return Placement(tensor_parallel, ((),) * (1 if engines == "auto" else engines))
    return _placed(engines, tensor_parallel, gpus, "REGRAFT_RANKS")


def _placed(
    engines: int | Literal["auto"], tensor_parallel: int, gpus: tuple[str, ...], setting: str
) -> Placement:
    count = max(1, len(gpus) // tensor_parallel) if engines == "auto" else engines
    if count * tensor_parallel > len(gpus):
        raise NotPlaceable(
            f"Sampling needs {count * tensor_parallel} GPUs: {count} (REGRAFT_ENGINES) times {tensor_parallel} "
            f"(`tensor_parallel` of the model's entry). A job has {len(gpus)} here ({setting})."
        )
    slices = (
        gpus[first : first + tensor_parallel] for first in range(0, count * tensor_parallel, tensor_parallel)
    )
    return Placement(tensor_parallel, tuple(slices))


def gpus_of_job(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The first `count` GPUs that this process sees, by the names that its children see them under."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = tuple(map(str, range(count))) if visible is None else tuple(visible.split(","))
    return names[:count]
