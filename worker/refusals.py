"""Errors that fail a job without a retry, because it cannot succeed on any worker.

Code that does not know the job raises a Refusal. worker/child.py converts it to a UserMistake, the job's error. Imports
no torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from core.outages import Resource, TemporarilyUnavailable


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


class NoChatTemplate(Refusal):
    code = "no_chat_template"


class ChatTemplateFailed(Refusal):
    """The model's chat template rejects a row's messages, or is invalid."""

    code = "chat_template_failed"


class NotEnoughMemory(Refusal):
    code = "not_enough_memory"


class InvalidTargets(Refusal):
    """`lora_targets` names a layer that the model does not have, or that cannot have an adapter."""

    code = "invalid_value"
    param = "method.reinforcement.hyperparameters.advanced.lora.targets"


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


class ModelUnavailable(Exception):
    """A model could not be downloaded, or its server does not answer. Another attempt may succeed."""


class MemoryTaken(TemporarilyUnavailable):
    """Other processes use memory that the job needs. Without numbers, so that it is one event of the job."""

    resource = Resource.MEMORY

    def __init__(self, device: str) -> None:
        place = "main memory" if device == "cpu" else "memory of the GPU"
        super().__init__(f"other processes use {place} that the job needs")


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
