"""The loss of each method. A new one has a class beside the others, and a line here."""

from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.model.policy import Policy
from worker.model.reward_head import RewardHead
from worker.training.loss import Loss
from worker.training.policy_loss import PolicyLoss
from worker.training.preference import KtoLoss, PairLoss
from worker.training.reward import RewardLoss
from worker.training.row_loss import RowLoss, SupervisedLoss
from worker.training.soft_targets import SoftTargetLoss
from worker.training.teacher import TeacherPolicy


def loss_of(
    policy: Policy,
    settings: Resolved | ResolvedOffline,
    *,
    response_schema: str = "",
    teacher: TeacherPolicy | None = None,
) -> Loss:
    """The loss of a job.

    Args:
        response_schema: of the sampler.
        teacher: in memory, whose probabilities are learned.
    """
    if isinstance(settings, Resolved):
        return PolicyLoss(policy, settings, response_schema=response_schema)
    return row_loss_of(policy, settings, teacher)


def row_loss_of(policy: Policy, settings: ResolvedOffline, teacher: TeacherPolicy | None = None) -> RowLoss:
    """The loss of a job that learns from the rows of its file."""
    if settings.soft_temperature is not None:
        return SoftTargetLoss(policy, teacher, settings)
    if settings.reward_kind is not None:
        return RewardLoss(policy, RewardHead(policy.hidden_size, policy.device), settings)
    match settings.preference_loss:
        case None:
            return SupervisedLoss(policy, settings)
        case "kto":
            return KtoLoss(policy, settings)
        case _:
            return PairLoss(policy, settings)
