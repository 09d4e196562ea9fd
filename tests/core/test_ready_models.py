"""The entries of examples/models.toml: valid, and of families that are trained."""

import re
from pathlib import Path

import pytest

from core.registry import Registry

ROOT = Path(__file__).parents[2]
READY = Registry.load(ROOT / "examples/models.toml")
# A part of the name of an entry, and the `model_type` in the table of families.
FAMILIES = {
    "Qwen3-": "qwen3",
    "Qwen3-30B-A3B": "qwen3_moe",
    "Qwen3.5": "qwen3_5_text",
    "gemma-3": "gemma3_text",
    "Llama-3": "llama",
    "Mistral": "mistral",
    "Ministral": "mistral",  # the 8B of 2024
    "hi-4": "phi3",
    "gpt-oss": "gpt_oss",
    "Olmo-3": "olmo3",
    "granite-4": "granitemoehybrid",
    "SmolLM3": "smollm3",
}


@pytest.mark.parametrize("name", READY.models)
def test_a_ready_entry_names_a_model_on_the_hub(name: str) -> None:
    entry = READY.models[name]

    assert entry.hub is not None
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.hub) and entry.hub.endswith(f"/{name}")
    assert (entry.dtype, entry.sampler) == ("bfloat16", None)
    assert 4096 <= entry.context <= 16_384


@pytest.mark.parametrize("name", READY.models)
def test_a_ready_entry_is_of_a_family_that_is_trained(name: str) -> None:
    model_type = max((part, kind) for part, kind in FAMILIES.items() if part in name)[1]

    table = (ROOT / "docs/reference/model-families.md").read_text()
    [row, *_] = [line for line in table.splitlines() if f"| `{model_type}` |" in line]
    _, _, _, training, sampler, *_ = row.split("|")
    assert "refused" not in training + sampler


def test_every_popular_family_is_there() -> None:
    assert not [part for part in FAMILIES if not any(part in name for name in READY.models)]


def test_a_context_beyond_that_of_a_rotary_embedding_is_not_given() -> None:
    assert READY.models["Phi-4-mini-instruct"].context == 4096
