"""Jobs side by side: the rewards of their models on the prompts that both validated, and what was requested."""

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.tables import File, Job, RolloutPage
from core.results import rollouts
from core.results.job_results import delivered_steps
from core.results.rollout_filters import Wanted
from core.statistics import paired_difference
from core.storage.store import BlobStore

# Fields of the grader and of hyperparameters that are compared as a whole, because their parts mean nothing alone.
_WHOLE = ("grader", "response_format")


@dataclass(frozen=True)
class Validated:
    """The validation of a job that counts: of its delivered model, else the last one. None: it has none."""

    job: Job
    page: RolloutPage | None


def validated(session: Session, job: Job) -> Validated:
    pages = rollouts.pages(session, job.id, split="valid")
    step = delivered_steps(session, [job]).get(job.id)
    of_step = [page for page in pages if page.step == step]
    counting = of_step or list(pages)
    return Validated(job, counting[-1] if counting else None)


@dataclass(frozen=True)
class PairedRewards:
    """`difference` is a job minus the first one, as `paired_difference` gives it, over prompts."""

    prompts: int
    unpaired: int
    difference: Mapping[str, Any]


def against_first(blobs: BlobStore, pages: Sequence[RolloutPage | None]) -> list[PairedRewards | None]:
    """The validations after the first one, each paired with the first; None where one of the two is missing.

    The mean reward of each prompt that both validations have. Prompts pair by their content, not their line.
    """
    first, *others = pages
    if first is None:
        return [None for _ in others]
    means = _means(blobs, first)
    return [None if page is None else _paired(means, _means(blobs, page)) for page in others]


def _paired(means: Mapping[str, float | None], others: Mapping[str, float | None]) -> PairedRewards:
    both = [key for key in means if key in others]
    return PairedRewards(
        prompts=len(both),
        unpaired=len(means) + len(others) - 2 * len(both),
        difference=paired_difference([(means[key], others[key]) for key in both]),
    )


def _means(blobs: BlobStore, page: RolloutPage) -> dict[str, float | None]:
    """The mean reward by the hash of the prompt and its row; None: no answer has a score."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rollouts.find(blobs, [page], Wanted()):
        content = json.dumps([row["messages"], row["item"]], sort_keys=True)
        mine = scores[hashlib.sha256(content.encode()).hexdigest()]
        if row["score"] is not None:
            mine.append(row["score"])
    return {key: statistics.fmean(values) if values else None for key, values in scores.items()}


def config(session: Session, job: Job) -> dict[str, Any]:
    """The request of a job by dotted names. A file is its name and the hash of its content, not its id."""
    flat: dict[str, Any] = {"model": job.model, "method": job.method, "seed": job.seed}
    for name, file_id in (("training_file", job.training_file), ("validation_file", job.validation_file)):
        file = session.scalar(select(File).where(File.id == file_id)) if file_id else None
        flat[name] = file_id if file is None else f"{file.filename} (sha256 {file.sha256[:12]})"
    if job.parent is not None:
        flat["parent"] = job.parent.get("model")
    for name, value in _flat("", job.body):
        flat[name] = value
    return flat


def _flat(prefix: str, value: Any) -> Sequence[tuple[str, Any]]:
    if not isinstance(value, Mapping) or prefix in _WHOLE:
        return [(prefix, value)]
    found: list[tuple[str, Any]] = []
    for name, inner in value.items():
        found += _flat(f"{prefix}.{name}" if prefix else name, inner)
    return found


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The fields whose values are not all equal, by name, with the values. A missing field is None."""
    names = sorted({name for config in configs for name in config})
    rows = [(name, [config.get(name) for config in configs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
