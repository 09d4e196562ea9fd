"""The critic of PPO: from the hidden state that predicts a token to the value of the answer so far."""

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """A float32 weight and a bias on the policy's last hidden states. They start at zero, so that all values are 0.

    In float32 whatever the precision of the model: values between 0.5 and 1 are 0.004 apart in bfloat16, as much as the
    differences that advantages are made of.
    """

    def __init__(self, width: int, device: torch.device | str, *, adapter_weight: float) -> None:
        """`adapter_weight` multiplies the gradient of the hidden states (c1 of PPO eq. 9), not that of the head."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))
        self.adapter_weight = adapter_weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [M, h] -> values [M]."""
        hidden = hidden.float()
        if self.adapter_weight != 1.0:
            # The same numbers, with a part of their gradient.
            hidden = hidden.detach() + self.adapter_weight * (hidden - hidden.detach())
        return hidden @ self.weight + self.bias
