"""Start a policy from the adapter of a tuned model."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.results.lineage import RENDERING, Parent
from core.storage.manifests import Damaged
from worker.model.policy import Policy
from worker.refusals import UserMistake

Settings = TypeVar("Settings", Resolved, ResolvedOffline)


class Adapters(Protocol):
    """The files of adapters; worker/record/checkpoints.py implements it."""

    @property
    def is_empty(self) -> bool:
        """Whether the job has no checkpoint yet."""
        ...

    def download(self, prefix: str, folder: Path) -> None: ...


def continuing(settings: Settings, parent: Parent | None) -> Settings:
    """The hyperparameters of a job that trains `parent` further: with the shape of its adapter or a larger rank, and
    rendering prompts as its job did unless they ask for another template."""
    if parent is None:
        return settings
    kept = parent.shape
    if settings.chat_template is None and not settings.chat_template_kwargs:
        kept |= {name: parent.settings[name] for name in RENDERING if parent.settings[name] is not None}
    return settings.model_validate(settings.model_dump() | kept)


def start_from(
    parent: Parent,
    policy: Policy,
    checkpoints: Adapters,
    *also: Callable[[Path], None],
) -> bool:
    """Load the parent's adapter into the policy. Returns False for a job with a checkpoint, which has its own.

    Freezes it in the policy, of either job, if the job's adapter has a larger rank.

    Each of `also` reads what else the parent's folder has.

    Raises:
        UserMistake: its files were deleted or are damaged.
        InvalidModel: they do not fit the model.
    """
    policy.frozen_rank = parent.frozen_rank
    if not checkpoints.is_empty:
        return False
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoints.download(parent.blob_prefix, Path(folder))
        except Damaged as damage:
            raise UserMistake(
                "model_not_available",
                f"The adapter of '{parent.model}', which the job was to train further, cannot be read: {damage}.",
                "model",
            ) from damage
        (policy.load_frozen if parent.frozen_rank else policy.load)(Path(folder))
        for read in also:
            read(Path(folder))
    return True
