"""AdamW on the weights of a value head, with the schedule of the adapter and another learning rate."""

import math
from typing import Any

import torch

from core.jobs.hyperparameters import Resolved
from worker.learn.optimizer import factor
from worker.model.value_head import ValueHead


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

    def step(self, divisor: float, steps_taken: int) -> bool:
        """Divide the gradient, clip its norm and take a step. Clears the gradient.

        Returns:
            False: the gradient is not finite, and no step was taken.
        """
        for weight in self.weights:
            if weight.grad is not None:
                weight.grad.div_(divisor)
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.settings.max_grad_norm).item()
        finite = math.isfinite(norm)
        if finite:
            settings = self.settings
            for group in self.adamw.param_groups:
                group["lr"] = self.learning_rate * factor(
                    steps_taken, settings.warmup_steps, settings.learning_rate_schedule, settings.total_steps
                )
            self.adamw.step()
        self.clear()
        return finite

    def clear(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return self.adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state)
