from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.registry import BaseModelEntry
from tests.tiny import make_tiny_model
from worker.policy import Policy, load_base


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture()
def make_policy(tiny_model: Path) -> Callable[..., Policy]:
    """A policy on the tiny model; `moved` gives its adapter random weights, as if it had learned something."""

    def make(*, moved: bool = False, seed: int = 0) -> Policy:
        base = load_base("tiny", BaseModelEntry(path=tiny_model, dtype="float32", context=128), tiny_model, "cpu")
        policy = Policy(base, rank=4, alpha=8, seed=seed)
        if moved:
            torch.manual_seed(seed + 1)
            for parameter in policy.trainable:
                torch.nn.init.normal_(parameter, std=0.2)
        return policy

    return make
