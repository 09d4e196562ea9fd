"""The objective of each `loss.type`. A new one has a file beside the others, and a line here."""

from collections.abc import Mapping

from core.jobs.hyperparameter_groups import Loss
from core.jobs.hyperparameters import Resolved
from worker.training.objective import Objective
from worker.training.objectives.cispo import CispoObjective
from worker.training.objectives.clipped import ClippedObjective, DrGrpoObjective, GrpoObjective
from worker.training.objectives.dppo import DppoObjective
from worker.training.objectives.gspo import GspoObjective
from worker.training.objectives.rloo import RlooObjective

OBJECTIVES: Mapping[Loss, type[Objective]] = {
    "grpo": GrpoObjective,
    "dr_grpo": DrGrpoObjective,
    "bnpo": ClippedObjective,
    "dapo": ClippedObjective,
    "dppo": DppoObjective,
    "cispo": CispoObjective,
    "gspo": GspoObjective,
    "rloo": RlooObjective,
    "reinforce_plus_plus": ClippedObjective,
    "ppo": ClippedObjective,
}


def objective_of(settings: Resolved) -> Objective:
    """Return the objective of a job, with its bounds."""
    return OBJECTIVES[settings.loss].of(settings)
