"""examples/models.toml against what is known of its models, and what the installed libraries can load."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers

from core.registry import Registry
from tests.families.table import in_docs
from worker.packages import vllm_version

REGISTRY = Registry.load(Path(__file__).parents[2] / "examples/models.toml")


@dataclass(frozen=True)
class Published:
    """What the model's config.json on the hub says."""

    architecture: str
    family: str  # the `model_type` of its text model
    context: int  # tokens; a longer one would change its rotary embedding, or be beyond its positions


QWEN3 = Published("Qwen3ForCausalLM", "qwen3", 40_960)
GEMMA3 = Published("Gemma3ForConditionalGeneration", "gemma3_text", 131_072)
LLAMA3 = Published("LlamaForCausalLM", "llama", 131_072)
MISTRAL = Published("MistralForCausalLM", "mistral", 32_768)
OLMO3 = Published("Olmo3ForCausalLM", "olmo3", 65_536)
GRANITE4 = Published("GraniteMoeHybridForCausalLM", "granitemoehybrid", 131_072)
PUBLISHED = {
    "Qwen/Qwen3-0.6B": QWEN3,
    "Qwen/Qwen3-1.7B": QWEN3,
    "Qwen/Qwen3-4B": QWEN3,
    "Qwen/Qwen3-8B": QWEN3,
    "Qwen/Qwen3-14B": QWEN3,
    "Qwen/Qwen3-4B-Instruct-2507": Published("Qwen3ForCausalLM", "qwen3", 262_144),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Published("Qwen3MoeForCausalLM", "qwen3_moe", 262_144),
    "Qwen/Qwen3.5-4B": Published("Qwen3_5ForConditionalGeneration", "qwen3_5_text", 262_144),
    "google/gemma-3-1b-it": Published("Gemma3ForCausalLM", "gemma3_text", 32_768),
    "google/gemma-3-4b-it": GEMMA3,
    "google/gemma-3-12b-it": GEMMA3,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA3,
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA3,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA3,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA3,
    "mistralai/Mistral-7B-Instruct-v0.3": MISTRAL,
    "mistralai/Ministral-8B-Instruct-2410": MISTRAL,
    "microsoft/phi-4": Published("Phi3ForCausalLM", "phi3", 16_384),
    "microsoft/Phi-4-mini-instruct": Published("Phi3ForCausalLM", "phi3", 4096),
    "openai/gpt-oss-20b": Published("GptOssForCausalLM", "gpt_oss", 131_072),
    "allenai/Olmo-3-7B-Instruct": OLMO3,
    "allenai/Olmo-3-7B-Think": OLMO3,
    "ibm-granite/granite-4.0-micro": GRANITE4,
    "ibm-granite/granite-4.0-h-micro": GRANITE4,
    "HuggingFaceTB/SmolLM3-3B": Published("SmolLM3ForCausalLM", "smollm3", 65_536),
}


def test_each_entry_names_its_model_as_the_hub_does() -> None:
    assert {name: entry.hub for name, entry in REGISTRY.models.items()} == {
        hub.rpartition("/")[2]: hub for hub in PUBLISHED
    }


def test_no_context_is_beyond_what_the_model_was_published_with() -> None:
    longer = [
        name for name, entry in REGISTRY.models.items() if entry.context > PUBLISHED[entry.hub or ""].context
    ]

    assert longer == []


def test_transformers_has_each_architecture() -> None:
    architectures = {model.architecture for model in PUBLISHED.values()}

    assert [one for one in sorted(architectures) if not hasattr(transformers, one)] == []


def test_each_family_is_one_that_was_tried() -> None:
    rows = [[cell.strip(" `") for cell in row.split("|")] for row in in_docs().splitlines()[2:]]
    tried = {cells[2] for cells in rows if not cells[3].startswith("refused")}

    assert {model.family for model in PUBLISHED.values()} <= tried


@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
def test_vllm_has_each_architecture() -> None:
    """In the text of its registry: to import it takes ten seconds."""
    found = find_spec("vllm")
    assert found is not None and found.submodule_search_locations
    registry = Path(found.submodule_search_locations[0]) / "model_executor/models/registry.py"
    known = set(re.findall(r'^    "(\w+)": \(', registry.read_text(), re.MULTILINE))

    assert {model.architecture for model in PUBLISHED.values()} <= known
