"""A tuned model trained further at a larger rank: its adapter is frozen, and the rest of the rank learns on top."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.results.lineage import Parent
from worker.model.parent import start_from
from worker.model.policy import Policy
from worker.refusals import InvalidModel
from worker.training.optimizer import AdapterOptimizer

MakePolicy = Callable[..., Policy]
SETTINGS: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": "all-linear"}


class Folder:
    """Adapters that lie in a folder; the job has checkpoints unless it `is_empty`."""

    def __init__(self, folder: Path, *, is_empty: bool = True) -> None:
        self.folder, self.is_empty = folder, is_empty

    def download(self, prefix: str, folder: Path) -> None:
        shutil.copytree(self.folder / prefix, folder, dirs_exist_ok=True)


def parent(grown: int | None = 12) -> Parent:
    return Parent("ft:tiny:x", "ftjob-1", 3, "ckpt-1", "adapter", SETTINGS, grown_rank=grown)


@pytest.fixture
def tuned(make_policy: MakePolicy, tmp_path: Path) -> Policy:
    """A policy whose adapter was trained, and saved in the folder `adapter`."""
    policy = make_policy(moved=True)
    policy.save(tmp_path / "adapter")
    return policy


def hidden(policy: Policy) -> Tensor:
    ids = torch.arange(8, 20)[None]
    with torch.no_grad():
        return policy.hidden(ids, torch.arange(12)[None], torch.zeros_like(ids))


def test_the_shape_has_the_larger_rank_at_the_parents_scale() -> None:
    assert parent().shape == {"lora_rank": 12, "lora_alpha": 24, "lora_targets": "all-linear"}
    assert parent().frozen_rank == 4
    assert parent(None).shape == SETTINGS
    assert parent(None).frozen_rank == 0


@pytest.mark.parametrize("grown", [12, None])
def test_the_row_of_a_job_keeps_it(grown: int | None) -> None:
    assert Parent(**parent(grown).to_row()) == parent(grown)


def test_it_starts_as_its_parent(make_policy: MakePolicy, tuned: Policy, tmp_path: Path) -> None:
    grown = make_policy(rank=12, seed=7)

    assert start_from(parent(), grown, Folder(tmp_path))

    assert torch.allclose(hidden(grown), hidden(tuned), atol=1e-5)
    assert not torch.allclose(hidden(grown), hidden(make_policy(rank=12)), atol=1e-3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_only_the_new_part_is_trained(
    make_policy: MakePolicy, tuned: Policy, tmp_path: Path, weight_decay: float
) -> None:
    grown = make_policy(rank=12)
    start_from(parent(), grown, Folder(tmp_path))
    optimizer = AdapterOptimizer(
        grown,
        learning_rate=0.1,
        betas=(0.9, 0.999),
        max_grad_norm=1.0,
        warmup_steps=0,
        weight_decay=weight_decay,
    )
    before = grown.adapter()

    for taken in range(3):
        for number, parameter in enumerate(grown.trainable):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.prepare(1.0)
        optimizer.descend(taken, 1.0)
        optimizer.clear()

    after, own = grown.adapter(), tuned.adapter()
    for name, weight in after.items():
        rows = ".lora_A." in name
        frozen, new = (weight[:4], weight[4:]) if rows else (weight[:, :4], weight[:, 4:])
        assert torch.equal(frozen, own[name])
        assert not torch.equal(new, before[name][4:] if rows else before[name][:, 4:])


def test_the_frozen_part_has_no_share_in_the_norm(
    make_policy: MakePolicy, tuned: Policy, tmp_path: Path
) -> None:
    grown = make_policy(rank=12)
    start_from(parent(), grown, Folder(tmp_path))
    optimizer = AdapterOptimizer(
        grown, learning_rate=0.1, betas=(0.9, 0.999), max_grad_norm=1.0, warmup_steps=0
    )
    for weight in grown.trainable:
        weight.grad = torch.ones_like(weight)

    norm = optimizer.prepare(1.0)

    trained = sum(weight.numel() for weight in grown.trainable) * 8 / 12
    assert norm == pytest.approx(trained**0.5, rel=1e-5)


def test_it_is_frozen_in_an_attempt_that_resumes_too(
    make_policy: MakePolicy, tuned: Policy, tmp_path: Path
) -> None:
    grown = make_policy(rank=12)

    assert not start_from(parent(), grown, Folder(tmp_path, is_empty=False))

    assert grown.frozen_rank == 4


def test_an_adapter_of_another_rank_than_the_frozen_one_is_refused(
    make_policy: MakePolicy, tuned: Policy, tmp_path: Path
) -> None:
    other = Parent("ft:tiny:x", "ftjob-1", 3, "ckpt-1", "adapter", SETTINGS | {"lora_rank": 2}, grown_rank=12)

    with pytest.raises(InvalidModel, match="another lora_rank"):
        start_from(other, make_policy(rank=12), Folder(tmp_path))
