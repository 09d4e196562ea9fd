"""Compute the gradient of a step on all ranks of a world: rank 0 gives orders, the others follow them.

The adapter and a head are replicated in float32. In each pass rank 0 broadcasts them, every rank adds up the gradient
of its packs, and one all-reduce adds up the ranks. Only rank 0 has an optimizer. If all weights of a sharded model are
trained, each rank has a part of them and of the optimizer (worker/training/trainable_weights.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NoReturn

import torch
from torch import Tensor

from worker.checks import compatibility
from worker.checks.compatibility import ForwardVerdict
from worker.model import recompute, sharding
from worker.model.full import FullPolicy
from worker.model.lowering import PlanSizes
from worker.model.policy import Policy
from worker.model.sharded_full import ShardedFullPolicy
from worker.out_of_memory import LostPass, OutOfDeviceMemory, Shortage, naming_place
from worker.progress import PROGRESS
from worker.refusals import Refusal
from worker.training.gradient import (
    Gradient,
    LocalGradient,
    LoweringGradient,
    Result,
    StepMemory,
    keep_memory,
)
from worker.training.loss import GradientSums, Loss, StepValues
from worker.training.losses import loss_of
from worker.training.optimizer import optimizer_of
from worker.training.partition import deal, deal_whole
from worker.training.rank_model import Model
from worker.training.teacher import TeacherPolicy
from worker.training.trainable_weights import OnParts, TrainedModel, carry_out_on_part
from worker.training.world import World
from worker.types import Pack


@dataclass(frozen=True)
class RankTeacher:
    """The teacher that every rank computes (worker/training/soft_targets.py)."""

    second: Model | None  # a model beside the student's; None: one on its base model
    has_adapter: bool


@dataclass(frozen=True)
class LoadModel:
    """Load the model, then wait for the others."""

    model: Model
    device: str  # "cuda": each rank takes the GPU of its local number
    threads: int  # of torch; 0: torch's default
    token_budget: int
    response_schema: str
    degree: int = 1  # of sharding: the ranks of a machine that share one copy of the base model
    teacher: RankTeacher | None = None  # of the mode `logits`; None: it is on a server
    release: Callable[[], None] = keep_memory  # called after loading, and at the end of each step


@dataclass(frozen=True)
class ReceiveWeights:
    """Receive what is trained, or weights of this name that the loss needs and that are not."""

    name: str = ""


@dataclass(frozen=True)
class Compute:
    """Call a method of the gradient."""

    method: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    returns: bool = True  # rank 0 waits for the results of all ranks


class DistributedGradient:
    """Implements Gradient over all ranks; this process is rank 0.

    A share stays on its rank, which caches values of the first pass for later ones. The result equals that of one
    process, up to the order of float32 additions.
    """

    def __init__(self, local: LocalGradient, world: World) -> None:
        self.local = local
        self.world = world
        self._has_weights = False  # whether all ranks have what rank 0 has trained
        self._fixed: dict[str, Sequence[Tensor]] = {}  # weights that all ranks have and that are not trained

    @property
    def capacity(self) -> int:
        return self.local.capacity * self.world.size

    def add(self, packs: Sequence[Pack], values: StepValues) -> None:
        if packs:
            self._on_shares(LocalGradient.add, packs, values, returns=False)

    def remember(self, packs: Sequence[Pack], part: int) -> None:
        self._on_shares(LocalGradient.remember, packs, part, returns=False)

    def repeat(self, values: StepValues, part: int = 0) -> None:
        self._share_weights()
        self._give([Compute(LocalGradient.repeat, (values, part), returns=False)] * self.world.size)

    def collect(self) -> GradientSums:
        # First, because a rank that has not computed its share must not keep the others waiting for its gradient.
        self._give([Compute(LocalGradient.check)] * self.world.size)
        sums: list[GradientSums] = self._give([Compute(LocalGradient.collect)] * self.world.size)
        self._has_weights = False  # the caller updates them
        return reduce(add, sums)

    def measure(self, packs: Sequence[Pack], values: StepValues) -> GradientSums:
        sums: list[GradientSums] = self._on_shares(LocalGradient.measure, packs, values)
        return reduce(add, sums)

    def of_packs(
        self, compute: Callable[..., Result], packs: Sequence[Pack], *arguments: Any
    ) -> list[Result]:
        self._share_weights()
        orders = [
            Compute(LocalGradient.of_packs, (compute, share, *arguments)) for share in self._shares(packs)
        ]
        return [result for results in self._give(orders) for result in results]

    def of_micro_batches(self, compute: Callable[..., Result], *arguments: Any) -> list[Result]:
        order = Compute(LocalGradient.of_micro_batches, (compute, *arguments))
        return [result for results in self._give([order] * self.world.size) for result in results]

    def of_updated(self, compute: Callable[..., Result], *arguments: Any) -> list[Result]:
        self._has_weights = False
        self._share_weights()
        results = self.of_micro_batches(compute, *arguments)
        self._has_weights = False  # the caller may undo the update
        return results

    def free(self) -> int:
        free_R: list[int] = self._give([Compute(LocalGradient.free)] * self.world.size)
        return min(free_R)

    def resize(self, sizes: PlanSizes) -> None:
        """All ranks begin anew together, whichever of them ran out of memory."""
        self._give([Compute(LocalGradient.resize, (sizes,), returns=False)] * self.world.size)

    def end(self) -> None:
        self._give([Compute(LocalGradient.end, returns=False)] * self.world.size)

    def _on_shares(
        self, method: Callable[..., Any], packs: Sequence[Pack], *arguments: Any, returns: bool = True
    ) -> list[Any]:
        self._share_weights()
        shares = self._shares(packs)
        results = self._give([Compute(method, (share, *arguments), returns) for share in shares])
        PROGRESS.row(sum(map(len, shares[1:])))  # rank 0 has counted its own
        return results

    def _shares(self, packs: Sequence[Pack]) -> list[list[Pack]]:
        """The packs of each rank."""
        divide = deal_whole if self.local.loss.couples_answers else deal
        return divide(packs, self.world.size, rows=self.local.policy.route.forward == "rows")

    def _share_weights(self) -> None:
        loss = self.local.loss
        for name, weights in loss.fixed_weights.items():
            # Each rank has its own part of the reference if it trains a part of the weights.
            if weights is None or isinstance(loss.policy, ShardedFullPolicy):
                continue
            if weights is not self._fixed.get(name):
                self._give([ReceiveWeights(name)] * self.world.size)
                self._fixed[name] = weights
        if not self._has_weights:
            self._give([ReceiveWeights()] * self.world.size)
            self._has_weights = True

    def _give(self, orders_R: Sequence[ReceiveWeights | Compute]) -> list[Any]:
        with self.world.giving():
            self.world.give(orders_R)
            return carry_out(orders_R[0], self.local, self.world)


def gradient_of(
    loss: Loss,
    token_budget: int,
    world: World | None,
    release: Callable[[], None] = keep_memory,
    memory: StepMemory | None = None,
) -> Gradient:
    """The gradient of a run, of which this process is rank 0.

    Args:
        release: as LocalGradient says.
        memory: answers out-of-memory errors. None: the methods of the gradient raise OutOfDeviceMemory.
    """
    local = LocalGradient(loss, token_budget=token_budget, world=world, release=release)
    whole = local if world is None else DistributedGradient(local, world)
    return whole if memory is None else LoweringGradient(whole, memory)


def carry_out(order: ReceiveWeights | Compute, local: LocalGradient, world: World) -> list[Any]:
    """Do what all ranks do together, and return their results on rank 0 if it waits for them.

    Raises:
        LostPass: there is no result to wait for.
    """
    match order:
        case ReceiveWeights(""):
            world.broadcast(local.loss.trainable)
            if world.rank > 0:  # those of rank 0 are the same as before
                local.policy.follow_trainable()
        case ReceiveWeights(name):
            local.loss.receive(name, world)
        case Compute(method, arguments, returns):
            shortage, result = None, None
            try:
                result = method(local, *arguments)
            except LostPass:
                raise
            except OutOfDeviceMemory as cause:
                shortage = cause.shortage
            return results_of(world.gather((shortage, result))) if returns else []
    return []


def results_of(answers_R: Sequence[tuple[Shortage | None, Any]]) -> list[Any]:
    """The results of all ranks. Raises OutOfDeviceMemory, on rank 0: one of them has none."""
    shortages = [shortage for shortage, _ in answers_R if shortage is not None]
    if shortages:
        # The mildest answer first: smaller micro-batches, for all ranks as small as for the one with the least room.
        raise OutOfDeviceMemory(min(shortages, key=lambda one: (not one.divisible, one.tokens)))
    return [result for _, result in answers_R]


@contextmanager
def loading(world: World | None, order: LoadModel) -> Iterator[None]:
    """Have the other ranks load the model while the caller does, then wait for them.

    Raises:
        BrokenWorld: one of them has ended.
        Refusal: one of them refuses the model.
    """
    if world is None:
        yield
        return
    with world.giving():
        world.give([order] * world.size)
        yield
        for refusal in world.gather(None):
            if refusal is not None:
                raise refusal


def follow(world: World) -> NoReturn:
    """Follow the orders of rank 0 for as long as there is one.

    Raises:
        BrokenWorld: another rank has ended.
        OutOfDeviceMemory: in an operation of all ranks, which has no end then. Rank 0 is notified.
        Refusal: of a model that the ranks load together. Rank 0 may wait in a collective operation of theirs.
        SchemaTooLarge: for an answer of this rank's share.
    """
    try:
        _follow(world)
    except OutOfDeviceMemory as cause:
        world.report(cause.shortage)
        raise


def _follow(world: World) -> NoReturn:
    local: LocalGradient | None = None
    trained: TrainedModel | None = None  # its part of the weights, where each rank has one
    device = "cpu"
    while True:
        order = world.receive()
        device = order.device if isinstance(order, LoadModel) else device
        with naming_place("trainer", device):
            if isinstance(order, LoadModel):
                refusal: Refusal | None = None
                try:
                    local = loaded(order, world)
                    trained = part_of(local.loss, world)
                except Refusal as cause:
                    if order.degree > 1:
                        raise
                    refusal = cause
                world.gather(refusal)
            elif isinstance(order, OnParts):
                assert trained is not None, "LoadModel comes first"
                carry_out_on_part(order, trained, world)
            elif order is not None:
                assert local is not None, "LoadModel comes first"
                carry_out(order, local, world)


def part_of(loss: Loss, world: World) -> TrainedModel | None:
    """Return the part that a rank above 0 trains itself. None: rank 0 trains for all."""
    if not isinstance(loss.policy, ShardedFullPolicy):
        return None
    return TrainedModel(loss.policy, loss, optimizer_of(loss.policy, loss.settings, world))


def loaded(order: LoadModel, world: World) -> LocalGradient:
    if order.threads:
        torch.set_num_threads(order.threads)
    device = f"cuda:{world.local_rank}" if order.device == "cuda" else order.device
    if device != "cpu":
        torch.cuda.set_device(device)
    policy, _ = load_checked(order.model, device, order.degree, world)
    order.release()
    teacher = None if order.teacher is None else teacher_of(order.teacher, policy, device)
    loss = loss_of(policy, order.model.settings, response_schema=order.response_schema, teacher=teacher)
    return LocalGradient(loss, token_budget=order.token_budget, world=world, release=order.release)


def teacher_of(teacher: RankTeacher, student: Policy, device: str) -> TeacherPolicy:
    """The teacher of a rank above 0, which receives an adapter from rank 0."""
    if teacher.second is not None:
        return TeacherPolicy(load_second(teacher.second, device))
    if not teacher.has_adapter:
        return TeacherPolicy(student)
    return TeacherPolicy(student, [torch.zeros_like(parameter) for parameter in student.trainable])


def load_second(model: Model, device: str, beat: Callable[[], None] = lambda: None) -> Policy:
    """Load a model beside the student's, whole and frozen. Raises UnsupportedModel: no forward pass is right."""
    policy, _ = load_checked(model, device, 1, None, beat)
    policy.model.requires_grad_(False)
    return policy


def load_checked(
    model: Model, device: str, degree: int, world: World | None, beat: Callable[[], None] = lambda: None
) -> tuple[Policy, ForwardVerdict]:
    """Load the model and choose its forward pass; with a `degree` above 1 sharded, which all ranks do together.

    Raises:
        UnsupportedModel: no forward pass is right, or the model cannot be sharded.
    """
    if degree == 1:
        policy = model.load(device)
        beat()
        verdict = model.check(policy)
        beat()
        return policy, verdict
    assert world is not None, "a base is sharded over ranks"
    settings = model.settings
    bases = sharding.load_bases(
        model.name, model.entry, model.cache, device, settings.chat_template, settings.chat_template_kwargs
    )
    device_type = torch.device(device).type
    if settings.train == "full":
        trained, like_it = ShardedFullPolicy(bases[0]), FullPolicy(bases[1])
        verdict = _prepare(trained, like_it, model, beat)
        mesh = world.neighbors(device_type, degree)
        trained.shard(like_it, mesh, model.weights or trained.source)
        beat()
        return trained, verdict
    policy, stand_in = (
        Policy(
            base,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            seed=model.seed,
            targets=settings.lora_targets,
        )
        for base in bases
    )
    verdict = _prepare(policy, stand_in, model, beat)
    sharding.shard(policy, stand_in, world.neighbors(device_type, degree), seed=model.seed)
    beat()
    return policy, verdict


def _prepare(policy: Policy, stand_in: Policy, model: Model, beat: Callable[[], None]) -> ForwardVerdict:
    """Choose the forward pass by the stand-in, before there are weights. Raises UnsupportedModel: none is right."""
    verdict = compatibility.probe(stand_in, sampled=False)
    beat()
    recompute.keep_as_in(policy.model, stand_in.model)
    policy.use(verdict.route)
    if model.checkpointed:
        policy.checkpoint_layers()
    return verdict
