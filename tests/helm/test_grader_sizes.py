"""In every profile of the chart, python graders at their worst leave the API and the trainers the memory they need."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from core.units import GIB
from graders.sandbox.sizes import sizes
from tests.helm.charts import Pod, environment, pods, profile, render
from tests.helm.test_sizing import BYTES, CONFIGS, PROFILES, registry_of
from worker.model import sizing

UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
# Of an idle process, without the pages of libraries that all of them share: 169 MB with all packages of the
# environment, 84 MB with scikit-learn.
IDLE = 96 << 20
# The API with uploads under way; a worker beside its model's weights: Python with torch, and a run of it; a worker that
# no job goes to: Python, a file that is being checked, and the idle child that every worker has ready (0.5 GiB).
API, WORKER, WITHOUT_JOBS = GIB, 3 * GIB, 3 * GIB // 2


@dataclass(frozen=True)
class Memory:
    """Of one container, in bytes."""

    pod: str
    limit: int
    graders: int
    service: int

    @property
    def is_enough(self) -> bool:
        return self.graders + self.service <= self.limit


def quantity(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def processors(text: str) -> int:
    return math.ceil(int(text.removesuffix("m")) / (1000 if text.endswith("m") else 1))


def graders_at_worst(limits: dict[str, str]) -> int:
    """Every slot full, each grade with all of its memory and its scratch, and two idle processes for each slot."""
    each = sizes(quantity(limits["memory"]), processors(limits["cpu"]))
    return each.slots * (each.memory + each.scratch_bytes + 2 * IDLE)


def memory_of(pod: Pod, weights: dict[str, int]) -> Memory:
    limits = pod.spec["containers"][0]["resources"]["limits"]
    gpu_class = environment(pod).get("REGRAFT_GPU_CLASS", "")
    worker = WORKER + weights[gpu_class] if gpu_class in weights else WITHOUT_JOBS
    service = API if pod.component == "api" else worker
    return Memory(pod.name, quantity(limits["memory"]), graders_at_worst(limits), service)


def memories(manifests: list[Any]) -> list[Memory]:
    """Of every pod that grades."""
    weights: dict[str, int] = {}
    for name, entry in registry_of(manifests).models.items():
        shape = sizing.shape_of_config(CONFIGS[name], BYTES[entry.dtype])
        assert shape is not None and entry.gpu_class is not None
        weights[entry.gpu_class] = max(weights.get(entry.gpu_class, 0), shape.weight_bytes)
    return [memory_of(pod, weights) for pod in [*pods(manifests, "api"), *pods(manifests, "worker")]]


@pytest.mark.parametrize("name", PROFILES)
def test_graders_at_their_worst_leave_the_service_its_memory(name: str) -> None:
    found = memories(render(profile(name)))

    assert len(found) >= 2
    assert [memory for memory in found if not memory.is_enough] == []


def test_the_production_profile_counts_the_weights_of_each_pool() -> None:
    [small, large] = [
        memory.service
        for memory in memories(render(profile("production")))
        if memory.pod.endswith(("-h100", "-h200"))
    ]

    assert WORKER + 8 * GIB > small > WORKER + 7 * GIB
    assert large > WORKER + 27 * GIB


def test_a_pool_whose_trainer_the_graders_could_have_killed_would_be_seen() -> None:
    values = profile("production")
    for pool in values["workers"]:
        pool["resources"]["limits"]["memory"] = "48Gi" if pool["gpuClass"] == "h200" else "96Gi"

    [short] = [memory for memory in memories(render(values)) if not memory.is_enough]

    assert short.pod.endswith("-h200")


@pytest.mark.parametrize(
    ("gib", "cores", "slots", "memory_mib", "scratch_mib"),
    [
        (4, 2, 2, 768, 64),
        (8, 4, 4, 768, 64),
        (96, 16, 16, 2048, 192),
        (128, 16, 16, 2048, 256),
        (1, 4, 1, 384, 32),
    ],
)
def test_graders_get_half_of_the_memory_in_equal_parts(
    gib: int, cores: int, slots: int, memory_mib: int, scratch_mib: int
) -> None:
    share = sizes(gib * GIB, cores)

    assert (share.slots, share.memory >> 20, share.scratch_bytes >> 20) == (slots, memory_mib, scratch_mib)


def test_fewer_graders_run_at_once_where_there_is_not_enough_memory_for_one_on_each_core() -> None:
    assert sizes(3 * GIB, 4).slots == 1
    assert sizes(4 * GIB, 4).slots == 2
