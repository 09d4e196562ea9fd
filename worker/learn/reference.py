"""The model that a KL penalty or a preference loss compares the policy with."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from worker.learn.world import World
from worker.model.policy import Policy


class WithReference:
    """A gradient whose loss may compare the policy with a reference.

    `reference` has the adapter of the reference, or all of its weights if all weights are trained. It is None if the
    reference is the base model, or if the loss has no reference.
    """

    def __init__(self, policy: Policy, *, has_reference: bool) -> None:
        self.policy = policy
        self.reference: list[Tensor] | None = None
        if has_reference and not policy.has_base:
            self.reference = policy.snapshot()
        self._loaded = self.reference

    @property
    def changed_reference(self) -> list[Tensor] | None:
        """The reference, unless it is the model as it was loaded."""
        return None if self.reference is self._loaded else self.reference

    def change_reference(self, weights: Sequence[Tensor] | None) -> None:
        """Compare with these weights; None: with the model as it was loaded."""
        self.reference = self._loaded if weights is None else [one.to(self.policy.device) for one in weights]

    def broadcast_reference(self, world: World) -> None:
        """Send the reference of rank 0 to the other ranks, which call this as well."""
        if self.reference is None:
            self.reference = [torch.zeros_like(parameter) for parameter in self.policy.trainable]
        world.broadcast(self.reference)

    def as_reference(self) -> AbstractContextManager[None]:
        """Compute as the reference during the context."""
        return self.policy.as_base() if self.reference is None else self.policy.wearing(self.reference)
