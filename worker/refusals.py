"""Errors that fail a job without a retry, because it cannot succeed on any worker.

Code that does not know the job raises a Refusal. worker/child.py converts it to a UserMistake, the job's error. Imports
no torch.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from core.errors import ModelNotFound, ServiceError
from core.jobs.hyperparameter_places import param_of
from core.jobs.params import GRADER_PARAM
from core.outages import Resource, TemporarilyUnavailable, outage
from core.storage.disk import NoRoom
from graders.build import NotConfigured

log = logging.getLogger(__name__)


class UserMistake(Exception):
    """The job fails with this error, and is not retried: another attempt would fail as well."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class Refusal(Exception):
    """A deterministic failure. The message tells users the problem and the fix."""

    code: ClassVar[str]
    param: ClassVar[str | None] = "model"


class UnsupportedModel(Refusal):
    """The architecture has a feature that sampling or training does not implement."""

    code = "unsupported_model"


class InvalidModel(Refusal):
    """Files of the model or of a checkpoint are missing, damaged or inconsistent."""

    code = "invalid_model"


class PausedWhileWaiting(Exception):
    """The user has paused the job while it waited for their agent."""


class NoChatTemplate(Refusal):
    code = "no_chat_template"


class ChatTemplateFailed(Refusal):
    """The model's chat template rejects a row's messages, or is invalid."""

    code = "chat_template_failed"


class NotEnoughMemory(Refusal):
    code = "not_enough_memory"


class NotEnoughDisk(Refusal):
    code = "not_enough_disk"
    param = None


class InvalidTargets(Refusal):
    """`lora_targets` names a layer that the model does not have, or that cannot have an adapter."""

    code = "invalid_value"
    param = param_of("reinforcement", "lora_targets")


class SamplerMismatch(Refusal):
    """Sampler and trainer compute different probabilities for the same tokens and weights."""

    code = "sampler_mismatch"


class SamplerUnusable(Refusal):
    """The sampler cannot load or compute this model on this worker."""

    code = "sampler_unusable"


class TrainingDiverged(Refusal):
    """The model's outputs or its gradients are no longer numbers, so further steps and the result are useless."""

    code = "training_diverged"
    param = None


class LoweredForNextAttempt(Exception):
    """The attempt ends, because it has run out of memory. The next one begins with the sizes that were lowered."""


class ModelUnavailable(Exception):
    """A model could not be downloaded, or its server does not answer. Another attempt may succeed."""


class NoMember(Exception):
    """No member of a rollout fleet has answered for too long, as during its upgrade. Another attempt may find one."""


class NotKnownYet(Exception):
    """A file of the operator lacks a name here that the API has accepted: this copy of the file may be older.

    The work waits for REGRAFT_PATIENCE_SECONDS, or for a worker that knows the name. Then it fails with `mistake`.
    """

    PREFIX = "a file of the operator may be older here than at the API"

    def __init__(self, mistake: UserMistake) -> None:
        super().__init__(f"{self.PREFIX}: {mistake.message}")
        self.mistake = mistake


class MemoryTaken(TemporarilyUnavailable):
    """Other processes use memory that the job needs. Without numbers, so that it is one event of the job."""

    resource = Resource.MEMORY

    def __init__(self, device: str) -> None:
        place = "main memory" if device == "cpu" else "memory of the GPU"
        super().__init__(f"other processes use {place} that the job needs")


class MachineLacks(TemporarilyUnavailable):
    """The machine lacks for a while what the start of a run needs. Without numbers, so that it is one event.

    `details` has them, for the error of a job that has waited too long.
    """

    def __init__(self, resource: Resource, details: str) -> None:
        self.resource, self.details = resource, details
        super().__init__(f"the {resource} cannot be used: see the log of the worker")


LACKING = frozenset({Resource.DISK, Resource.DESCRIPTORS, Resource.NAMES, Resource.MEMORY})


@contextmanager
def starting_later() -> Iterator[None]:
    """Raise an outage of the machine as MachineLacks: nothing is computed yet, so the job can wait for its end."""
    try:
        yield
    except (MemoryError, TemporarilyUnavailable):
        raise
    except Exception as cause:  # also of libraries that write files without OSError
        resource = outage(cause)
        if resource is None or resource not in LACKING:
            raise
        log.warning("the run cannot start: %r", cause)
        raise MachineLacks(resource, _details(cause)) from cause


def _details(cause: Exception) -> str:
    if isinstance(cause, NoRoom):
        return str(cause)
    return (cause.strerror if isinstance(cause, OSError) else None) or first_line(cause)


@contextmanager
def refusing_too_large() -> Iterator[None]:
    """Raise NoRoom as NotEnoughDisk if the files are larger than their whole disk: no wait would help."""
    try:
        yield
    except NoRoom as cause:
        if not cause.is_too_large:
            raise
        raise NotEnoughDisk(str(cause)) from cause


def not_known_yet(error: ServiceError) -> NotKnownYet:
    """The error of the API for a name that it does not know, as one of work that it has accepted."""
    return NotKnownYet(UserMistake(error.code or "invalid_value", error.message, error.param))


@contextmanager
def waiting_for_names() -> Iterator[None]:
    """Raise what the operator's files lack here as NotKnownYet: the API has accepted it.

    A tuned model is in the database, so one that is missing was deleted.
    """
    try:
        yield
    except NotConfigured as missing:
        raise NotKnownYet(UserMistake("invalid_grader", str(missing), GRADER_PARAM)) from missing
    except ModelNotFound as missing:
        raise not_known_yet(missing) from missing


@contextmanager
def failing_once() -> Iterator[None]:
    """Raise a Refusal as the UserMistake with its code."""
    try:
        yield
    except Refusal as refusal:
        raise UserMistake(refusal.code, str(refusal), refusal.param) from refusal


def first_error(several: BaseExceptionGroup) -> BaseException:
    """The first error of a group of tasks; it has ended the others."""
    error = several.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


def first_line(cause: BaseException) -> str:
    """An exception for a message: its type and its first line, shortened."""
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0][:300]}" if lines else type(cause).__name__
