import re
from pathlib import Path

import torch

from tests.families.table import in_docs
from tests.families.zoo import FAMILIES
from worker.model import memory

FEATURES = Path(__file__).parents[2] / "docs/explain/features.md"


def test_memory_is_planned_for_the_forward_of_the_page() -> None:
    """From the config alone. Where it is another, the sampler takes more waves, or the plan asks for more."""
    forwards = {
        cells[1].strip(): cells[3].strip() for row in in_docs().splitlines()[2:] if (cells := row.split("|"))
    }
    known = [one for one in FAMILIES if one.title != "Mistral 4"]  # whose class only a saved config names
    configs = {one.title: one.config() for one in known if not forwards[one.title].startswith("refused")}

    wrong = {
        title
        for title, config in configs.items()
        if memory.expects_rows(config) != (forwards[title] == "rows")
    }

    assert wrong == {"StableLM", "BioGPT", "RecurrentGemma", "DeepSeek V4"}
    assert all(memory.shape_of(config, torch.float32).own_token_bytes > 0 for config in configs.values())


def test_the_features_count_the_families_of_the_table() -> None:
    rows = in_docs().splitlines()[2:]
    supported = [row for row in rows if not row.split("|")[3].startswith(" refused")]

    assert re.findall(r"(\d+) of (\d+) tried", FEATURES.read_text()) == [
        (str(len(supported)), str(len(rows)))
    ]
