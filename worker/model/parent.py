"""Start a policy from the adapter, or from the weights, of a tuned model."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from core.chat_templates import CLOCK
from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.results.lineage import RENDERING, Parent
from core.storage.manifests import Damaged
from worker.model.policy import Policy
from worker.refusals import UserMistake

Settings = TypeVar("Settings", Resolved, ResolvedOffline)


class Adapters(Protocol):
    """The files of adapters; worker/recording/checkpoints.py implements it."""

    @property
    def is_empty(self) -> bool:
        """Whether the job has no checkpoint yet."""
        ...

    def download(self, prefix: str, folder: Path) -> None: ...


class Models(Adapters, Protocol):
    """The files of whole models too."""

    scratch: Path  # a folder for them

    def download_model(self, prefix: str, folder: Path) -> None:
        """As `download`, without the state of the trainer."""
        ...


def continuing(settings: Settings, parent: Parent | None) -> Settings:
    """The hyperparameters of a job that trains `parent` further: with the shape of its adapter or a larger rank, and
    rendering prompts as its job did unless they ask for another template or other arguments of it.

    Other arguments of the same template keep the time that the parent's prompts have."""
    if parent is None:
        return settings
    kept = {} if parent.is_whole else parent.shape
    if settings.chat_template is None and not settings.chat_template_kwargs:
        kept |= {name: parent.settings[name] for name in RENDERING if parent.settings[name] is not None}
    elif settings.chat_template == parent.settings.get("chat_template"):
        arguments = parent.settings.get("chat_template_kwargs") or {}
        clock = {CLOCK: arguments[CLOCK]} if CLOCK in arguments else {}
        kept |= {"chat_template_kwargs": clock | settings.chat_template_kwargs}
    return settings.model_validate(settings.model_dump() | kept)


def start_from(
    parent: Parent,
    policy: Policy,
    checkpoints: Adapters,
    *also: Callable[[Path], None],
) -> bool:
    """Load the parent's adapter into the policy. Returns False for a job with a checkpoint, which has its own, and for
    a parent that is a whole model, which `whole_weights` has loaded.

    Freezes it in the policy, of either job, if the job's adapter has a larger rank.

    Each of `also` reads what else the parent's folder has.

    Raises:
        UserMistake: its files were deleted or are damaged.
        InvalidModel: they do not fit the model.
    """
    policy.frozen_rank = parent.frozen_rank
    if parent.is_whole or not checkpoints.is_empty:
        return False
    with tempfile.TemporaryDirectory() as folder:
        with _naming(parent, "adapter"):
            checkpoints.download(parent.blob_prefix, Path(folder))
        (policy.load_frozen if parent.frozen_rank else policy.load)(Path(folder))
        for read in also:
            read(Path(folder))
    return True


@contextmanager
def whole_weights(
    parent: Parent | None, checkpoints: Models, settings: Resolved | ResolvedOffline
) -> Iterator[Path | None]:
    """A folder with the parent's weights during the context, to load in place of the base model's.

    None: the parent is an adapter or there is none, or the job has a checkpoint and does not compare with the parent.

    Raises:
        UserMistake: its files were deleted or are damaged.
    """
    if parent is None or not parent.is_whole or not (checkpoints.is_empty or settings.has_reference):
        yield None
        return
    with tempfile.TemporaryDirectory(dir=checkpoints.scratch) as folder:
        with _naming(parent, "model"):
            checkpoints.download_model(parent.blob_prefix, Path(folder))
        yield Path(folder)


@contextmanager
def _naming(parent: Parent, what: str) -> Iterator[None]:
    """Raise a UserMistake that names the parent if its files are damaged."""
    try:
        yield
    except Damaged as damage:
        raise UserMistake(
            "model_not_available",
            f"The {what} of '{parent.model}', which the job was to train further, cannot be read: {damage}.",
            "model",
        ) from damage
