"""The sampler sees the update, all of it: an adapter that is merged into bfloat16 weights would mostly round away."""

from pathlib import Path

import pytest

from bench.merge_rounding import measure
from core.registry import BaseModelEntry
from worker.model.policy import load_base
from worker.sampling import Sampling


@pytest.fixture(scope="module")
def seen(tiny_model: Path) -> dict[str, float]:
    """Ten updates at 1e-5 on a base of bfloat16 values, computed in float32."""
    entry = BaseModelEntry(path=tiny_model, dtype="float32", context=128)
    return measure(
        lambda: load_base("tiny", entry, tiny_model, "cpu"),
        ["say a colour", "tell me the name of the animal"],
        Sampling(group_size=8, temperature=1.0, max_completion_tokens=8, job_seed=0, step=0),
        after=(1, 10),
    )


def test_the_sampler_sees_the_whole_update(seen: dict[str, float]) -> None:
    assert seen["captured_step_1"] == pytest.approx(1, abs=0.01)
    assert seen["captured_step_10"] == pytest.approx(1, abs=0.01)


def test_an_adapter_merged_into_bfloat16_would_be_seen(seen: dict[str, float]) -> None:
    """The control: the same measure on the way we do not go."""
    assert seen["merged_step_1"] < 0.5
    assert seen["merged_step_10"] < 0.8
