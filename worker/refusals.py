"""Reasons to fail a job once, without a retry: the job cannot succeed as it is, on any worker.

Raised by code that does not know what a job is. worker/run.py turns each into the job's error. Imports no torch.
"""

from typing import ClassVar


class Refusal(Exception):
    """A deterministic failure. The message is for users: what is wrong, and what to change."""

    code: ClassVar[str]
    param: ClassVar[str | None] = "model"


class UnsupportedModel(Refusal):
    """The architecture computes something that sampling or training here does not."""

    code = "unsupported_model"


class InvalidModel(Refusal):
    """The model's files, or those of a checkpoint, are missing, damaged or do not belong together."""

    code = "invalid_model"


class NoChatTemplate(Refusal):
    code = "no_chat_template"


class ChatTemplateFailed(Refusal):
    """The model's chat template refuses a row's messages, or is no valid template."""

    code = "chat_template_failed"


class NotEnoughMemory(Refusal):
    code = "not_enough_memory"


class SamplerMismatch(Refusal):
    """Sampler and trainer disagree about the probabilities of the same tokens under the same weights."""

    code = "sampler_mismatch"


class ModelUnavailable(Exception):
    """The model could not be fetched now. Another attempt may succeed, so the job is retried."""
