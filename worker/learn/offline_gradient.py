"""The gradients of losses of given answers: supervised, and of pairs.

Both losses are sums over a step, divided once by what they count: learned tokens (supervised), pairs (preference) or
answers (the loss kto).
Each supervised row is a pack with one sequence, of which `learned_T` says what is learned. Each pair of answers is a
pack with two sequences, the preferred one first; both are always in one micro-batch, because the loss couples them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.learn import preference
from worker.learn.batch import Tensors, row_width, split, tensors_of
from worker.learn.gradient import through_head
from worker.learn.reference import WithReference
from worker.learn.totals import Totals
from worker.model.policy import Policy
from worker.progress import PROGRESS
from worker.sharing.turns import TURNS
from worker.types import Pack, TrainingSequence

# An answer whose second token is learned.
_NOTHING = TrainingSequence((0, 0), (0.0, 0.0), (0.0, 0.0), 1.0)


class OfflineGradient(WithReference):
    """Accumulates the gradient of packs on the trained weights, micro-batch by micro-batch."""

    def __init__(self, policy: Policy, settings: ResolvedOffline, *, token_budget: int) -> None:
        super().__init__(policy, has_reference=settings.has_reference)
        self.settings = settings
        self.capacity = token_budget
        self.z0 = 0.0  # of the loss kto

    @property
    def trainable(self) -> list[Parameter]:
        """The weights that the first of several ranks updates."""
        return self.policy.led

    @property
    def nothing(self) -> Pack:
        """The shortest pack that the loss can be computed of."""
        answers = 1 if self.settings.preference_loss is None else 2
        return Pack((0, 0), (_NOTHING,) * answers)

    def add(self, packs: Sequence[Pack]) -> Totals:
        """Add the gradient of the summed loss of these packs, and return its totals."""
        self._prepare(packs)
        return self.add_micro_batches(self.micro_batches(packs))

    def measure(self, packs: Sequence[Pack]) -> Totals:
        """The totals of these packs, without a gradient."""
        self._prepare(packs)
        return self.measure_micro_batches(self.micro_batches(packs))

    def micro_batches(self, packs: Sequence[Pack]) -> Iterator[list[Pack]]:
        rows = self.policy.route.forward == "rows"
        for part in whole_batches(packs, self.capacity, self.policy.device, rows=rows):
            yield part
            TURNS.offer()

    def add_micro_batches(self, parts: Iterable[Sequence[Pack]]) -> Totals:
        totals = Totals()
        for part in parts:
            loss, of_part = self.loss(part)
            loss.backward()  # type: ignore[no-untyped-call]
            totals += of_part
            PROGRESS.row(len(part))
        return totals

    @torch.no_grad()
    def measure_micro_batches(self, parts: Iterable[Sequence[Pack]]) -> Totals:
        totals = Totals()
        for part in parts:
            totals += self.loss(part)[1]
            PROGRESS.row(len(part))
        return totals

    def _prepare(self, packs: Sequence[Pack]) -> None:
        """Compute what the loss needs of the whole step."""
        if self.needs_z0:
            self.z0 = z0_of([self.sum_ratios(self.micro_batches(mismatched(packs)))])

    @property
    def needs_z0(self) -> bool:
        return self.settings.preference_loss == "kto"

    @torch.no_grad()
    def sum_ratios(self, parts: Iterable[Sequence[Pack]]) -> tuple[float, int]:
        """The sum of the log-ratios of all answers, and the number of answers."""
        total, count = 0.0, 0
        for part in parts:
            h_A = self._log_ratios(part)[0]
            total, count = total + h_A.sum().item(), count + len(h_A)
        return total, count

    def gather_along(self, missing: int) -> None:
        """Gather the layers of a sharded base for as many micro-batches of other ranks: compute, and add nothing.

        With gradients enabled their backward pass too.
        """
        for part in self._nothing(missing):
            loss, _ = self.loss(part)
            if torch.is_grad_enabled():
                (loss * 0.0).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def gather_along_ratios(self, missing: int) -> None:
        """As `gather_along`, for micro-batches of `sum_ratios`."""
        self.sum_ratios(self._nothing(missing))

    def _nothing(self, count: int) -> Iterator[list[Pack]]:
        for _ in range(count):
            yield from self.micro_batches([self.nothing])

    def _log_ratios(self, packs: Sequence[Pack]) -> tuple[Tensor, Tensors]:
        """log pi - log pi_ref of each answer, [A], summed over its tokens."""
        tensors = tensors_of(packs, self.policy.device)
        with torch.no_grad(), self.as_reference():
            ref_logp_M = predicted(self.policy, tensors)[0]
        logp_M = predicted(self.policy, tensors)[0]
        h_A = logp_M.new_zeros(int(tensors.answer_M.max()) + 1)
        return h_A.index_add(0, tensors.answer_M, logp_M - ref_logp_M), tensors

    def _kto(self, packs: Sequence[Pack]) -> tuple[Tensor, Totals]:
        settings = self.settings
        assert settings.beta is not None
        assert settings.desirable_weight is not None and settings.undesirable_weight is not None
        h_A, tensors = self._log_ratios(packs)
        if tensors.score_M is None:  # pairs: the preferred answer comes first
            is_desirable_A = torch.arange(len(h_A), device=h_A.device) % 2 == 0
        else:
            is_desirable_A = (
                tensors.score_M.new_zeros(len(h_A)).index_put((tensors.answer_M,), tensors.score_M) > 0
            )
        loss = preference.kto(
            h_A,
            is_desirable_A,
            beta=settings.beta,
            z0=self.z0,
            desirable_weight=settings.desirable_weight,
            undesirable_weight=settings.undesirable_weight,
        ).sum()
        reward_A = settings.beta * h_A.detach()
        totals = Totals(
            loss=loss.item(),
            tokens=len(tensors.target_M),
            sequences=len(h_A),
            answers=len(h_A),
            desirable=int(is_desirable_A.sum()),
            chosen=reward_A[is_desirable_A].sum().item(),
            rejected=reward_A[~is_desirable_A].sum().item(),
        )
        if tensors.score_M is None:
            correct = (reward_A[0::2] > reward_A[1::2]).sum().item()
            totals += Totals(pairs=len(h_A) // 2, correct=correct)
        return loss, totals

    def loss(self, packs: Sequence[Pack]) -> tuple[Tensor, Totals]:
        """The sum of the loss over a micro-batch, and its totals."""
        if self.settings.preference_loss == "kto":
            return self._kto(packs)
        tensors = tensors_of(packs, self.policy.device)
        if self.settings.preference_loss is None:
            logp_M, is_top_M = predicted(self.policy, tensors)
            loss = -logp_M.sum()
            correct = is_top_M.sum().item()
            return loss, Totals(
                loss=loss.item(), tokens=len(logp_M), correct=correct, sequences=sequences(packs)
            )
        ref_logp_M: Tensor | None = None
        if self.settings.has_reference:
            with torch.no_grad(), self.as_reference():
                ref_logp_M = predicted(self.policy, tensors)[0]
        logp_M = predicted(self.policy, tensors)[0]
        pairs = Pairs.of(logp_M, ref_logp_M, tensors.answer_M)
        loss = pair_loss(self.settings, pairs).sum()
        chosen_N, rejected_N = pair_rewards(self.settings, pairs)
        return loss, Totals(
            loss=loss.item(),
            tokens=len(logp_M),
            sequences=sequences(packs),
            pairs=len(chosen_N),
            correct=(chosen_N > rejected_N).sum().item(),
            chosen=chosen_N.sum().item(),
            rejected=rejected_N.sum().item(),
        )


def mismatched(packs: Sequence[Pack]) -> list[Pack]:
    """Each prompt with the answers of the next row, for z0 of the loss kto: TRL takes the same mismatches.

    Empty for one row, which the last step of an epoch may have.
    """
    if len(packs) < 2:
        return []
    return [
        Pack(pack.prompt_ids, other.sequences)
        for pack, other in zip(packs, [*packs[1:], packs[0]], strict=True)
    ]


def z0_of(sums: Sequence[tuple[float, int]]) -> float:
    """The mean log-ratio of mismatched answers, at least 0; 0 without any.

    Args:
        sums: results of `OfflineGradient.sum_ratios`.
    """
    count = sum(number for _, number in sums)
    return max(0.0, sum(total for total, _ in sums) / count) if count else 0.0


@dataclass(frozen=True)
class Pairs:
    """Sums over the answers of pairs, [N] each. `h` is the difference to the reference; None without one."""

    logp_chosen: Tensor
    logp_rejected: Tensor
    length_chosen: Tensor
    length_rejected: Tensor
    h_chosen: Tensor | None
    h_rejected: Tensor | None

    @classmethod
    def of(cls, logp_M: Tensor, ref_logp_M: Tensor | None, answer_M: Tensor) -> "Pairs":
        """Answers 0, 2, ... are the preferred ones, 1, 3, ... the others of the same pairs."""
        count = int(answer_M.max()) + 1

        def summed(values_M: Tensor) -> Tensor:
            return values_M.new_zeros(count).index_add(0, answer_M, values_M)

        sums, lengths = summed(logp_M), torch.bincount(answer_M, minlength=count)
        h = None if ref_logp_M is None else summed(logp_M - ref_logp_M)
        return cls(
            sums[0::2],
            sums[1::2],
            lengths[0::2],
            lengths[1::2],
            None if h is None else h[0::2],
            None if h is None else h[1::2],
        )


def pair_loss(settings: ResolvedOffline, pairs: Pairs) -> Tensor:
    """The loss of each pair, [N]."""
    beta = settings.beta
    assert beta is not None
    chosen, rejected = _compared(settings, pairs)
    match settings.preference_loss:
        case "sigmoid":
            return preference.dpo(chosen, rejected, beta=beta, label_smoothing=settings.label_smoothing)
        case "ipo":
            return preference.ipo(chosen, rejected, beta=beta)
        case "simpo":
            assert settings.gamma is not None
            return preference.simpo(chosen, rejected, beta=beta, gamma=settings.gamma)
        case "orpo":
            return preference.orpo(chosen, rejected, beta=beta)
        case "kto" | None:
            raise AssertionError("only losses of pairs have one")


@torch.no_grad()
def pair_rewards(settings: ResolvedOffline, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The implicit rewards of both answers, [N] each."""
    assert settings.beta is not None
    chosen, rejected = _compared(settings, pairs)
    return settings.beta * chosen.detach(), settings.beta * rejected.detach()


def _compared(settings: ResolvedOffline, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The numbers of both answers that the loss compares, [N] each."""
    if not settings.has_reference:
        return pairs.logp_chosen / pairs.length_chosen, pairs.logp_rejected / pairs.length_rejected
    assert pairs.h_chosen is not None and pairs.h_rejected is not None
    if settings.length_normalize:
        return pairs.h_chosen / pairs.length_chosen, pairs.h_rejected / pairs.length_rejected
    return pairs.h_chosen, pairs.h_rejected


def predicted(policy: Policy, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The log-probability [M] of each learned token, and whether it is the likeliest (bool [M], no gradient)."""
    hidden = policy.hidden(tensors.input_ids, tensors.position_ids, tensors.segment)
    logp_M, is_top_M = through_head(
        partial(_log_softmax, policy),
        hidden[tensors.row_M, tensors.column_M],
        tensors.target_M,
        None,
        _is_top,
        weights=policy.trained_head,
    )
    return logp_M, is_top_M


def _log_softmax(policy: Policy, hidden: Tensor, allowed: Tensor | None) -> Tensor:
    return policy.logits(hidden).log_softmax(-1)


def _is_top(logp: Tensor, target: Tensor) -> Tensor:
    return logp.argmax(-1) == target


def whole_batches(
    packs: Sequence[Pack], token_budget: int, device: torch.device | str = "cpu", *, rows: bool = False
) -> Iterator[list[Pack]]:
    """Yield batches of packs of similar length, each of at most `token_budget` tokens including padding.

    No pack is divided between batches; one above the budget gets its own.

    Args:
        rows: each sequence of a pack gets its own row.
    """
    units = [list(split(pack, 0)) if rows else [pack] for pack in packs]
    batch: list[Pack] = []
    for unit in sorted(units, key=lambda unit: max(part.tokens for part in unit)):
        # The newest unit is the longest, so it sets the width of the whole batch.
        width = row_width(max(part.tokens for part in unit), device)
        if batch and (len(batch) + len(unit)) * width > token_budget:
            yield batch
            batch = []
        batch += unit
    if batch:
        yield batch


def sequences(packs: Sequence[Pack]) -> int:
    return sum(len(pack.sequences) for pack in packs)
