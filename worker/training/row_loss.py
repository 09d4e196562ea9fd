"""Losses of given answers, the rows of a file. Supervised is the plainest.

A row is a pack: with one sequence, of which `learned_T` says what is learned, or with the two answers of a pair.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.model.batch import Tensors, tensors_of
from worker.model.policy import Policy
from worker.model.sizing import HEAD_CHUNK
from worker.model.token_logprobs import predicted, predicting
from worker.training.gradient import Gradient
from worker.training.loss import Batch, GradientSums, Loss, StepValues, first_packs
from worker.training.top_kl import forward_kl_to_top
from worker.types import Pack, TopTokens

# Of the rows on which the KL of an update is measured: over all tokens, so a few positions suffice.
MEASURED_TOKENS = 256
TOP = 64  # tokens that it compares one by one; the others count as one


class RowLoss(Loss):
    """A loss of given answers. A step divides it by what it counts (`GradientSums.counted`)."""

    def __init__(self, policy: Policy, settings: ResolvedOffline) -> None:
        super().__init__(policy, has_reference=settings.has_reference)
        self._settings = settings

    @property
    def settings(self) -> ResolvedOffline:
        return self._settings

    def predicted(self, batch: Batch, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """As `token_logprobs.predicted`. The hidden states of the first positions are kept."""
        hidden = predicting(self.policy, tensors)
        self.keep_hidden(batch, hidden)
        return predicted(self.policy, hidden, tensors)

    def keep_hidden(self, batch: Batch, hidden: Tensor) -> None:
        if self.settings.step_kl:
            batch.before = hidden[:MEASURED_TOKENS].detach().clone()

    def keep_prediction(self, batch: Batch) -> None:
        """Keep the likeliest tokens, by the head of before the update: it may be trained too."""
        assert batch.before is not None
        logprobs = (logits.log_softmax(-1) for logits in self._logits(batch.before))
        tops = [one.topk(min(TOP, one.shape[-1] - 1)) for one in logprobs]
        batch.top = TopTokens(
            torch.cat([one.indices for one in tops]), torch.cat([one.values for one in tops])
        )

    def kl_from_before(self, batch: Batch) -> float:
        """Over all tokens of the vocabulary: the policy has not sampled those of the rows, so k3 has no meaning."""
        tensors = tensors_of(first_packs(batch, MEASURED_TOKENS).packs, self.policy.device)
        assert batch.top is not None, "`keep_prediction` comes first"
        after = predicting(self.policy, tensors)[: len(batch.top.ids)]
        ids, logprobs = (
            torch.split(each[: len(after)], HEAD_CHUNK) for each in (batch.top.ids, batch.top.logprobs)
        )
        kls = [forward_kl_to_top(*one) for one in zip(self._logits(after), ids, logprobs, strict=True)]
        return torch.cat(kls).mean().item()

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        return (self.policy.logits(part) for part in torch.split(hidden, HEAD_CHUNK))

    def step_values(self, gradient: Gradient, packs: Sequence[Pack]) -> StepValues:
        """Compute what the loss needs of the whole step."""
        return StepValues()


class SupervisedLoss(RowLoss):
    """-log p, summed over the learned tokens."""

    def __call__(self, batch: Batch, values: StepValues) -> tuple[Tensor, GradientSums]:
        logp_M, is_top_M = self.predicted(batch, tensors_of(batch.packs, self.policy.device))
        loss = -logp_M.sum()
        return loss, GradientSums(
            loss=loss.item(),
            tokens=len(logp_M),
            correct=is_top_M.sum().item(),
            sequences=batch.sequences,
        )
