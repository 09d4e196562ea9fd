"""Why experts have no adapter: docs/howto/models.md says what each library can do with them."""

import re

import pytest
from torch import nn

from tests.families.zoo import FAMILIES, Family
from worker.model.adapters import fused_experts
from worker.model.architecture import has_experts, without_weights

# Whose class only a saved config names; experts in embeddings; and a tiny config without a layer of experts.
OTHERS = {"Mistral 4", "Doge", "Nemotron-H"}
MIXTURES = [one for one in FAMILIES if has_experts(one.config()) and one.title not in OTHERS]


@pytest.mark.parametrize("family", MIXTURES, ids=lambda family: family.title)
def test_the_experts_of_a_family_are_one_tensor_and_no_linear_layers(family: Family) -> None:
    """If this fails for a new version of transformers, that family's experts could have adapters."""
    model = without_weights(family.config())
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search(r"experts\.\d+\.", name)
    ]

    assert fused_experts(model)
    assert linear == []
