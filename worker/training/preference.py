"""Losses of pairs of answers: pure functions from log-probabilities to a loss, and what computes their arguments.

Sources: DPO is arXiv 2305.18290 (eq. 7), its conservative form with label smoothing is E. Mitchell's note on cDPO, IPO
is arXiv 2310.12036 (eq. 17), SimPO is arXiv 2405.14734, ORPO is arXiv 2403.07691 (eqs. 4, 6 and 7), KTO is arXiv
2402.01306 (eq. 8).

Axis `_N`: pairs. `h` is log pi(y|x) - log pi_ref(y|x), summed over the tokens of an answer; `logp` the sum without the
reference; `length` its tokens. Each function returns the loss of each pair, [N].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.model.batch import Tensors, tensors_of
from worker.model.token_logprobs import predicted, predicting
from worker.training.gradient import Gradient
from worker.training.loss import SHORTEST, Batch, GradientSums, StepValues
from worker.training.row_loss import RowLoss
from worker.types import Pack

# log(1 - p) of a probability that rounds to 1 would be -inf (ORPO).
_LARGEST_LOGP = -1e-6


def dpo(h_chosen: Tensor, h_rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigma(beta (h_w - h_l)), DPO eq. 7. With smoothing e: (1 - e) L(z) + e L(-z)."""
    z_N = beta * (h_chosen - h_rejected)
    return -(1 - label_smoothing) * logsigmoid(z_N) - label_smoothing * logsigmoid(-z_N)


def ipo(h_chosen: Tensor, h_rejected: Tensor, *, beta: float) -> Tensor:
    """(h_w - h_l - 1 / (2 tau))^2, IPO eq. 17; `beta` is its tau."""
    return (h_chosen - h_rejected - 1 / (2 * beta)) ** 2


def simpo(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float, gamma: float) -> Tensor:
    """-log sigma(beta (mean log p_w - mean log p_l) - gamma), the objective of SimPO."""
    return -logsigmoid(beta * (mean_chosen - mean_rejected) - gamma)


def orpo(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float) -> Tensor:
    """-mean log p_w - lambda log sigma(log odds_w - log odds_l), ORPO eqs. 6 and 7; `beta` is its lambda."""
    return -mean_chosen - beta * logsigmoid(_log_odds(mean_chosen) - _log_odds(mean_rejected))


def kto(
    h: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    z0: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO eq. 8: w_D (1 - sigma(beta (h - z0))) of desirable answers, and w_U (1 - sigma(beta (z0 - h))) of others.

    Args:
        h: of single answers, [A]; the result is [A] as well.
        desirable: bool [A].
        z0: an estimate of KL(pi || pi_ref) without a gradient: the mean of h of answers to other prompts, at least 0.
    """
    return torch.where(
        desirable,
        desirable_weight * torch.sigmoid(beta * (z0 - h)),
        undesirable_weight * torch.sigmoid(beta * (h - z0)),
    )


def _log_odds(mean_logp: Tensor) -> Tensor:
    """log(P / (1 - P)) of P = exp(mean log p), ORPO eq. 4."""
    capped = mean_logp.clamp(max=_LARGEST_LOGP)
    return capped - torch.log1p(-capped.exp())


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
            return dpo(chosen, rejected, beta=beta, label_smoothing=settings.label_smoothing)
        case "ipo":
            return ipo(chosen, rejected, beta=beta)
        case "simpo":
            assert settings.gamma is not None
            return simpo(chosen, rejected, beta=beta, gamma=settings.gamma)
        case "orpo":
            return orpo(chosen, rejected, beta=beta)
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


class PairLoss(RowLoss):
    """The sum over pairs. A pack has both answers, the preferred one first."""

    @property
    def filler(self) -> Pack:
        return Pack((0, 0), (SHORTEST, SHORTEST))

    def __call__(self, batch: Batch, values: StepValues) -> tuple[Tensor, GradientSums]:
        tensors = tensors_of(batch.packs, self.policy.device)
        ref_logp_M: Tensor | None = None
        if self.settings.has_reference:
            with torch.no_grad(), self.as_reference():
                ref_logp_M = predicted(self.policy, predicting(self.policy, tensors), tensors)[0]
        logp_M = self.predicted(batch, tensors)[0]
        pairs = Pairs.of(logp_M, ref_logp_M, tensors.answer_M)
        loss = pair_loss(self.settings, pairs).sum()
        chosen_N, rejected_N = pair_rewards(self.settings, pairs)
        return loss, GradientSums(
            loss=loss.item(),
            tokens=len(logp_M),
            sequences=batch.sequences,
            pairs=len(chosen_N),
            correct=(chosen_N > rejected_N).sum().item(),
            chosen=chosen_N.sum().item(),
            rejected=rejected_N.sum().item(),
        )


class KtoLoss(PairLoss):
    """The sum over answers, of pairs or of rows with a label."""

    def step_values(self, gradient: Gradient, packs: Sequence[Pack]) -> StepValues:
        return StepValues(z0=z0_of(gradient.of_packs(KtoLoss.sum_ratios, mismatched(packs))))

    def sum_ratios(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """The sum of the log-ratios of all answers, and the number of answers."""
        total, count = 0.0, 0
        for batch in batches:
            h_A = self._log_ratios(batch)[0]
            if not batch.is_filler:
                total, count = total + h_A.sum().item(), count + len(h_A)
        return total, count

    def _log_ratios(self, batch: Batch) -> tuple[Tensor, Tensors]:
        """log pi - log pi_ref of each answer, [A], summed over its tokens."""
        tensors = tensors_of(batch.packs, self.policy.device)
        with torch.no_grad(), self.as_reference():
            ref_logp_M = predicted(self.policy, predicting(self.policy, tensors), tensors)[0]
        logp_M = self.predicted(batch, tensors)[0]
        h_A = logp_M.new_zeros(int(tensors.answer_M.max()) + 1)
        return h_A.index_add(0, tensors.answer_M, logp_M - ref_logp_M), tensors

    def __call__(self, batch: Batch, values: StepValues) -> tuple[Tensor, GradientSums]:
        settings = self.settings
        assert settings.beta is not None
        assert settings.desirable_weight is not None and settings.undesirable_weight is not None
        h_A, tensors = self._log_ratios(batch)
        if tensors.score_M is None:  # pairs: the preferred answer comes first
            is_desirable_A = torch.arange(len(h_A), device=h_A.device) % 2 == 0
        else:
            is_desirable_A = (
                tensors.score_M.new_zeros(len(h_A)).index_put((tensors.answer_M,), tensors.score_M) > 0
            )
        loss = kto(
            h_A,
            is_desirable_A,
            beta=settings.beta,
            z0=values.z0,
            desirable_weight=settings.desirable_weight,
            undesirable_weight=settings.undesirable_weight,
        ).sum()
        reward_A = settings.beta * h_A.detach()
        sums = GradientSums(
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
            sums += GradientSums(pairs=len(h_A) // 2, correct=correct)
        return loss, sums


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
        sums: results of `KtoLoss.sum_ratios`.
    """
    count = sum(number for _, number in sums)
    return max(0.0, sum(total for total, _ in sums) / count) if count else 0.0
