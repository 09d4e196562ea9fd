"""Families that vLLM computes in its own way: fused projections, windows, norms of heads, several sizes of heads."""

from pathlib import Path

import pytest

from tests.families.vllm import HOW, PROMPTS, RUN, largest_difference, started
from tests.families.zoo import FAMILIES, Family
from worker.engine.extension import adaptable
from worker.packages import vllm_version
from worker.refusals import SamplerUnusable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed"),
]
SAMPLED = ["Gemma 4"]  # which has all of these
SAMPLED_AT_NIGHT = ["Phi-3", "Gemma 3", "Mistral", "Qwen 3"]


@pytest.fixture(autouse=True)
def bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or the engine would compile vLLM again


def named(title: str) -> Family:
    [family] = [one for one in FAMILIES if one.title == title]
    return family


@pytest.mark.parametrize(
    "title", [*SAMPLED, *(pytest.param(title, marks=pytest.mark.thorough) for title in SAMPLED_AT_NIGHT)]
)
def test_vllm_samples_from_the_policy_with_its_adapter(tmp_path: Path, title: str) -> None:
    with started(named(title), tmp_path) as (policy, sampler):
        assert largest_difference(policy, sampler) < 1e-3
        assert policy.left_out == []


def test_a_module_that_vllm_expects_in_parts_takes_adapters_under_their_names_only() -> None:
    packed = {"mlp.gate_up": ["mlp.gate", "mlp.up"], "in_proj": ["in_z", "in_x", "in_b"]}

    names = adaptable(["mlp.gate_up", "mlp.down", "in_proj"], packed, unsplit={"in_proj"})

    assert names == {"mlp.gate", "mlp.up", "mlp.down", "in_proj", "in_z", "in_x", "in_b"}


@pytest.mark.thorough  # test_vllm_sampler.py has another reason of vLLM's by day
def test_a_family_without_adapters_in_vllm_is_refused_by_name(tmp_path: Path) -> None:
    with (
        started(named("StableLM"), tmp_path) as (_, sampler),
        pytest.raises(SamplerUnusable, match=r"does not support LoRA.*`sampler = \"transformers\"`"),
    ):
        list(sampler.answers(PROMPTS, HOW))


def test_the_families_tested_here_are_in_the_table() -> None:
    assert {*SAMPLED, *SAMPLED_AT_NIGHT} <= {title for title, result in RUN.items() if result == "exact"}
    assert set(RUN) <= {family.title for family in FAMILIES}
