"""A loss: what a gradient adds up, micro-batch by micro-batch. worker/training/losses.py says which loss a job has."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from worker.model.batch import Tensors, TrainedAnswer, answers_of, split, tensors_of
from worker.model.json_schema import forbidden
from worker.model.policy import Policy
from worker.model.sizing import HEAD_CHUNK
from worker.model.token_logprobs import predicting
from worker.training.top_kl import kl_from_top, top_tokens
from worker.training.world import World
from worker.types import Pack, TopTokens, TrainingSequence


@dataclass(frozen=True)
class GradientSums:
    """Sums over the tokens of a step (and one maximum), added up micro-batch by micro-batch."""

    loss: float = 0.0
    value_loss: float = 0.0
    tokens: int = 0
    clipped: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    gap_k1: float = 0.0
    gap_k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    # Of given answers (worker/training/row_loss.py).
    sequences: int = 0
    pairs: int = 0
    correct: float = (
        0.0  # tokens that the model thinks likeliest, or pairs whose preferred answer has more reward
    )
    chosen: float = 0.0  # reward of the preferred answers
    rejected: float = 0.0
    answers: int = 0  # of the loss kto
    desirable: int = 0

    @property
    def counted(self) -> int:
        """The number that a loss of given answers is divided by."""
        return self.answers or self.pairs or self.tokens

    @property
    def effective_sample_size(self) -> float:
        """Return (sum of weights)^2 / (n x sum of squares): 1 if all are equal, 1 / n if one dominates."""
        if self.ratio_squared == 0.0:  # underflow in float64
            return 0.0
        return self.ratio * (self.ratio / self.ratio_squared) / self.tokens

    def __add__(self, other: "GradientSums") -> "GradientSums":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return GradientSums(**sums | {"gap_max": max(self.gap_max, other.gap_max)})


# Of the answers on which the KL of an update is measured: a micro-batch of the step as a whole would cost a third of
# its passes again. Of each position the likeliest tokens are compared one by one; the others count as one.
MEASURED_TOKENS, TOP = 256, 64

# The shortest sequence with a learned token.
SHORTEST = TrainingSequence((0, 0), (0.0, 0.0), (0.0, 0.0), 1.0)


@dataclass(frozen=True)
class StepValues:
    """Numbers of the whole step that the loss of a micro-batch depends on."""

    std: float = 1.0  # everything is divided by it later, so penalties are multiplied by it
    kl: float = 0.0  # the weight of the penalty
    z0: float = 0.0  # of the loss kto


@dataclass
class Batch:
    """A micro-batch, with the values of its first pass that later passes reuse."""

    packs: Sequence[Pack]
    part: int = 0  # the mini-batch
    is_filler: bool = False  # computed because another rank has one more; it counts for nothing
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    advantage: Tensor | None = None  # with rewards of tokens, before they are normalized
    normalized_advantage: Tensor | None = None
    used_advantage: Tensor | None = None  # of the last pass, before the division by the std of the step
    before: Tensor | None = None  # of the last pass: what `Loss.kl_from_before` compares with
    top: TopTokens | None = (
        None  # the likeliest tokens at the positions of `before`, as a RowLoss compares them
    )
    old_value: Tensor | None = None  # with a value head, like `returns`
    returns: Tensor | None = None

    @property
    def sequences(self) -> int:
        return sum(len(pack.sequences) for pack in self.packs)

    @property
    def answers(self) -> list[TrainingSequence]:
        return [answer for pack in self.packs for answer in pack.sequences]


def measured(batches: Sequence[Batch], part: int) -> Batch | None:
    """Return the micro-batch on which an update of a mini-batch is measured: that of median length.

    None: an out-of-memory error since the pass has divided the answers in another way.
    """
    of_part = [batch for batch in batches if batch.part == part]
    real = [batch for batch in of_part if not batch.is_filler] or of_part
    chosen = real[len(real) // 2] if real else None
    return None if chosen is None or chosen.before is None else chosen


def first_answers(batch: Batch, tokens: int, *, divides_packs: bool) -> Batch:
    """Return the first packs of a micro-batch, with at most `tokens` tokens, but at least one answer.

    Args:
        divides_packs: the first answers of a pack above the limit, and not all of them.
    """
    ends = list(accumulate(pack.tokens for pack in batch.packs))
    packs = [pack for pack, end in zip(batch.packs, ends, strict=True) if end <= tokens]
    if not packs:
        first = batch.packs[0]
        packs = [next(split(first, tokens)) if divides_packs else first]
    return Batch(packs, batch.part, batch.is_filler)


# Tensors of a batch with one number for each trained token.
KEPT = (
    "old_logp",
    "ref_logp",
    "advantage",
    "normalized_advantage",
    "used_advantage",
    "old_value",
    "returns",
)


@dataclass
class _TokenValues:
    """A value of the trained tokens of an answer, as far as it is known."""

    value_T: Tensor
    is_known_T: Tensor

    @classmethod
    def unknown(cls, tokens: int, like: Tensor) -> "_TokenValues":
        return cls(like.new_zeros(tokens), torch.zeros(tokens, dtype=torch.bool, device=like.device))

    def add(self, answer: TrainedAnswer, value: Tensor) -> None:
        self.value_T[answer.index] = value
        self.is_known_T[answer.index] = True

    def of(self, answer: TrainedAnswer) -> Tensor | None:
        return self.value_T[answer.index] if self.is_known_T[answer.index].all() else None


class KeptValues:
    """Values of batches by their answers, for batches of the same answers that are divided in another way."""

    def __init__(self, by_answer: Mapping[str, Mapping[int, _TokenValues]]) -> None:
        self._by_answer = by_answer

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Self:
        found: dict[str, dict[int, _TokenValues]] = {name: {} for name in KEPT}
        for batch in batches:
            answers = answers_of(batch.packs)
            sizes = [answer.tokens for answer in answers]
            for name in KEPT:
                value_M = getattr(batch, name)
                if value_M is None:
                    continue
                for answer, part in zip(answers, torch.split(value_M, sizes), strict=True):
                    whole = answer.undivided
                    unknown = _TokenValues.unknown(whole.trained_tokens, part)
                    found[name].setdefault(id(whole), unknown).add(answer, part)
        return cls(found)

    def restore(self, batches: Iterable[Batch]) -> None:
        """Set the values of batches, all of whose tokens have them."""
        for batch in batches:
            answers = answers_of(batch.packs)
            for name, by_answer in self._by_answer.items():
                known = [
                    by_answer[id(one.undivided)].of(one) for one in answers if id(one.undivided) in by_answer
                ]
                values = [value for value in known if value is not None]
                if len(values) == len(answers):
                    setattr(batch, name, torch.cat(values))


class Loss(ABC):
    """A sum over micro-batches, which may compare the policy with a reference.

    `reference` has the adapter of the reference, or all of its weights if all weights are trained. It is None if the
    reference is the base model, or if the loss has no reference.
    """

    couples_answers: ClassVar[bool] = True  # whether the answers of a pack have to be in one micro-batch
    # Whether all branches of an answer have to be in one micro-batch. It cannot be divided then, so the memory of the
    # longest episode has to be there.
    couples_calls = True

    def __init__(self, policy: Policy, *, has_reference: bool) -> None:
        self.policy = policy
        self.reference: list[Tensor] | None = None
        if has_reference and not policy.has_base:
            self.reference = policy.snapshot()
        self._loaded = self.reference

    @property
    @abstractmethod
    def settings(self) -> Any:
        """The hyperparameters of the job."""

    @abstractmethod
    def __call__(self, batch: Batch, values: StepValues) -> tuple[Tensor, GradientSums]:
        """The sum of the loss over a micro-batch, and its statistics."""

    @property
    def temperature(self) -> float:
        """Divides the logits of the policy."""
        return 1.0

    def laid_out(self, batch: Batch) -> Tensors:
        """The rows of a micro-batch."""
        return tensors_of(batch.packs, self.policy.device)

    def keep_hidden(self, batch: Batch, hidden: Tensor) -> None:
        """Keep the hidden states [M, h] of a pass for `before_step`: those of the positions that are measured."""
        if self.settings.step_kl:
            batch.before = hidden[:MEASURED_TOKENS].detach().clone()

    def before_step(self, batches: Sequence[Batch], part: int = 0) -> None:
        """Prepare for `step_kl`, once the gradient of a mini-batch is computed."""
        if (batch := measured(batches, part)) is not None:
            self.keep_prediction(batch)

    def step_kl(self, batches: Sequence[Batch], part: int = 0) -> float | None:
        """Return KL(before || after) of the newest update of a mini-batch, in nats a token, from one micro-batch.

        None: there is none, on a rank or after an out-of-memory error.
        """
        batch = measured(batches, part)
        return None if batch is None else self.kl_from_before(batch)

    def keep_prediction(self, batch: Batch) -> None:
        """Keep the likeliest tokens at the measured positions, by the head of before the update: it may be trained."""
        assert batch.before is not None
        allowed = self.laid_out(self._first(batch)).allowed_M
        tops = [top_tokens(each, TOP) for each in self._logprobs(batch.before, allowed)]
        batch.top = TopTokens(*map(torch.cat, zip(*tops, strict=True)))

    def kl_from_before(self, batch: Batch) -> float:
        """The KL over all tokens, of the first answers: exact where k3 of the sampled tokens would be noise, and right
        for tokens that the policy has not sampled."""
        assert batch.top is not None, "`before_step` comes first"
        tensors = self.laid_out(self._first(batch))
        after = predicting(self.policy, tensors)[: len(batch.top.ids)]
        before = (torch.split(each[: len(after)], HEAD_CHUNK) for each in (batch.top.ids, batch.top.logprobs))
        tops = zip(*before, strict=True)
        logprobs = self._logprobs(after, tensors.allowed_M)
        return (
            torch.cat([kl_from_top(each, *top) for each, top in zip(logprobs, tops, strict=True)])
            .mean()
            .item()
        )

    def _first(self, batch: Batch) -> Batch:
        return first_answers(batch, MEASURED_TOKENS, divides_packs=not self.couples_answers)

    def _logprobs(self, hidden: Tensor, allowed_M: Tensor | None) -> Iterator[Tensor]:
        """Of all tokens [m, V], by chunks of positions."""
        for first in range(0, len(hidden), HEAD_CHUNK):
            logits = self.policy.logits(hidden[first : first + HEAD_CHUNK])
            if allowed_M is not None:
                allowed = allowed_M[first : first + len(logits)]
                logits.masked_fill_(forbidden(allowed, logits.shape[-1]), -torch.inf)
            yield logits.div_(self.temperature).log_softmax(-1)

    @property
    def trainable(self) -> list[Parameter]:
        """The weights that the first of several ranks updates."""
        return self.policy.led

    @property
    def filler(self) -> Pack:
        """The shortest pack that the loss can be computed of."""
        return Pack((0, 0), (SHORTEST,))

    @property
    def fixed_weights(self) -> Mapping[str, Sequence[Tensor] | None]:
        """By name, weights that are not trained and that all ranks need. None: they have them."""
        return {"reference": self.reference}

    def remember(self, batch: Batch) -> None:
        """Keep what later passes need of the policy that sampled the micro-batch. Losses of one pass need nothing."""
        return

    @property
    def changed_reference(self) -> list[Tensor] | None:
        """The reference, unless it is the model as it was loaded."""
        return None if self.reference is self._loaded else self.reference

    def change_reference(self, weights: Sequence[Tensor] | None) -> None:
        """Compare with these weights; None: with the model as it was loaded."""
        self.reference = self._loaded if weights is None else [one.to(self.policy.device) for one in weights]

    def as_reference(self) -> AbstractContextManager[None]:
        """Compute as the reference during the context."""
        return self.policy.as_base() if self.reference is None else self.policy.with_weights(self.reference)

    def receive(self, name: str, world: World) -> None:
        """Overwrite the `fixed_weights` of this name with those of rank 0, which calls this as well."""
        assert name == "reference"
        if self.reference is None:
            self.reference = [torch.zeros_like(parameter) for parameter in self.policy.trainable]
        world.broadcast(self.reference)
