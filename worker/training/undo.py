"""Undo a step of AdamW: the weights and the moments of before it, bit for bit, of an adapter or of a whole model.

AdamW's step cannot be inverted: its second moment rounds away what was there before a gradient that is much larger.
"""

import torch


class Copies:
    """The weights of an optimizer with their moments, as they are now, in main memory: 12 bytes a weight, for which the
    memory plan of a GPU has no room. Neither the copy nor `restore` allocates memory of the GPU."""

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
