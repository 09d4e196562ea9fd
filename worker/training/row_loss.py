"""Losses of given answers, the rows of a file. Supervised is the plainest.

A row is a pack: with one sequence, of which `learned_T` says what is learned, or with the two answers of a pair.
"""

from collections.abc import Sequence

from torch import Tensor

from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.model.batch import Tensors, tensors_of
from worker.model.policy import Policy
from worker.model.token_logprobs import predicted, predicting
from worker.training.gradient import Gradient
from worker.training.loss import Batch, GradientSums, Loss, StepValues
from worker.types import Pack


class RowLoss(Loss):
    """A loss of given answers. A step divides it by what it counts (`GradientSums.counted`)."""

    def __init__(self, policy: Policy, settings: ResolvedOffline) -> None:
        super().__init__(policy, has_reference=settings.has_reference)
        self._settings = settings

    @property
    def settings(self) -> ResolvedOffline:
        return self._settings

    def predicted(self, batch: Batch, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """As `token_logprobs.predicted`. The hidden states are kept for the KL of the update."""
        hidden = predicting(self.policy, tensors)
        self.keep_output(batch, hidden)
        return predicted(self.policy, hidden, tensors)

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
