"""The templates of Jobs, one for each GPU class, and the manifest of one attempt made from them.

The chart renders each template into a file `<gpu class>.json`: `{"max_jobs": 8, "max_pending": 2, "manifest": {...}}`.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from string import ascii_letters
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.hardware import JobSizes
from core.system_errors import file_problem
from worker.dispatch.kubernetes import KINDS, ObjectKind

JOB_LABEL = "regraft.dev/job"
POOL_LABEL = "regraft.dev/pool"
PROJECT_LABEL = "regraft.dev/project"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
DOCTOR = "doctor"
CONTAINER = "worker"  # of a Job; a TrainJob has one, its trainer
# Of quantities of Kubernetes.
SUFFIXES = {"m": Fraction(1, 1000), "": Fraction(1)}
SUFFIXES |= {name: Fraction(1000**power) for power, name in enumerate("kMGTPE", 1)}
SUFFIXES |= {f"{name}i": Fraction(1024**power) for power, name in enumerate("KMGTPE", 1)}
# What scaled quantities are rounded up to.
SMALLEST = {"cpu": (SUFFIXES["m"], "m"), "memory": (SUFFIXES["Mi"], "Mi")}
Labels = Annotated[dict[str, str], Field(min_length=1)]


class InvalidTemplates(Exception):
    """The message names the file and the problem, for the operator."""


class _Metadata(BaseModel):
    labels: Labels


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="allow")

    kind: str
    metadata: _Metadata
    spec: dict[str, Any]


class SizeNotAllowed(Exception):
    """The job chose GPUs or nodes that its pool does not allow any more. The message says which."""


class PodSizes(JobSizes):
    """The choice of jobs, and what depends on it in a pod.

    Args:
        sampling_gpus: of `gpus`, those that only sample. The others are ranks.
        gpu_resource: the name of a GPU in the resources of a container.
    """

    sampling_gpus: int = Field(ge=0)
    gpu_resource: str


class JobTemplate(BaseModel):
    """What starts the jobs of one GPU class.

    Args:
        max_jobs: unfinished Jobs at once. Those that wait for quota count only in their own queue of Kueue.
        max_pending: of these, Jobs of one queue whose worker has not claimed its job yet.
        manifest: the Job or TrainJob without a name, with the GPUs and nodes of a job that chose none.
        sizes: what jobs may choose; None: nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_jobs: int = Field(ge=1)
    max_pending: int = Field(ge=1)
    manifest: dict[str, Any]
    sizes: PodSizes | None = None

    @model_validator(mode="after")
    def _can_start_a_job(self) -> Self:
        known = _Manifest.model_validate(self.manifest)
        if known.kind not in KINDS:
            raise ValueError(f"manifest.kind: is {known.kind}, and must be one of {', '.join(KINDS)}")
        try:
            _environment(self.manifest)
        except (KeyError, StopIteration, TypeError):
            where = (
                "trainer.env" if known.kind == "TrainJob" else f"template: a container '{CONTAINER}' with env"
            )
            raise ValueError(f"manifest.spec.{where} is missing") from None
        if not self.labels:
            raise ValueError("manifest.metadata.labels: no label is that of the release, such as its name")
        return self

    @property
    def kind(self) -> ObjectKind:
        return KINDS[self.manifest["kind"]]

    @property
    def labels(self) -> Mapping[str, str]:
        """They select the objects of this release, of all pools: a pool that is renamed keeps its Jobs."""
        labels: Mapping[str, str] = self.manifest["metadata"]["labels"]
        # Kueue's labels are those of projects in the objects.
        others = (POOL_LABEL, QUEUE_LABEL, PRIORITY_LABEL)
        return {key: value for key, value in labels.items() if key not in others}

    def queue_of(self, kueue: Mapping[str, str] | None) -> str:
        """The queue of the Jobs of a project with these values; empty: none."""
        return (kueue or {}).get("queue") or self.manifest["metadata"]["labels"].get(QUEUE_LABEL, "")

    def manifest_of(
        self,
        job_id: str,
        epoch: int,
        project_id: str,
        kueue: Mapping[str, str] | None,
        gpus: int | None = None,
        nodes: int | None = None,
    ) -> dict[str, Any]:
        """The manifest of an attempt.

        Args:
            epoch: of the row before it is claimed.
            kueue: `queue` and `priority_class` of the project; missing ones are those of the template.
            gpus: of each node, if the job chose them.
            nodes: if the job chose them.

        Raises:
            SizeNotAllowed: it chose more than the pool allows now.
        """
        manifest = copy.deepcopy(self.manifest)
        self._resize(manifest, gpus, nodes)
        metadata = manifest["metadata"]
        labels = metadata["labels"] | {JOB_LABEL: job_id, PROJECT_LABEL: project_id}
        for name, label in (("queue", QUEUE_LABEL), ("priority_class", PRIORITY_LABEL)):
            if value := (kueue or {}).get(name):
                labels[label] = value
        metadata |= {"name": name_of(job_id, epoch), "labels": labels}
        if QUEUE_LABEL in labels:
            # Kueue resumes it. Its webhook suspends Jobs, too; if that is down, none starts outside of the quota.
            manifest["spec"]["suspend"] = True
        _set(_environment(manifest), "REGRAFT_CLAIM", job_id)
        return manifest

    def _resize(self, manifest: dict[str, Any], gpus: int | None, nodes: int | None) -> None:
        """Give the manifest the GPUs and nodes that the job chose."""
        if gpus is None and nodes is None:
            return
        if self.sizes is None:
            raise SizeNotAllowed(
                "jobs of the pool cannot choose gpus and nodes: it has no maxGpus and maxNodes"
            )
        gpus, nodes = gpus or self.sizes.gpus, nodes or self.sizes.nodes
        if not self.sizes.sampling_gpus < gpus <= self.sizes.max_gpus or nodes > self.sizes.max_nodes:
            raise SizeNotAllowed(
                f"it chose {gpus} GPUs on {nodes} nodes, and the pool has samplingGpus {self.sizes.sampling_gpus}, "
                f"maxGpus {self.sizes.max_gpus} and maxNodes {self.sizes.max_nodes}"
            )
        containers = _resources(manifest)
        if gpus != self.sizes.gpus and not any(_has(one, self.sizes.gpu_resource) for one in containers):
            raise SizeNotAllowed(
                f"it chose {gpus} GPUs, and no container has {self.sizes.gpu_resource}: a claim of devices has the "
                f"pool's {self.sizes.gpus}"
            )
        for resources in containers:
            _scale(resources, gpus, self.sizes)
        spec = manifest["spec"]
        if manifest["kind"] == "TrainJob":
            spec["trainer"]["numNodes"] = nodes
        else:
            spec |= {"parallelism": nodes, "completions": nodes}
        environment = _environment(manifest)
        _set(environment, "REGRAFT_RANKS", str(gpus - self.sizes.sampling_gpus))
        if self.sizes.max_nodes > 1:  # else the pod has no rendezvous
            _set(environment, "REGRAFT_NODES", str(nodes))


def name_of(job_id: str, epoch: int) -> str:
    """The name of the object that runs the attempt: a second one cannot be created. Names have no capital letters."""
    return f"ft-{job_id.removeprefix('ftjob-').lower()}-{epoch}"


def load(folder: Path) -> Mapping[str, JobTemplate]:
    """The template of each GPU class.

    Raises:
        InvalidTemplates: one is not as described above, or there is none.
    """
    templates = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    if not templates:
        raise InvalidTemplates(f"{folder} has no templates; each GPU class needs a file <gpu class>.json")
    return templates


def _read(path: Path) -> JobTemplate:
    try:
        return JobTemplate.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError) as cause:  # pydantic's and json's errors are ValueErrors
        raise InvalidTemplates(f"{path}: {_problem(cause)}") from cause


def _problem(cause: OSError | ValueError) -> str:
    if not isinstance(cause, ValidationError):
        return file_problem(cause)
    first = cause.errors()[0]
    where = "".join(f"{part}: " for part in first["loc"])
    return where + first["msg"].removeprefix("Value error, ")


def _environment(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The variables of the worker in a manifest, which the caller may change."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        environment: list[dict[str, Any]] = spec["trainer"]["env"]
        return environment
    containers: Sequence[dict[str, Any]] = spec["template"]["spec"]["containers"]
    environment = next(one for one in containers if one["name"] == CONTAINER)["env"]
    return environment


def _resources(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The resources of the containers with GPUs in a manifest, which the caller may change."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        return [spec["trainer"]["resourcesPerNode"]]
    pod = spec["template"]["spec"]
    # The doctor has the resources of the worker.
    named = (CONTAINER, DOCTOR)
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    return [one["resources"] for one in containers if one["name"] in named]


def _has(resources: Mapping[str, dict[str, Any]], name: str) -> bool:
    return any(name in amounts for amounts in resources.values())


def _scale(resources: Mapping[str, dict[str, Any]], gpus: int, sizes: PodSizes) -> None:
    """Scale GPUs, processors and memory from those of a pod that did not choose."""
    for amounts in resources.values():  # requests and limits
        for name in ("cpu", "memory"):
            if name in amounts:
                amounts[name] = _times(str(amounts[name]), Fraction(gpus, sizes.gpus), *SMALLEST[name])
        if sizes.gpu_resource in amounts:
            amounts[sizes.gpu_resource] = gpus


def _times(quantity: str, factor: Fraction, step: Fraction, unit: str) -> str:
    """Multiply a quantity of Kubernetes, such as 500m or 64Gi, and round it up to a step unless it is whole.

    Args:
        step: the value of `unit`.
    """
    digits = quantity.rstrip(ascii_letters)
    suffix = quantity[len(digits) :]
    product = Fraction(digits) * factor
    if product.denominator == 1:
        return f"{product}{suffix}"
    return f"{math.ceil(product * SUFFIXES[suffix] / step)}{unit}"


def _set(environment: list[dict[str, Any]], name: str, value: str) -> None:
    environment[:] = [one for one in environment if one["name"] != name]
    environment.append({"name": name, "value": value})
