"""The templates of Jobs, one for each GPU class, and the manifest of one attempt made from them.

The chart renders each template into a file `<gpu class>.json`: `{"max_jobs": 8, "max_pending": 2, "manifest": {...}}`.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from worker.dispatch.kubernetes import KINDS, ObjectKind

JOB_LABEL = "regraft.dev/job"
POOL_LABEL = "regraft.dev/pool"
PROJECT_LABEL = "regraft.dev/project"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
CONTAINER = "worker"  # of a Job; a TrainJob has one, its trainer
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


class JobTemplate(BaseModel):
    """What starts the jobs of one GPU class.

    Args:
        max_jobs: unfinished Jobs at once. Those that wait for quota count only in their own queue of Kueue.
        max_pending: of these, Jobs of one queue whose worker has not claimed its job yet.
        manifest: the Job or TrainJob without a name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_jobs: int = Field(ge=1)
    max_pending: int = Field(ge=1)
    manifest: dict[str, Any]

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
        self, job_id: str, epoch: int, project_id: str, kueue: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """The manifest of an attempt.

        Args:
            epoch: of the row before it is claimed.
            kueue: `queue` and `priority_class` of the project; missing ones are those of the template.
        """
        manifest = copy.deepcopy(self.manifest)
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
        return str(cause)
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


def _set(environment: list[dict[str, Any]], name: str, value: str) -> None:
    environment[:] = [one for one in environment if one["name"] != name]
    environment.append({"name": name, "value": value})
