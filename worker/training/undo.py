"""Undo a step of AdamW: the weights and the moments of before it.

An adapter is copied before the step, so it is restored bit for bit. A copy of all weights of a model with their moments
would take 12 bytes a parameter, so their step is inverted: weights and moments return up to the rounding of float32,
the same in every run.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

MOMENTS = ("exp_avg", "exp_avg_sq")


class Copies:
    """The weights of an optimizer with their moments, as they are now, in main memory: the memory plan of a GPU has
    no room for them."""

    def __init__(self, adamw: torch.optim.AdamW) -> None:
        self._adamw = adamw
        self._weights = [
            (one, one.detach().to("cpu", copy=True))
            for group in adamw.param_groups
            for one in group["params"]
        ]
        self._states = {
            weight: {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
            for weight, state in adamw.state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Restore them. May be called more than once."""
        for weight, before in self._weights:
            weight.copy_(before)
            if weight not in self._states:
                self._adamw.state.pop(weight, None)
                continue
            for name, tensor in self._states[weight].items():
                self._adamw.state[weight][name].copy_(tensor)


@torch.no_grad()
def invert(adamw: torch.optim.AdamW) -> None:
    """Invert the newest step, whose gradients and learning rate are still there.

    AdamW's step t (arXiv 1711.05101, algorithm 2) is w' = w (1 - lr wd) - lr m_hat / (sqrt(v_hat) + eps), with
    m' = b1 m + (1 - b1) g, m_hat = m' / (1 - b1^t), v' = b2 v + (1 - b2) g^2 and v_hat = v' / (1 - b2^t).
    """
    for group in adamw.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                _invert(weight, weight.grad, adamw.state[weight], group)
                if adamw.state[weight]["step"] == 0:
                    del adamw.state[weight]


def _invert(weight: Parameter, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    taken, rate = state["step"].item(), group["lr"]
    mean, square = (state[name] for name in MOMENTS)
    divisor = (square / (1 - beta2**taken)).sqrt_().add_(group["eps"])
    weight.addcdiv_(mean, divisor, value=rate / (1 - beta1**taken)).div_(1 - rate * group["weight_decay"])
    mean.sub_(gradient, alpha=1 - beta1).div_(beta1)
    square.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2).clamp_(min=0)  # rounding may leave less
    state["step"] -= 1
