"""Given answers in several processes: the adapter and the metrics are those of one process, for every loss."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.jobs.methods import LOGITS, REWARD_MODEL
from core.jobs.offline_hyperparameters import KINDS, ResolvedOffline, resolve
from core.registry import BaseModelEntry
from core.storage.offline_rows import RewardKind
from graders.types import TokenUsage
from tests.present import untyped
from tests.worker.process_group import followed
from tests.worker.rounding import NATS, assert_same
from tests.worker.test_offline_training import conversations, labeled, pairs
from tests.worker.test_training import relative_difference
from worker.model.policy import Policy
from worker.model.reward_head import RewardHead, Scale, read_scale
from worker.offline.rows import scored_at_the_end
from worker.progress import PROGRESS
from worker.training.distributed import LoadModel, RankTeacher, load_checked, load_second, loading
from worker.training.offline import OfflineMetrics, OfflineTrainer, RewardTrainer, SoftTargetTrainer
from worker.training.rank_model import Model
from worker.training.teacher import TeacherPolicy
from worker.training.world import World
from worker.types import Pack, TopTokens, TrainingSequence

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with followed(tmp_path_factory.mktemp("world"), 2) as world:
        yield world


def scored_pairs() -> list[Pack]:
    return [scored_at_the_end(pack, 0.1) for pack in pairs()]


def scored_answers() -> list[Pack]:
    return [
        scored_at_the_end(replace(pack, sequences=pack.sequences[:1]), row % 3)
        for row, pack in enumerate(pairs())
    ]


# The method, its hyperparameters, and the rows that it learns from, which are of unequal lengths.
CASES: dict[str, tuple[str, dict[str, Any], Callable[[], list[Pack]]]] = {
    "supervised": ("supervised", {}, conversations),
    "sigmoid": ("dpo", {"beta": 0.5}, pairs),
    "orpo": ("dpo", {"advanced": {"loss": {"type": "orpo"}}}, pairs),
    "kto": ("dpo", {"beta": 0.5, "advanced": {"loss": {"type": "kto"}}}, pairs),
    "kto of labeled answers": ("dpo", {"advanced": {"loss": {"type": "kto"}}}, labeled),
    "reward of pairs": (REWARD_MODEL, {}, scored_pairs),
    "reward of scores": (REWARD_MODEL, {}, scored_answers),
    "logits": (LOGITS, {"advanced": {"loss": {"top_k": 7}}}, conversations),
    "logits of a second model": (LOGITS, {}, conversations),
    "logits of a server": (LOGITS, {"advanced": {"loss": {"top_k": 7}}}, conversations),
}
TEACHERS = {"logits": RankTeacher(None, has_adapter=True)}


class Served:
    """Implements TopTeacher: likely tokens that depend on the place alone."""

    def with_top(self, packs: Sequence[Pack], top_k: int) -> list[Pack]:
        return [
            replace(pack, sequences=tuple(self._top(one, top_k) for one in pack.sequences)) for pack in packs
        ]

    def _top(self, answer: TrainingSequence, top_k: int) -> TrainingSequence:
        learned = [*compress(range(len(answer.output_ids_T)), answer.learned_T or repeat(True))]
        ids = torch.tensor([[(5 * place + rank) % 40 for rank in range(top_k)] for place in learned])
        return replace(answer, top=TopTokens(ids, torch.arange(top_k).expand(ids.shape) * -0.5 - 1.5))

    def usage(self) -> TokenUsage:
        return TokenUsage()


def settings_of(case: str) -> ResolvedOffline:
    method, asked, rows = CASES[case]
    advanced = {"lora": {"rank": 4, "alpha": 8}} | asked.get("advanced", {})
    kind = KINDS[method].model_validate(asked | {"advanced": advanced})
    of: RewardKind = "scores" if case == "reward of scores" else "pairs"
    return resolve(method, kind, rows=len(rows()), parameters=1000, reward_kind=of)


def random(like: Sequence[Tensor], seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [0.2 * torch.randn(one.shape, generator=draw) for one in like]


def trainer_of(
    case: str, policy: Policy, second: Policy | None, budget: int, world: World | None
) -> OfflineTrainer:
    """It begins with a random adapter and, for a preference loss with a reference, takes that for the reference."""
    settings = settings_of(case)
    computing: dict[str, Any] = {"token_budget": budget, "world": world}
    if settings.soft_temperature is not None:
        adapter = random(policy.trainable, 9)
        teacher: Any = TeacherPolicy(policy, adapter) if second is None else TeacherPolicy(second)
        if case == "logits of a server":
            teacher = Served()
        trainer: OfflineTrainer = SoftTargetTrainer(policy, teacher, settings, **computing)
    elif settings.reward_kind is not None:
        head = RewardHead(policy.hidden_size, policy.device)
        with torch.no_grad():
            head.weight.copy_(random([head.weight], 3)[0])
        scale = Scale(0.0, 1.0) if settings.reward_kind == "scores" else None
        trainer = RewardTrainer(policy, head, settings, scale=scale, measured=CASES[case][2](), **computing)
    else:
        trainer = OfflineTrainer(policy, settings, **computing)
    with torch.no_grad():
        for parameter, value in zip(policy.trainable, random(policy.trainable, 5), strict=True):
            parameter.copy_(value)
    if settings.has_reference:
        trainer.start_from_policy()
    # AdamW makes a full step of a gradient that is nothing but rounding.
    untyped(trainer).optimizer.adamw = torch.optim.SGD(trainer.optimizer.trained, lr=0.05)
    return trainer


@pytest.fixture
def both(world: World, tiny_model: Path) -> Callable[..., tuple[OfflineTrainer, OfflineTrainer]]:
    """Trainers that begin alike: one computes alone, one with all ranks."""

    def make(case: str, *, budget: int = 4096, degree: int = 1) -> tuple[OfflineTrainer, OfflineTrainer]:
        entry = BaseModelEntry(path=tiny_model, dtype="float32", context=256)
        model = Model("tiny", entry, tiny_model, settings_of(case), 0, False, sampled=False)
        teacher, second = TEACHERS.get(case), None
        if case == "logits of a second model":
            teacher = RankTeacher(model, has_adapter=False)
        with loading(world, LoadModel(model, "cpu", 1, budget, "", degree, teacher)):
            policy, _ = load_checked(model, "cpu", degree, world)
            if teacher is not None and teacher.second is not None:
                second = load_second(teacher.second, "cpu")
        return (
            trainer_of(case, model.load("cpu"), second, budget, None),
            trainer_of(case, policy, second, budget, world),
        )

    return make


def same(metrics: OfflineMetrics, expected: OfflineMetrics) -> None:
    """Rewards and losses are differences of the log-probabilities of whole answers."""
    nats = expected.tokens / expected.sequences * NATS
    assert_same(metrics, expected, terms=nats)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_together_learn_what_one_process_does(
    both: Callable[..., tuple[OfflineTrainer, OfflineTrainer]], case: str, degree: int
) -> None:
    rows = CASES[case][2]()
    alone, together = both(case, budget=60, degree=degree)
    assert together.policy.is_sharded == (degree > 1)
    start = [one.detach().clone() for one in alone.optimizer.trained]

    for _ in range(3):
        same(together.step(rows), alone.step(rows))
        same(together.measure(rows[2:]), alone.measure(rows[2:]))

    moves = [
        [now.detach() - then for now, then in zip(trainer.optimizer.trained, start, strict=True)]
        for trainer in (together, alone)
    ]
    assert relative_difference(*moves) < 1e-3


@pytest.mark.parametrize("degree", [1, 2])
def test_one_row_leaves_a_rank_without_work(
    both: Callable[..., tuple[OfflineTrainer, OfflineTrainer]], degree: int
) -> None:
    alone, together = both("kto", degree=degree)

    with PROGRESS.phase("training", 1):
        metrics = together.step(pairs()[:1])
        assert PROGRESS.now()["done"] == 1

    same(metrics, alone.step(pairs()[:1]))


@pytest.mark.parametrize("case", ["sigmoid", "reward of pairs"])
@pytest.mark.parametrize("together_first", [False, True])
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    both: Callable[..., tuple[OfflineTrainer, OfflineTrainer]],
    tmp_path: Path,
    case: str,
    together_first: bool,
) -> None:
    rows = CASES[case][2]()
    first, second = both(case)[:: -1 if together_first else 1]
    first.step(rows)
    first.save(tmp_path)

    second.load(tmp_path)

    assert all(map(torch.equal, first.optimizer.trained, second.optimizer.trained))
    same(second.step(rows), first.step(rows))


def test_the_scale_of_rewards_is_measured_on_all_ranks(
    both: Callable[..., tuple[OfflineTrainer, OfflineTrainer]], tmp_path: Path
) -> None:
    scales = []
    for name, trainer in zip(("alone", "together"), both("reward of pairs", degree=2), strict=True):
        (tmp_path / name).mkdir()
        trainer.save(tmp_path / name)
        scale, _ = read_scale(tmp_path / name)
        scales.append([scale.mean, scale.std])

    assert scales[1] == pytest.approx(scales[0], rel=1e-4)
