"""All weights of a model, trained in parts by several ranks: as one process does, and with the same checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from core.jobs.hyperparameters import Resolved
from core.jobs.offline_hyperparameters import ResolvedOffline
from core.registry import BaseModelEntry
from tests.fakes import learn
from tests.worker.process_group import followed
from tests.worker.test_distributed import groups
from tests.worker.test_full import make_tied_model
from tests.worker.test_offline_training import conversations, pairs
from tests.worker.test_offline_training import settings as offline_settings
from tests.worker.test_training import asked, relative_difference
from worker.model.full import FullPolicy
from worker.model.sharded_full import ShardedFullPolicy
from worker.model.tensor_files import TensorFiles
from worker.refusals import InvalidModel
from worker.training.distributed import LoadModel, load_checked, loading
from worker.training.offline import OfflineTrainer
from worker.training.rank_model import Model
from worker.training.trainable_weights import MOMENTS
from worker.training.trainer import PeftTrainer
from worker.training.world import World

pytestmark = pytest.mark.slow

Precision = Literal["float32", "bfloat16"]
Trainer = PeftTrainer | OfflineTrainer
BUDGET = 60  # tokens of a micro-batch


@pytest.fixture(scope="module", params=[3])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A process group of so many ranks, of which this process is the first."""
    with followed(tmp_path_factory.mktemp("world"), request.param) as world:
        yield world


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"untied": tiny_model, "tied": make_tied_model(tmp_path_factory.mktemp("tied"))}


@dataclass(frozen=True)
class Make:
    """Makes trainers of a model, in one process or in parts."""

    world: World
    folder: Path
    settings: Resolved
    dtype: Precision = "float32"

    def alone(self) -> PeftTrainer:
        policy = whole(self.folder, self.settings, self.dtype)
        return PeftTrainer(policy, self.settings, token_budget=BUDGET)

    def together(self, weights: Path | None = None) -> PeftTrainer:
        policy = in_parts(self.world, self.folder, self.settings, self.dtype, weights)
        return PeftTrainer(policy, self.settings, token_budget=BUDGET, world=self.world)


def model_of(
    folder: Path, settings: Resolved | ResolvedOffline, dtype: Precision, weights: Path | None = None
) -> Model:
    entry = BaseModelEntry(path=folder, dtype=dtype, context=256)
    return Model("tiny", entry, folder, settings, 0, False, sampled=False, weights=weights)


def whole(folder: Path, settings: Resolved | ResolvedOffline, dtype: Precision = "float32") -> FullPolicy:
    policy = model_of(folder, settings, dtype).load("cpu")
    assert isinstance(policy, FullPolicy)
    return policy


def in_parts(
    world: World,
    folder: Path,
    settings: Resolved | ResolvedOffline,
    dtype: Precision = "float32",
    weights: Path | None = None,
) -> ShardedFullPolicy:
    model = model_of(folder, settings, dtype, weights)
    with loading(world, LoadModel(model, "cpu", 1, BUDGET, "", world.size)):
        policy, _ = load_checked(model, "cpu", world.size, world)
    assert isinstance(policy, ShardedFullPolicy)
    return policy


def reinforcement(**advanced: Any) -> Resolved:
    common = {"train": "full", "learning_rate": 1e-3, "updates_per_batch": 2, "overlap": False}
    return asked(common | advanced)


def offline(method: str) -> ResolvedOffline:
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.1}
    return offline_settings(method, advanced={"train": "full", "optimizer": optimizer})


def saved(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, as transformers loads them."""
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return {name: one.detach() for name, one in model.named_parameters()}


def moved(now: dict[str, Tensor], start: dict[str, Tensor]) -> list[Tensor]:
    return [now[name].float() - start[name].float() for name in start]


@pytest.mark.parametrize(
    ("kind", "dtype", "advanced"),
    [
        ("untied", "float32", {}),
        ("tied", "float32", {"kl": 0.1, "mini_batches": 2}),
        ("untied", "float32", {"kl": 0.1, "reference_refresh_steps": 1}),
        ("tied", "bfloat16", {"kl": 0.1}),
    ],
)
def test_parts_learn_what_one_process_does(
    world: World,
    models: dict[str, Path],
    tmp_path: Path,
    kind: str,
    dtype: Precision,
    advanced: dict[str, Any],
) -> None:
    make = Make(world, models[kind], reinforcement(**advanced), dtype)
    trainers = [make.together(), make.alone()]
    start = saved(trainers[1], tmp_path / "start")

    metrics = [[learn(trainer, groups(step)) for step in range(3)] for trainer in trainers]

    near = 1e-3 if dtype == "float32" else 0.05
    for mine, own in zip(*metrics, strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl"):
            value = getattr(own, name)
            assert getattr(mine, name) == (
                None if value is None else pytest.approx(value, rel=near, abs=near)
            )
    together, alone = (moved(saved(one, tmp_path / str(at)), start) for at, one in enumerate(trainers))
    assert all(one.any() for one in alone)
    assert relative_difference(together, alone) < 0.05


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_parts_learn_from_a_file_what_one_process_does(
    world: World, models: dict[str, Path], tmp_path: Path, method: str
) -> None:
    settings = offline(method)
    parts, one = in_parts(world, models["untied"], settings), whole(models["untied"], settings)
    together = OfflineTrainer(parts, settings, token_budget=BUDGET, world=world)
    alone = OfflineTrainer(one, settings, token_budget=BUDGET)
    rows = pairs() if method == "dpo" else conversations()

    mine, own = together.step(rows), alone.step(rows)

    assert mine.loss == pytest.approx(own.loss, rel=1e-5)
    assert mine.grad_norm == pytest.approx(own.grad_norm, rel=1e-4)
    assert together.measure(rows).loss == pytest.approx(alone.measure(rows).loss, rel=1e-3)
    found = []
    for number, trainer in enumerate((together, alone)):
        saved(trainer, folder := tmp_path / str(number))
        with TensorFiles(folder, MOMENTS) as files:
            moments = [f"exp_avg.{name}" for name in one.names]
            found.append([files.rows(name, slice(None)) for name in moments])
    # The first moment after one step is the gradient, clipped.
    assert relative_difference(*found) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", ["parts, then parts", "parts, then one", "one, then parts"])
def test_a_checkpoint_resumes_in_parts_and_in_one_process(
    world: World, models: dict[str, Path], tmp_path: Path, dtype: Precision, order: str
) -> None:
    settings = reinforcement(kl=0.1, reference_refresh_steps=2)
    make = Make(world, models["untied"], settings, dtype)
    first, second = order.split(", then ")
    uninterrupted = make.together() if first == "parts" else make.alone()
    for step in range(3):
        learn(uninterrupted, groups(step))
    before = saved(uninterrupted, tmp_path / "checkpoint")
    expected = learn(uninterrupted, groups(3))
    after = saved(uninterrupted, tmp_path / "uninterrupted")

    resumed = make.together() if second == "parts" else make.alone()
    resumed.load(tmp_path / "checkpoint")
    loaded = saved(resumed, tmp_path / "loaded")
    metrics = learn(resumed, groups(3))

    assert all(torch.equal(loaded[name], one) for name, one in before.items())
    for name in ("masters", "moments", "reference"):
        with TensorFiles(tmp_path / "checkpoint", name) as was, TensorFiles(tmp_path / "loaded", name) as now:
            assert was.names() == now.names()
            assert all(
                torch.equal(was.rows(one, slice(None)), now.rows(one, slice(None))) for one in was.names()
            )
    if first == second:
        assert metrics == expected
        again = saved(resumed, tmp_path / "again")
        assert all(torch.equal(again[name], one) for name, one in after.items())
    else:
        near = 1e-3 if dtype == "float32" else 0.05
        assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=near)
        assert metrics.kl == pytest.approx(expected.kl, rel=near)


def test_each_rank_keeps_its_part_of_the_layers(world: World, models: dict[str, Path]) -> None:
    trainer = Make(world, models["untied"], reinforcement()).together()
    learn(trainer, groups(0))
    policy = trainer.policy
    assert isinstance(policy, ShardedFullPolicy)
    parameters = sum(policy.shape(number).numel() for number in range(len(policy.names)))
    ends = sum(one.numel() for one in policy.replicated)

    kept = sum(one.numel() for one in policy.parts)

    assert ends == sum(one.numel() for one in policy.outside_of_layers)
    assert kept == pytest.approx((parameters - ends) / world.size, rel=0.05)
    state = trainer.optimizer.adamw.state
    assert sum(one["exp_avg"].numel() for one in state.values()) == kept + ends


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_the_weights_for_sampling_are_those_of_the_checkpoint(
    world: World, models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    trainer = Make(world, models[kind], reinforcement(), "bfloat16").together()
    learn(trainer, groups(0))
    expected = saved(trainer, tmp_path / "checkpoint")
    policy = trainer.policy
    assert isinstance(policy, ShardedFullPolicy)
    (tmp_path / "weights").mkdir()

    policy.write_weights(tmp_path / "weights")

    with TensorFiles(tmp_path / "weights", "model") as files:
        assert files.names() == expected.keys()
        assert all(torch.equal(files.rows(name, slice(None)), one) for name, one in expected.items())


def test_a_further_job_starts_from_the_weights_of_a_whole_model(
    world: World, models: dict[str, Path], tmp_path: Path
) -> None:
    make = Make(world, models["untied"], reinforcement())
    parent = make.alone()
    learn(parent, groups(0))
    weights = saved(parent, tmp_path / "parent")

    child = make.together(tmp_path / "parent")

    started = saved(child, tmp_path / "child")
    assert all(torch.equal(started[name], one) for name, one in weights.items())


def test_a_checkpoint_of_another_model_is_refused_and_the_ranks_go_on(
    world: World, models: dict[str, Path], tmp_path: Path
) -> None:
    saved(Make(world, models["tied"], reinforcement()).alone(), tmp_path)
    trainer = Make(world, models["untied"], reinforcement()).together()

    with pytest.raises(InvalidModel, match="shape"):
        trainer.load(tmp_path)

    assert learn(trainer, groups(0)).trained_tokens > 0


def test_a_checkpoint_that_could_not_be_written_is_written_again(
    world: World, models: dict[str, Path], tmp_path: Path
) -> None:
    """The other ranks must not wait for the rest of the first one."""
    trainer = Make(world, models["untied"], reinforcement()).together()
    learn(trainer, groups(0))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").mkdir()

    for folder in ("absent", "half"):
        with pytest.raises((OSError, SafetensorError, AssertionError)):
            trainer.save(tmp_path / folder)

    saved(trainer, tmp_path / "whole")
    assert learn(trainer, groups(1)).trained_tokens > 0


def test_a_gradient_that_is_not_finite_moves_no_part(
    world: World, models: dict[str, Path], tmp_path: Path
) -> None:
    settings = offline("supervised")
    policy = in_parts(world, models["untied"], settings)
    trainer = OfflineTrainer(policy, settings, token_budget=BUDGET, world=world)
    before = saved(trainer, tmp_path / "before")
    trainer.add(conversations())

    norm = trainer.trained.prepare(float("nan"))

    assert norm is None
    after = saved(trainer, tmp_path / "after")
    assert all(torch.equal(after[name], one) for name, one in before.items())
