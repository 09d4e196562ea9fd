from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from core.registry import BaseModelEntry
from tests.families.zoo import CONTEXT, Family
from worker.checks import compatibility
from worker.checks.compatibility import ForwardVerdict
from worker.model.policy import Policy, load_base, read_config
from worker.refusals import UnsupportedModel


@dataclass(frozen=True)
class Loaded:
    """A model that was accepted, or the reason why it was refused."""

    policy: Policy | None
    verdict: ForwardVerdict | None = None
    refusal: str = ""


def policy_on(folder: Path, *, rank: int = 4, alpha: int = 8) -> Policy:
    """With an adapter at its start."""
    entry = BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)
    return Policy(load_base("tiny", entry, folder, "cpu"), rank=rank, alpha=alpha, seed=0)


def loaded(folder: Path) -> Loaded:
    """As a job loads a model, with every check that it makes on the way."""
    try:
        compatibility.refuse_by_config(read_config(folder), CONTEXT)
        policy = policy_on(folder)
        verdict = compatibility.probe(policy, sampled=True)
    except UnsupportedModel as refusal:
        return Loaded(None, refusal=str(refusal))
    return Loaded(policy, verdict)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Path, Loaded]]]:
    """A family's folder and what became of loading it; each is loaded once, and all are dropped after the file."""

    @cache
    def once(family: Family) -> tuple[Path, Loaded]:
        folder = family.save(tmp_path_factory.mktemp("family"))
        return folder, loaded(folder)

    yield once
    once.cache_clear()
