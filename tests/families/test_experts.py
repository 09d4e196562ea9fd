"""Adapters on the experts of every mixture: trained as PEFT computes them, or refused by name."""

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn

from core.jobs.hyperparameter_groups import LoraTargets
from core.registry import BaseModelEntry
from tests.families.zoo import CONTEXT, FAMILIES, Family
from worker.checks import compatibility
from worker.model import memory, sizing
from worker.model.adapters import fused_experts
from worker.model.architecture import class_of, has_experts, without_weights
from worker.model.policy import Policy, load_base, read_config
from worker.refusals import InvalidTargets, UnsupportedModel
from worker.serving.continuous import ServedModel
from worker.serving.export import TEXTS, merge

# Whose class only a saved config names; experts in embeddings; and a tiny config without a layer of experts.
OTHERS = {"Mistral 4", "Doge", "Nemotron-H"}
MIXTURES = [one for one in FAMILIES if has_experts(one.config()) and one.title not in OTHERS]
# Their experts are computed by code of their own.
REFUSED = {"Llama 4", "JetMoE", "LongCat Flash"}
ACTIVE = {"ZAYA": 1, "MiniMax-M3": 4}  # the experts of a token; of all others two
FIRST = {"Qwen 3 MoE", "Mixtral", "gpt-oss", "Qwen 3.5 MoE", "DeepSeek V3, R1", "GLM 4.5"}


@pytest.mark.parametrize("family", MIXTURES, ids=lambda family: family.title)
def test_the_experts_of_a_family_are_one_tensor_and_no_linear_layers(family: Family) -> None:
    """If this fails for a new version of transformers, that family's experts could have plain adapters."""
    model = without_weights(family.config())
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search(r"experts\.\d+\.", name)
    ]

    assert fused_experts(model)
    assert linear == []


def policy_on(folder: Path) -> Policy:
    """With random numbers in an adapter on attention and experts."""
    entry = BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)
    base = load_base("tiny", entry, folder, "cpu")
    return Policy(base, rank=8, alpha=16, seed=0, targets=["attention", "experts"])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, id=one.title, marks=() if one.title in FIRST else pytest.mark.thorough)
        for one in MIXTURES
        if one.title not in REFUSED
    ],
)
def test_an_adapter_on_experts_is_trained_saved_and_loaded_as_the_same_model(
    family: Family, tmp_path: Path
) -> None:
    """By the trainer, by the file, and by plain PEFT on another copy of the base model."""
    folder = family.save(tmp_path / "base")
    policy = policy_on(folder)
    assert policy.expert_rank == 8 // ACTIVE.get(family.title, 2)
    router = {
        name for name, one in policy.model.named_parameters() if one.requires_grad and "lora_" not in name
    }
    assert not router
    verdict = compatibility.probe(policy, sampled=True)
    assert verdict.largest < 1e-3
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(0, 0.05, generator=generator)

    policy.save(tmp_path / "adapter")
    resumed = policy_on(folder)
    resumed.load(tmp_path / "adapter")
    base = class_of(read_config(folder)).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([list(range(3, 33))])
    with torch.no_grad():
        alone = base(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        ours = policy.model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        plain = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        theirs = plain(input_ids=ids, use_cache=False).logits.log_softmax(-1)

    for one, other in zip(policy.trainable, resumed.trainable, strict=True):
        assert torch.equal(one, other)
    # Recurrent states carry the rounding of every token to the next.
    near = 1e-5 if verdict.route.forward == "packed" else 1e-4
    assert (ours - theirs).abs().max() < near
    assert (ours - alone).abs().max() > 0.1


@pytest.mark.parametrize("title", ["Qwen 3 MoE", "gpt-oss"])
def test_a_merged_model_has_the_adapter_in_its_experts(title: str, tmp_path: Path) -> None:
    [family] = [one for one in MIXTURES if one.title == title]
    folder = family.save(tmp_path / "base")
    policy = policy_on(folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(0, 0.05, generator=generator)
    policy.save(tmp_path / "adapter")
    for name in TEXTS:  # an export has them
        (tmp_path / "adapter" / name).touch()

    entry = BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)
    merge(entry, tmp_path, tmp_path / "adapter", tmp_path / "merged")

    merged = class_of(read_config(tmp_path / "merged")).from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([list(range(3, 33))])
    with torch.no_grad():
        torch.testing.assert_close(
            merged(input_ids=ids).logits, policy.model(input_ids=ids).logits, atol=1e-4, rtol=1e-4
        )


def test_the_inference_servers_own_engine_refuses_an_adapter_on_experts(tmp_path: Path) -> None:
    """It would answer as the base model where the experts are changed."""
    [family] = [one for one in MIXTURES if one.title == "Qwen 3 MoE"]
    folder = family.save(tmp_path / "base")
    policy_on(folder).save(tmp_path / "adapter")
    entry = BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)
    served = ServedModel(load_base("tiny", entry, folder, "cpu"))

    with pytest.raises(UnsupportedModel, match=r"it changes model\.layers\.0\.mlp\.experts\.0\.down_proj"):
        served.lora(tmp_path / "adapter")


@pytest.mark.parametrize("title", ["Qwen 3 MoE", "gpt-oss", "DeepSeek V3, R1"])
def test_memory_counts_the_adapters_of_experts_as_they_are(title: str, tmp_path: Path) -> None:
    [family] = [one for one in MIXTURES if one.title == title]
    policy = policy_on(family.save(tmp_path))
    shape = memory.shape_of(policy.causal.config, torch.float32)
    targets: LoraTargets = ["attention", "experts"]

    assert sizing.adapter_parameters(shape, 8, targets) == sum(one.numel() for one in policy.trainable)
    alone = sizing.slot_bytes(shape, 8)
    assert sizing.slot_bytes(shape, 8, targets=targets) > alone
    assert sizing.slot_bytes(shape, 8, targets="attention") == alone


@pytest.mark.parametrize("title", sorted(REFUSED))
def test_experts_that_are_computed_otherwise_are_refused_by_name(title: str, tmp_path: Path) -> None:
    [family] = [one for one in MIXTURES if one.title == title]

    with pytest.raises(InvalidTargets, match="'experts' names experts that are not computed through"):
        policy_on(family.save(tmp_path))
