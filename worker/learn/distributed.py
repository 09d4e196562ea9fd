"""Compute the gradient of a step on all ranks of a world: rank 0 gives orders, the others follow them.

The adapter and a value head are replicated in float32. In each pass rank 0 broadcasts them, every rank adds up the
gradient of its packs, and one all-reduce adds up the ranks. Only rank 0 has an optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NoReturn

import torch
from torch import Tensor

from core.jobs.hyperparameters import Resolved
from worker.learn import offline_ranks
from worker.learn.deal import deal
from worker.learn.gradient import OwnGradient, keep_memory
from worker.learn.offline_gradient import OfflineGradient
from worker.learn.optimizer import optimizer_of
from worker.learn.rank_model import Model
from worker.learn.reward import RewardGradient
from worker.learn.soft_targets import SoftTargetGradient
from worker.learn.teacher import TeacherPolicy
from worker.learn.token_rewards import StepMoments
from worker.learn.totals import Totals
from worker.learn.trained import OnParts, TrainedModel, carry_out_on_part, sum_gradients
from worker.learn.world import World
from worker.model import recompute, sharding, support
from worker.model.full import FullPolicy
from worker.model.policy import Policy
from worker.model.reward_head import RewardHead
from worker.model.sharded_full import ShardedFullPolicy
from worker.model.support import ForwardVerdict
from worker.rollout.sampler_gate import SamplerGap
from worker.types import AnswerKey, Pack, TokenValues


@dataclass(frozen=True)
class RankTeacher:
    """The teacher that every rank computes (worker/learn/soft_targets.py)."""

    second: Model | None  # a model beside the student's; None: one on its base model
    has_adapter: bool


@dataclass(frozen=True)
class LoadModel:
    """Load the model, then wait for the others."""

    model: Model
    device: str  # "cuda": each rank takes the GPU of its local number
    threads: int  # of torch; 0: torch's default
    token_budget: int
    held_to: str
    degree: int = 1  # of sharding: the ranks of a machine that share one copy of the base model
    teacher: RankTeacher | None = None  # of the mode `logits`; None: it is on a server
    release: Callable[[], None] = keep_memory  # called after loading, and at the end of each step


@dataclass(frozen=True)
class ReceiveAdapter:
    """Receive the adapter, or that of the KL's reference."""

    is_reference: bool = False


@dataclass(frozen=True)
class AddPacks:
    packs: Sequence[Pack]
    std: float
    kl: float


@dataclass(frozen=True)
class RememberPacks:
    packs: Sequence[Pack]
    part: int


@dataclass(frozen=True)
class RewardTokens:
    kl: float


@dataclass(frozen=True)
class NormalizeAdvantages:
    mean: float
    std: float


@dataclass(frozen=True)
class RepeatPacks:
    std: float
    kl: float
    part: int


@dataclass(frozen=True)
class SumGradients:
    pass


@dataclass(frozen=True)
class GatherTokenValues:
    pass


@dataclass(frozen=True)
class EndStep:
    pass


@dataclass(frozen=True)
class WatchReference:
    """Rank 0 computes the reference of one pack."""


@dataclass(frozen=True)
class CompareSampler:
    """Rank 0 computes one micro-batch under the adapter that sampled it."""


Order = (
    ReceiveAdapter
    | AddPacks
    | RememberPacks
    | RewardTokens
    | NormalizeAdvantages
    | RepeatPacks
    | SumGradients
    | GatherTokenValues
    | EndStep
    | WatchReference
    | CompareSampler
)


class DistributedGradient:
    """Implements Gradient over all ranks; this process is rank 0.

    A share stays on its rank, which caches values of the first pass for later ones. The result equals that of one
    process, up to the order of float32 additions.
    """

    def __init__(self, own: OwnGradient, world: World) -> None:
        self.own = own
        self.world = world
        self.capacity = own.capacity * world.size
        self._has_adapter = False  # whether all ranks have the adapter of this pass
        self._reference: list[Tensor] | None = None  # that all ranks have

    def add(self, packs: Sequence[Pack], std: float, kl: float) -> None:
        if not packs:
            return
        self._share_adapter()
        self._order([AddPacks(hand, std, kl) for hand in self._hands(packs)])

    def remember(self, packs: Sequence[Pack], part: int) -> None:
        self._share_adapter()
        self._order([RememberPacks(hand, part) for hand in self._hands(packs)])

    def _hands(self, packs: Sequence[Pack]) -> list[list[Pack]]:
        """The packs of each rank."""
        return deal(packs, self.world.size, rows=self.own.policy.route.forward == "rows")

    def reward_tokens(self, kl: float) -> StepMoments:
        moments: list[StepMoments] = self._order([RewardTokens(kl)] * self.world.size)
        return reduce(add, moments)

    def normalize(self, mean: float, std: float) -> None:
        self._order([NormalizeAdvantages(mean, std)] * self.world.size)

    def again(self, std: float, kl: float, part: int = 0) -> None:
        self._share_adapter()
        self._order([RepeatPacks(std, kl, part)] * self.world.size)

    def collect(self) -> Totals:
        self._has_adapter = False  # the caller updates it
        totals: list[Totals] = self._order([SumGradients()] * self.world.size)
        return reduce(add, totals)

    def token_values(self) -> dict[AnswerKey, TokenValues]:
        values_R: list[dict[AnswerKey, TokenValues]] = self._order([GatherTokenValues()] * self.world.size)
        return {key: value for values in values_R for key, value in values.items()}

    def end(self) -> None:
        self._order([EndStep()] * self.world.size)

    def watched_kl(self) -> float | None:
        """As OwnGradient does."""
        policy = self.own.policy
        if not policy.is_sharded or (self.own.reference is None and not policy.has_base):
            return self.own.watched_kl()
        watched: float | None = self._order([WatchReference()] * self.world.size)
        return watched

    def sampler_gap(self) -> SamplerGap:
        """Of a micro-batch of rank 0."""
        if not self.own.policy.is_sharded:
            return self.own.sampler_gap()
        gap: SamplerGap = self._order([CompareSampler()] * self.world.size)
        return gap

    def _share_adapter(self) -> None:
        parts = isinstance(self.own.policy, ShardedFullPolicy)  # each rank has its own of the reference
        if self.own.settings.kl > 0 and self.own.reference is not self._reference and not parts:
            self._order([ReceiveAdapter(is_reference=True)] * self.world.size)
            self._reference = self.own.reference
        if not self._has_adapter:
            self._order([ReceiveAdapter()] * self.world.size)
            self._has_adapter = True

    def _order(self, orders_R: Sequence[Any]) -> Any:
        with self.world.giving():
            self.world.give(orders_R)
            return carry_out(orders_R[0], self.own, self.world)


def carry_out(order: Order, own: OwnGradient, world: World) -> Any:
    """Do what all ranks do together. RewardTokens, SumGradients and GatherTokenValues return the results of all ranks
    on rank 0.

    A forward or backward pass of a sharded base is a collective operation, so all ranks compute as many of each kind:
    the one with the fewest micro-batches fills up with passes that add nothing.
    """
    match order:
        case ReceiveAdapter(is_reference=True):
            own.broadcast_reference(world)
        case ReceiveAdapter():
            world.broadcast(own.trainable)
            if world.rank > 0:  # those of rank 0 are the same as before
                own.policy.follow_trainable()
        case AddPacks(packs, std, kl) if own.policy.is_sharded:
            parts = list(own.micro_batches(packs))
            missing = world.most(len(parts)) - len(parts)
            own.add_micro_batches(parts, std, kl)
            own.fill_up(missing)
        case AddPacks(packs, std, kl):
            own.add(packs, std, kl)
        case RememberPacks(packs, part) if own.policy.is_sharded:
            parts = list(own.micro_batches(packs))
            missing = world.most(len(parts)) - len(parts)
            own.remember_micro_batches(parts, part)
            own.fill_up(missing, part, remembered=True)
        case RememberPacks(packs, part):
            own.remember(packs, part)
        case RewardTokens(kl):
            return world.gather(own.reward_tokens(kl))
        case NormalizeAdvantages(mean, std):
            own.normalize(mean, std)
        case RepeatPacks(std, kl, part):
            own.again(std, kl, part)
        case WatchReference() if world.rank == 0:
            return own.watched_kl()
        case WatchReference():
            own.gather_along_reference()
        case CompareSampler() if world.rank == 0:
            return own.sampler_gap()
        case CompareSampler():
            own.gather_along_sampler_gap()
        case SumGradients():
            sum_gradients(own, world)
            return world.gather(own.collect())
        case GatherTokenValues():
            return world.gather(own.token_values())
        case EndStep():
            own.end()


@contextmanager
def loading(world: World | None, order: LoadModel) -> Iterator[None]:
    """Have the other ranks load the model while the caller does, then wait for them. Raises BrokenWorld."""
    if world is None:
        yield
        return
    with world.giving():
        world.give([order] * world.size)
        yield
        world.gather(None)


def follow(world: World) -> NoReturn:
    """Follow the orders of rank 0 for as long as there is one. Raises BrokenWorld."""
    own: OwnGradient | OfflineGradient | None = None
    trained: TrainedModel | None = None  # its part of the weights, where each rank has one
    while True:
        order = world.receive()
        if isinstance(order, LoadModel):
            own = loaded(order, world)
            trained = part_of(own, world)
            world.gather(None)
        elif isinstance(order, OnParts):
            assert trained is not None, "LoadModel comes first"
            carry_out_on_part(order, trained, world)
        elif isinstance(own, OfflineGradient) and order is not None:
            offline_ranks.carry_out(order, own, world)
        elif order is not None:
            assert isinstance(own, OwnGradient), "LoadModel comes first"
            carry_out(order, own, world)


def part_of(own: OwnGradient | OfflineGradient, world: World) -> TrainedModel | None:
    """Return the part that a rank above 0 trains itself. None: rank 0 trains for all."""
    policy = own.policy
    if not isinstance(policy, ShardedFullPolicy):
        return None
    return TrainedModel(policy, own, optimizer_of(policy, own.settings, world))


def loaded(order: LoadModel, world: World) -> OwnGradient | OfflineGradient:
    if order.threads:
        torch.set_num_threads(order.threads)
    device = f"cuda:{world.local_rank}" if order.device == "cuda" else order.device
    if device != "cpu":
        torch.cuda.set_device(device)
    policy, _ = load_checked(order.model, device, order.degree, world)
    order.release()
    settings, budget = order.model.settings, order.token_budget
    if isinstance(settings, Resolved):
        return OwnGradient(
            policy, settings, token_budget=budget, held_to=order.held_to, release=order.release
        )
    if settings.soft_temperature is not None:
        teacher = None if order.teacher is None else teacher_of(order.teacher, policy, device)
        return SoftTargetGradient(policy, teacher, settings, token_budget=budget)
    if settings.reward_kind is not None:
        head = RewardHead(policy.hidden_size, policy.device)
        return RewardGradient(policy, head, settings, token_budget=budget)
    return OfflineGradient(policy, settings, token_budget=budget)


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
    verdict = support.probe(stand_in, sampled=False)
    beat()
    recompute.keep_as_in(policy.model, stand_in.model)
    policy.use(verdict.route)
    if model.checkpointed:
        policy.checkpoint_layers()
    return verdict
