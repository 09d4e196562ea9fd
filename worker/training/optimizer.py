"""AdamW on the weights that are trained, with the schedule of its learning rate."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from core.jobs.hyperparameter_groups import LearningRateSchedule
from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from worker.model.policy import Policy
from worker.model.sharded_full import ShardedFullPolicy
from worker.model.value_head import ValueHead
from worker.training.undo import Copies
from worker.training.world import World

# Of AdamW in reinforcement, without weight decay: what RL with LoRA converged on (a second moment of 0.95 forgets in
# about 20 steps).
BETAS = (0.9, 0.95)
# Of the learning rate at the end of a cosine.
COSINE_FLOOR = 0.1


class AdapterOptimizer:
    """Takes steps along the gradients that lie on the trained weights of a policy."""

    def __init__(
        self,
        policy: Policy,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        max_grad_norm: float,
        warmup_steps: int,
        weight_decay: float = 0.0,
        schedule: LearningRateSchedule = "constant",
        total_steps: int = 0,
        head: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        """`head`: weights beside the policy's that are trained with them."""
        self.policy = policy
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.warmup_steps = warmup_steps
        self.schedule: LearningRateSchedule = schedule
        self.total_steps = total_steps  # of the schedule
        self.head = head
        self._copies: Copies | None = None
        self.adamw = torch.optim.AdamW(
            self._groups(),
            lr=learning_rate,
            betas=betas,
            weight_decay=weight_decay,
            # One kernel without temporary tensors as large as all weights.
            fused=None if policy.has_base else True,
        )

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [*self.policy.trainable, *self.head]

    def _groups(self) -> list[dict[str, Any]]:
        """All weights of an adapter; of a whole model the matrices, and norms and biases, which do not decay."""
        if self.policy.has_base:
            return [{"params": self.trained}]
        matrices = [one for one in self.trained if one.dim() > 1]
        others = [one for one in self.trained if one.dim() <= 1]
        return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]

    def prepare(self, divisor: float) -> float | None:
        """Divide the gradient and clip its norm.

        Returns:
            The norm before clipping. None: it is not finite, and the gradient is cleared.
        """
        self.policy.drop_left_out()
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        for part in self.policy.frozen_parts(lambda weight: weight.grad):
            part.zero_()
        norm = self._clip()
        if not math.isfinite(norm):
            self.clear()
            return None
        return norm

    def _clip(self) -> float:
        """Clip the norm of the gradient, and return the one that it had."""
        return torch.nn.utils.clip_grad_norm_(self.trained, self.max_grad_norm).item()

    def descend(self, steps_taken: int, rate: float) -> float:
        """Take a step along the gradient as it is, with this share of the scheduled learning rate, and return that."""
        scheduled = factor(steps_taken, self.warmup_steps, self.schedule, self.total_steps)
        learning_rate = self.learning_rate * scheduled * rate
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        frozen = [(part, part.clone()) for part in self.policy.frozen_parts(lambda weight: weight.data)]
        self.adamw.step()
        for part, before in frozen:  # weight decay moves weights without a gradient
            part.copy_(before)
        self.policy.follow_trainable()
        return learning_rate

    def keep(self) -> None:
        """Prepare for `restore`."""
        self._copies = Copies(self.adamw)

    def restore(self) -> None:
        """Undo the step since `keep`: weights and moments. The gradient stays."""
        assert self._copies is not None, "`keep` comes first"
        self._copies.restore()
        self.policy.follow_trainable()

    def clear(self) -> None:
        """Drop the gradient, and what `keep` has kept."""
        self.adamw.zero_grad(set_to_none=True)
        self._copies = None

    def state_dict(self) -> dict[str, Any]:
        return self.adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state)


class PartsOptimizer(AdapterOptimizer):
    """Takes a step with the part of the weights that this rank has, as all ranks do together."""

    def __init__(self, policy: ShardedFullPolicy, world: World, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.sharded, self.world = policy, world

    def _clip(self) -> float:
        """The norm is that of all parts together: a collective operation."""
        parts, replicated = (
            [one.grad for one in weights if one.grad is not None]
            for weights in (self.sharded.parts, self.sharded.replicated)
        )
        square = torch.stack([one.square().sum() for one in parts]).sum() if parts else torch.zeros(())
        [square] = self.world.sum([square.to(self.policy.device)])
        for one in replicated:
            square += one.square().sum()
        norm = square.sqrt()
        for one in [*parts, *replicated]:
            one.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))  # as clip_grad_norm_
        return norm.item()


def optimizer_of(
    policy: Policy,
    settings: Resolved | ResolvedOffline,
    world: World | None = None,
    head: Sequence[torch.nn.Parameter] = (),
) -> AdapterOptimizer:
    """The optimizer of a job. Args: `head` as in AdapterOptimizer; `world`, of which each rank may have a part."""
    arguments: dict[str, Any] = {
        "learning_rate": settings.learning_rate,
        "max_grad_norm": settings.max_grad_norm,
        "warmup_steps": settings.warmup_steps,
    }
    if isinstance(settings, Resolved):
        arguments |= {
            "betas": BETAS,
            "schedule": settings.learning_rate_schedule,
            "total_steps": settings.total_steps - settings.waits,
        }
    else:
        arguments |= {
            "betas": (0.9, 0.999),
            "weight_decay": settings.weight_decay,
            "schedule": settings.schedule,
            "total_steps": settings.total_steps,
        }
    if isinstance(policy, ShardedFullPolicy):
        assert world is not None and not head, "sharded weights are those of a model without a head of ours"
        return PartsOptimizer(policy, world, **arguments)
    return AdapterOptimizer(policy, head=head, **arguments)


def factor(steps_taken: int, warmup_steps: int, schedule: LearningRateSchedule, total_steps: int) -> float:
    """The learning rate of the next step as a share of the full one.

    Warm-up goes up in a line and reaches 1 at step `warmup_steps`. Then linear goes down to 0 after the last step, and
    cosine to COSINE_FLOOR.
    """
    if steps_taken < warmup_steps:
        return (steps_taken + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = (steps_taken - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "linear":
        return max(0.0, 1.0 - done)
    return COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * min(1.0, done))) / 2


class ValueOptimizer:
    """Takes steps along the gradients that lie on the head's weights.

    Its gradient is clipped by itself: in one norm with the adapter's, large errors of the values would silence the
    policy.
    """

    def __init__(self, head: ValueHead, settings: Resolved, betas: tuple[float, float]) -> None:
        assert settings.value_learning_rate is not None, "only jobs with a value head have one"
        self.weights = list(head.parameters())
        self.settings = settings
        self.learning_rate = settings.value_learning_rate
        self.adamw = torch.optim.AdamW(self.weights, lr=self.learning_rate, betas=betas, weight_decay=0.0)

    def prepare(self, divisor: float) -> bool:
        """Divide the gradient and clip its norm.

        Returns:
            False: the gradient is not finite, and is cleared.
        """
        for weight in self.weights:
            if weight.grad is not None:
                weight.grad.div_(divisor)
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.settings.max_grad_norm).item()
        if not math.isfinite(norm):
            self.clear()
            return False
        return True

    def descend(self, steps_taken: int) -> None:
        """Take a step along the gradient as it is, and clear it."""
        settings = self.settings
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate * factor(
                steps_taken, settings.warmup_steps, settings.learning_rate_schedule, settings.total_steps
            )
        self.adamw.step()
        self.clear()

    def clear(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return self.adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state)
