"""Compute the gradient of given answers on all ranks of a world, as worker/learn/distributed.py does for sampled ones.

Rank 0 distributes the rows of a step or of a validation; a pair of answers stays on one rank. Everything else is as
there: the weights are replicated in float32, one all-reduce adds up the gradients, and only rank 0 has an optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Literal

import torch
from torch import Tensor

from worker.learn.deal import deal_whole
from worker.learn.offline_gradient import OfflineGradient, mismatched, z0_of
from worker.learn.reward import RewardGradient
from worker.learn.soft_targets import SoftTargetGradient
from worker.learn.totals import Totals
from worker.learn.trained import sum_gradients
from worker.learn.world import World
from worker.model.sharded_full import ShardedFullPolicy
from worker.progress import PROGRESS
from worker.types import Pack


@dataclass(frozen=True)
class ReceiveWeights:
    """Receive what is trained, or the adapter of the loss's reference or of the teacher."""

    of: Literal["trained", "reference", "teacher"]


@dataclass(frozen=True)
class AddRows:
    """Add up the gradient of these rows, and that of all ranks on rank 0."""

    packs: Sequence[Pack]
    z0: float


@dataclass(frozen=True)
class MeasureRows:
    packs: Sequence[Pack]
    z0: float


@dataclass(frozen=True)
class SumRatios:
    packs: Sequence[Pack]


@dataclass(frozen=True)
class RewardRows:
    packs: Sequence[Pack]


OfflineOrder = ReceiveWeights | AddRows | MeasureRows | SumRatios | RewardRows


class DistributedOffline:
    """Computes as an OfflineGradient does, over all ranks; this process is rank 0.

    The result equals that of one process, up to the order of float32 additions.
    """

    def __init__(self, own: OfflineGradient, world: World) -> None:
        self.own = own
        self.world = world
        self._has_weights = False  # whether all ranks have what rank 0 has trained
        self._fixed: dict[str, list[Tensor]] = {}  # adapters that all ranks have and that are not trained

    def add(self, packs: Sequence[Pack]) -> Totals:
        """Add the gradient of the summed loss of these packs, and return its totals."""
        z0 = self._z0(packs)
        hands = self._hands(packs)
        totals = self._order([AddRows(hand, z0) for hand in hands])
        self._has_weights = False  # the caller updates them
        return self._sum(totals, hands)

    def measure(self, packs: Sequence[Pack]) -> Totals:
        """The totals of these packs, without a gradient."""
        z0 = self._z0(packs)
        hands = self._hands(packs)
        return self._sum(self._order([MeasureRows(hand, z0) for hand in hands]), hands)

    def rewards(self, packs: Sequence[Pack]) -> Tensor:
        """The rewards of all answers, in no order."""
        return torch.cat(self._order([RewardRows(hand) for hand in self._hands(packs)]))

    def _z0(self, packs: Sequence[Pack]) -> float:
        if not self.own.needs_z0:
            return 0.0
        return z0_of(self._order([SumRatios(hand) for hand in self._hands(mismatched(packs))]))

    def _hands(self, packs: Sequence[Pack]) -> list[list[Pack]]:
        """The packs of each rank."""
        return deal_whole(packs, self.world.size, rows=self.own.policy.route.forward == "rows")

    @staticmethod
    def _sum(totals: Sequence[Totals], hands: Sequence[Sequence[Pack]]) -> Totals:
        PROGRESS.row(sum(map(len, hands[1:])))  # rank 0 has counted its own
        return reduce(add, totals)

    def _order(self, orders_R: Sequence[OfflineOrder]) -> list[Any]:
        with self.world.giving():
            self._share_weights()
            return self._give(orders_R)

    def _share_weights(self) -> None:
        own = self.own
        # Each rank has its own part of the reference if it trains a part of the weights.
        parts = isinstance(own.policy, ShardedFullPolicy)
        fixed = {"reference": own.reference if own.settings.has_reference and not parts else None}
        if isinstance(own, SoftTargetGradient) and own.teacher is not None:
            fixed["teacher"] = own.teacher.adapter
        for name in ("reference", "teacher"):
            weights = fixed.get(name)
            if weights is not None and weights is not self._fixed.get(name):
                self._give([ReceiveWeights(name)] * self.world.size)
                self._fixed[name] = weights
        if not self._has_weights:
            self._give([ReceiveWeights("trained")] * self.world.size)
            self._has_weights = True

    def _give(self, orders_R: Sequence[OfflineOrder]) -> list[Any]:
        self.world.give(orders_R)
        return carry_out(orders_R[0], self.own, self.world)


def carry_out(order: OfflineOrder, own: OfflineGradient, world: World) -> list[Any]:
    """Do what all ranks do together, and return their results on rank 0.

    A forward or backward pass of a sharded base is a collective operation, so all ranks compute as many of each kind:
    the one with the fewest micro-batches fills up with passes that add nothing.
    """
    match order:
        case ReceiveWeights("trained"):
            world.broadcast(own.trainable)
            if world.rank > 0:  # those of rank 0 are the same as before
                own.policy.follow_trainable()
            return []
        case ReceiveWeights("reference"):
            own.broadcast_reference(world)
            return []
        case ReceiveWeights():
            assert isinstance(own, SoftTargetGradient)
            assert own.teacher is not None and own.teacher.adapter is not None
            world.broadcast(own.teacher.adapter)
            return []
    parts = list(own.micro_batches(order.packs))
    missing = world.most(len(parts)) - len(parts) if own.policy.is_sharded else 0
    result: Any
    match order:
        case AddRows(_, z0):
            own.z0 = z0
            result = own.add_micro_batches(parts)
            own.gather_along(missing)
            sum_gradients(own, world)
        case MeasureRows(_, z0):
            own.z0 = z0
            result = own.measure_micro_batches(parts)
            with torch.no_grad():
                own.gather_along(missing)
        case SumRatios():
            result = own.sum_ratios(parts)
            own.gather_along_ratios(missing)
        case RewardRows():
            assert isinstance(own, RewardGradient)
            result = own.rewards_of_micro_batches(parts).cpu()
            with torch.no_grad():
                own.gather_along(missing)
    return world.gather(result)
