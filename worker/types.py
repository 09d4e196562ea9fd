"""The nouns of one training step, frozen, each made by one stage and read by the next.

Axes: `_P` prompts of the step, `_G` members of a group (answers to one prompt), `_T` tokens of one answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graders.types import Grade

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset: what the model reads, and what the grader may look at."""

    line: int
    ids: tuple[int, ...]
    item: Mapping[str, Any]


@dataclass(frozen=True)
class Rollout:
    """One answer to one prompt, with what the trainer needs to learn from it."""

    output_ids_T: tuple[int, ...]  # ends with the stop token unless it was truncated
    logprobs_T: tuple[float, ...]  # of each sampled token, after temperature: the denominator of the ratio
    text: str  # without special tokens
    finish_reason: FinishReason


@dataclass(frozen=True)
class Group:
    """The graded answers to one prompt. A reward of None could not be judged and teaches nothing."""

    prompt: Prompt
    rollouts_G: tuple[Rollout, ...]
    grades_G: tuple[Grade, ...]

    @property
    def rewards_G(self) -> list[float | None]:
        return [grade.score for grade in self.grades_G]


@dataclass(frozen=True)
class Sequence:
    """One answer as the trainer sees it: its tokens, its advantage, its weight in the loss."""

    output_ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    advantage: float
    weight: float  # of each token; the weights of a step contain the whole normalisation of its loss


@dataclass(frozen=True)
class Pack:
    """A prompt once, and the answers to it that carry signal."""

    prompt_ids: tuple[int, ...]
    sequences: tuple[Sequence, ...]

    @property
    def tokens(self) -> int:
        # The last token of an answer predicts nothing, so the model never reads it.
        return len(self.prompt_ids) + sum(len(one.output_ids_T) - 1 for one in self.sequences)


@dataclass(frozen=True)
class UpdateMetrics:
    """What one optimizer step did. Means are over the trained tokens; None where nothing was trained."""

    loss: float
    trained_sequences: int
    trained_tokens: int
    dropped_sequences: int  # carried no signal, so they were not computed
    grad_norm: float | None
    clip_fraction: float | None
    kl: float | None  # k3 to the base model
    entropy: float | None  # nats
    logprob_gap: float | None  # mean |trainer - sampler|, on the policy that sampled
    skipped: bool = False  # a gradient was not finite, so the step was not taken
