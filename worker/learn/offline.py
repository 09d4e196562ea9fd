"""Learn from given answers: the gradients of supervised and preference losses, and their trainer.

Both losses are sums over a step, divided once by what they count: learned tokens (supervised), pairs (preference) or
answers (the loss kto).
Each supervised row is a pack with one sequence, of which `learned_T` says what is learned. Each pair of answers is a
pack with two sequences, the preferred one first; both are always in one micro-batch, because the loss couples them.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.learn import preference
from worker.learn.batch import Tensors, row_width, split, tensors_of
from worker.learn.gradient import through_head
from worker.learn.optimizer import AdapterOptimizer
from worker.learn.totals import Totals
from worker.model.policy import Policy
from worker.progress import PROGRESS
from worker.refusals import InvalidModel
from worker.sharing.turns import TURNS
from worker.types import Pack


@dataclass(frozen=True)
class OfflineMetrics:
    """Statistics of a step or of a validation; before the update of the step."""

    loss: float
    tokens: int  # that are learned
    sequences: int
    token_accuracy: float | None = None  # supervised: share of tokens that the model thinks likeliest
    # Preference; `reward` is beta h, or beta times the mean log-probability for losses without a reference.
    reward_accuracy: float | None = None  # share of pairs in which the preferred answer has more
    reward_margin: float | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    grad_norm: float | None = None
    skipped: bool = False  # the gradient was not finite, so the step was not taken

    @classmethod
    def of(cls, totals: Totals, *, grad_norm: float | None = None, skipped: bool = False) -> "OfflineMetrics":
        measured = cls(totals.loss / totals.counted, totals.tokens, totals.sequences)
        measured = replace(measured, grad_norm=grad_norm, skipped=skipped)
        if totals.answers and not totals.pairs:
            others = totals.answers - totals.desirable
            chosen = totals.chosen / totals.desirable if totals.desirable else None
            rejected = totals.rejected / others if others else None
            return replace(measured, chosen_reward=chosen, rejected_reward=rejected)
        if not totals.pairs:
            return replace(measured, token_accuracy=totals.correct / totals.tokens)
        return replace(
            measured,
            reward_accuracy=totals.correct / totals.pairs,
            reward_margin=(totals.chosen - totals.rejected) / totals.pairs,
            chosen_reward=totals.chosen / totals.pairs,
            rejected_reward=totals.rejected / totals.pairs,
        )


class OfflineGradient:
    """Accumulates the gradient of packs on the adapter's weights, micro-batch by micro-batch."""

    def __init__(self, policy: Policy, settings: ResolvedOffline, *, token_budget: int) -> None:
        self.policy = policy
        self.settings = settings
        self.capacity = token_budget
        # The adapter of the preference loss's reference, unless the reference is the base model.
        self.reference: list[Tensor] | None = None
        self.z0 = 0.0  # of the loss kto

    def add(self, packs: Sequence[Pack]) -> Totals:
        """Add the gradient of the summed loss of these packs, and return its totals."""
        totals = Totals()
        self._prepare(packs)
        for part in self._micro_batches(packs):
            loss, of_part = self.loss(part)
            loss.backward()  # type: ignore[no-untyped-call]
            totals += of_part
            PROGRESS.row(len(part))
        return totals

    def measure(self, packs: Sequence[Pack]) -> Totals:
        """The totals of these packs, without a gradient."""
        with torch.no_grad():
            self._prepare(packs)
            totals = Totals()
            for part in self._micro_batches(packs):
                totals += self.loss(part)[1]
                PROGRESS.row(len(part))
            return totals

    def _micro_batches(self, packs: Sequence[Pack]) -> Iterator[list[Pack]]:
        rows = self.policy.route.forward == "rows"
        for part in whole_batches(packs, self.capacity, self.policy.device, rows=rows):
            yield part
            TURNS.offer()

    def _prepare(self, packs: Sequence[Pack]) -> None:
        """Compute what the loss needs of the whole step.

        For kto it is z0: each prompt gets the answers of the next row. TRL takes the same mismatches.
        """
        if self.settings.preference_loss != "kto":
            return
        self.z0 = 0.0
        if len(packs) < 2:  # the last step of an epoch may have one row
            return
        mismatched = [
            Pack(pack.prompt_ids, other.sequences)
            for pack, other in zip(packs, [*packs[1:], packs[0]], strict=True)
        ]
        with torch.no_grad():
            parts = [self._log_ratios(part) for part in self._micro_batches(mismatched)]
        self.z0 = max(0.0, torch.cat([h_A for h_A, _ in parts]).mean().item())

    def _log_ratios(self, packs: Sequence[Pack]) -> tuple[Tensor, Tensors]:
        """log pi - log pi_ref of each answer, [A], summed over its tokens."""
        tensors = tensors_of(packs, self.policy.device)
        with torch.no_grad(), self._as_reference():
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

    def _as_reference(self) -> AbstractContextManager[None]:
        return self.policy.as_base() if self.reference is None else self.policy.wearing(self.reference)

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
            with torch.no_grad(), self._as_reference():
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


def optimizer_of(
    policy: Policy, settings: ResolvedOffline, head: Sequence[torch.nn.Parameter] = ()
) -> AdapterOptimizer:
    return AdapterOptimizer(
        policy,
        learning_rate=settings.learning_rate,
        betas=(0.9, 0.999),
        max_grad_norm=settings.max_grad_norm,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        schedule=settings.schedule,
        total_steps=settings.total_steps,
        head=head,
    )


class OfflineTrainer:
    """AdamW on the adapter's float32 weights, the base frozen."""

    def __init__(
        self,
        policy: Policy,
        settings: ResolvedOffline,
        *,
        token_budget: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`beat` is called after each step, and after each part of a validation."""
        self.policy = policy
        self.gradient = OfflineGradient(policy, settings, token_budget=token_budget)
        self.optimizer = optimizer_of(policy, settings)
        self.steps_taken = 0
        self.beat = beat

    @TURNS
    def step(self, packs: Sequence[Pack]) -> OfflineMetrics:
        """One update with these rows."""
        totals = self.gradient.add(packs)
        norm = self.optimizer.step(totals.counted, self.steps_taken)
        self.steps_taken += 1  # also of a skipped step, so that the schedule depends on the step alone
        self.beat()
        return self.metrics(totals, grad_norm=norm, skipped=norm is None)

    @TURNS
    def measure(self, packs: Sequence[Pack]) -> OfflineMetrics:
        """The metrics of these rows under the current policy."""
        totals = Totals()
        for first in range(0, len(packs), 64):
            totals += self.gradient.measure(packs[first : first + 64])
            self.beat()
        return self.metrics(totals)

    def metrics(self, totals: Totals, **update: Any) -> OfflineMetrics:
        return OfflineMetrics.of(totals, **update)

    def start_from_policy(self) -> None:
        """Take the current adapter for the reference, in place of the base model."""
        self.gradient.reference = [parameter.detach().clone() for parameter in self.policy.trainable]

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        state: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "steps_taken": self.steps_taken,
            "reference": self.gradient.reference,
        }
        torch.save(state, folder / "trainer.pt")

    def load(self, folder: Path) -> None:
        self.policy.load(folder)
        try:
            state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as cause:
            raise InvalidModel(f"The optimizer's state in the checkpoint cannot be read: {cause}") from cause
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_taken = state["steps_taken"]
        reference = state["reference"]
        self.gradient.reference = (
            None if reference is None else [tensor.to(self.policy.device) for tensor in reference]
        )
