"""A loss: what a gradient adds up, micro-batch by micro-batch. worker/training/losses.py says which loss a job has."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from worker.model.batch import Tensors, TrainedAnswer, answers_of, by_answer, tensors_of
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
    masked: float = 0.0  # tokens that the correction for the sampler leaves out
    teaching: int = 0  # tokens with an advantage: without one the objective has no gradient
    teaching_masked: float = 0.0  # those of them that the correction leaves out
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
    # Tokens that the model thinks likeliest, or pairs whose preferred answer has more reward.
    correct: float = 0.0
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


# Each rank measures the KL of an update at the first learned tokens of 4 prompts: all of them would cost a third
# of the passes of a step again, and one says little about others. Of each position the likeliest tokens are compared
# one by one; the others count as one.
MEASURED_PROMPTS, MEASURED_TOKENS, TOP = 4, 64, 64

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
    slices: Sequence["Slice"] = ()  # of the last pass: where the KL of an update may be measured
    old_value: Tensor | None = None  # with a value head, like `returns`
    returns: Tensor | None = None

    @property
    def sequences(self) -> int:
        return sum(len(pack.sequences) for pack in self.packs)

    @property
    def answers(self) -> list[TrainingSequence]:
        return [answer for pack in self.packs for answer in pack.sequences]


@dataclass(frozen=True)
class Slice:
    """The beginning of the answers to a prompt, and what the policy computed for them in a pass."""

    pack: Pack
    output: Tensor  # at the m learned tokens: hidden states [m, h], or rewards [m]


@dataclass(frozen=True)
class KlSum:
    """KL(before || after) of an update, summed over positions, in nats."""

    total: float = 0.0
    positions: int = 0

    @classmethod
    def mean(cls, sums_R: Iterable["KlSum"]) -> float | None:
        """In nats a position, over all ranks. None: none was measured."""
        sums = list(sums_R)
        positions = sum(one.positions for one in sums)
        return sum(one.total for one in sums) / positions if positions else None


def learned_tokens(pack: Pack) -> int:
    return sum(answer.trained_tokens for answer in pack.sequences)


def beginning(pack: Pack, tokens: int) -> Pack:
    """Return the prompt with its first answers up to the learned token of this number, or all of them."""
    answers: list[TrainingSequence] = []
    for answer in pack.sequences:
        answers.append(_beginning_of(answer, tokens))
        tokens -= answer.trained_tokens
        if tokens <= 0:
            break
    return Pack(pack.prompt_ids, tuple(answers))


def _beginning_of(answer: TrainingSequence, tokens: int) -> TrainingSequence:
    if answer.trained_tokens <= tokens or answer.branches:  # a branched episode is measured as a whole
        return answer
    end = list(accumulate(map(int, answer.is_trained_T))).index(tokens) + 1
    return replace(
        answer,
        output_ids_T=answer.output_ids_T[:end],
        logprobs_T=answer.logprobs_T[:end],
        advantages_T=answer.advantages_T[:end],
        grammar_start=min(answer.grammar_start, end),
        forced=answer.forced if end > answer.grammar_start else 0,
        learned_T=answer.learned_T[:end],
        teacher_T=answer.teacher_T[:end],
        scores=(),
        top=None,
    )


Measured = TypeVar("Measured")


def spread(candidates: Sequence[Measured], pack_of: Callable[[Measured], Pack]) -> list[Measured]:
    """Return MEASURED_PROMPTS of the candidates, in equal distances, of different prompts as far as there are such."""
    prompts: set[tuple[int, ...]] = set()
    firsts: list[Measured] = []
    others: list[Measured] = []
    for candidate in candidates:
        prompt = pack_of(candidate).prompt_ids
        (others if prompt in prompts else firsts).append(candidate)
        prompts.add(prompt)
    if len(firsts) < MEASURED_PROMPTS:
        return [*firsts, *others][:MEASURED_PROMPTS]
    return [firsts[number * len(firsts) // MEASURED_PROMPTS] for number in range(MEASURED_PROMPTS)]


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
            for name in KEPT:
                value_M = getattr(batch, name)
                if value_M is None:
                    continue
                for answer, part in by_answer(batch.packs, value_M):
                    whole = answer.undivided
                    unknown = _TokenValues.unknown(whole.trained_tokens, part)
                    found[name].setdefault(id(whole), unknown).add(answer, part)
        return cls(found)

    def restore(self, batches: Iterable[Batch]) -> None:
        """Set the values of batches, all of whose tokens have them."""
        for batch in batches:
            answers = answers_of(batch.packs)
            for name, values_of in self._by_answer.items():
                known = [
                    values_of[id(one.undivided)].of(one) for one in answers if id(one.undivided) in values_of
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
        self._predictions: list[tuple[Pack, Any]] = []  # of before the newest update

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

    def keep_output(self, batch: Batch, output_M: Tensor) -> None:
        """Keep the output of a pass, hidden states [M, h] or rewards [M], where the update may be measured."""
        if not self.settings.step_kl or batch.is_filler or any(one.piece for one in batch.answers):
            return  # tokens of pieces do not stand pack by pack
        ends = list(accumulate(learned_tokens(pack) for pack in batch.packs))
        starts = [0, *ends]
        slices = []
        for number in spread(range(len(batch.packs)), lambda number: batch.packs[number]):
            pack = self.measured_part(batch.packs[number])
            start, positions = starts[number], learned_tokens(pack)
            if positions:
                slices.append(Slice(pack, output_M[start : start + positions].detach().clone()))
        batch.slices = slices

    def measured_part(self, pack: Pack) -> Pack:
        """Return the part of a pack on which an update is measured."""
        if self.policy.route.forward == "rows":  # each answer would have its own copy of the prompt
            pack = Pack(pack.prompt_ids, pack.sequences[:1])
        return beginning(pack, MEASURED_TOKENS)

    def before_step(self, batches: Sequence[Batch], part: int = 0) -> None:
        """Keep the predictions of before the next update of a mini-batch, whose gradient is computed.

        There are none on a rank without answers, or after an out-of-memory error that came between.
        """
        slices = [one for batch in batches if batch.part == part for one in batch.slices]
        chosen = spread(slices, lambda one: one.pack)
        self._predictions = [(one.pack, self.prediction(one)) for one in chosen]

    def update_kl(self, batches: Sequence[Batch]) -> KlSum:
        """Return the KL(before || after) of the newest update, at the positions of this rank."""
        sums = KlSum()
        for pack, before in self._predictions:
            kl = self.kl_from(pack, before)
            sums = KlSum(sums.total + kl.sum().item(), sums.positions + len(kl))
        if self.policy.is_sharded:  # a forward pass is a collective operation
            for _ in range(MEASURED_PROMPTS - len(self._predictions)):
                predicting(self.policy, tensors_of([self.filler], self.policy.device))
        return sums

    def prediction(self, part: Slice) -> Any:
        """Return what `kl_from` compares with: the likeliest tokens, by the head of before the update."""
        allowed = self.laid_out(Batch([part.pack])).allowed_M
        tops = [top_tokens(each, TOP) for each in self._logprobs(part.output, allowed)]
        return TopTokens(*map(torch.cat, zip(*tops, strict=True)))

    def kl_from(self, pack: Pack, before: Any) -> Tensor:
        """The KL over the vocabulary [m]: exact where k3 of the sampled tokens would be noise, and right for tokens
        that the policy has not sampled."""
        tensors = self.laid_out(Batch([pack]))
        chunks = (torch.split(each, HEAD_CHUNK) for each in (before.ids, before.logprobs))
        logprobs = self._logprobs(predicting(self.policy, tensors), tensors.allowed_M)
        tops = zip(*chunks, strict=True)
        return torch.cat([kl_from_top(each, *top) for each, top in zip(logprobs, tops, strict=True)])

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
