"""Which layers get an adapter: by kind, by name, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Gemma4TextConfig, HunYuanMoEV1Config

from core.database.tables import Job
from core.jobs.hyperparameter_groups import LoraTargets
from core.jobs.hyperparameters import Hyperparameters, resolve
from core.registry import BaseModelEntry
from core.units import GIB
from tests.families.zoo import CONTEXT, FAMILIES, Family
from tests.hyperparameters import in_groups
from worker.checks import compatibility
from worker.model import memory, sizing
from worker.model.adapters import adaptable_layers, adapter_targets
from worker.model.architecture import without_weights
from worker.model.policy import Policy, load_base
from worker.model.targets import active_experts_in
from worker.prepare.model import BaseModel
from worker.prepare.task import refuse_absent_targets
from worker.refusals import InvalidTargets, UserMistake
from worker.sampling import Sampling
from worker.sampling.transformers import TransformersSampler
from worker.types import Prompt


def family(title: str) -> Family:
    [found] = [one for one in FAMILIES if one.title == title]
    return found


def policy_on(folder: Path, targets: LoraTargets) -> Policy:
    entry = BaseModelEntry(path=folder, dtype="float32", context=CONTEXT)
    return Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=0, targets=targets)


def kinds(title: str) -> dict[str, Any]:
    """By kind, the names of layers below the number of their decoder layer."""
    found: dict[str, Any] = {}
    for layer in adaptable_layers(without_weights(family(title).config())):
        found.setdefault(layer.kind, set()).add(layer.name.rpartition(".")[2])
    return found


@pytest.mark.parametrize(
    ("title", "attention", "feed_forward"),
    [
        ("Llama 2, 3", {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}),
        ("Phi-3", {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}),
        # The class of its attention has "Moe" in its name, as that of each mixture.
        ("Qwen 3 MoE", {"q_proj", "k_proj", "v_proj", "o_proj"}, None),
        ("OPT", {"q_proj", "k_proj", "v_proj", "out_proj"}, {"fc1", "fc2"}),
        # Linear attention, state spaces and convolutions mix tokens too.
        ("LFM 2", {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj"}, {"w1", "w2", "w3"}),
        ("Mamba 2", {"in_proj"}, None),
        ("Granite 4", {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj"}, {"input_linear", "output_linear"}),
    ],
)  # fmt: skip
def test_layers_are_told_apart_by_the_modules_around_them(
    title: str, attention: set[str], feed_forward: set[str] | None
) -> None:
    found = kinds(title)

    assert found["attention"] == attention
    assert found.get("feed-forward") == feed_forward


@pytest.mark.slow
def test_every_family_with_linear_layers_has_attention() -> None:
    without = {"GPT-2", "GPT", "Mistral 4"}  # Conv1D; and one that the automatic class does not know
    assert not [
        one.title
        for one in FAMILIES
        if one.title not in without
        and not any(layer.kind == "attention" for layer in adaptable_layers(without_weights(one.config())))
    ]


class TestChosen:
    def test_attention_alone_is_adapted_and_shown_by_kind(self, tiny_model: Path) -> None:
        policy = policy_on(tiny_model, "attention")

        [attention] = policy.coverage.kinds
        assert (attention.kind, attention.modules) == ("attention", 8)
        assert not [name for name, _ in policy.model.named_parameters() if "lora" in name and ".mlp." in name]
        assert policy.model.peft_config["default"].target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}

    def test_all_linear_is_both_kinds(self, tiny_model: Path) -> None:
        coverage = policy_on(tiny_model, "all-linear").coverage

        assert [(one.kind, one.modules) for one in coverage.kinds] == [("attention", 8), ("feed-forward", 6)]
        assert coverage.modules == 14
        assert sum(one["share"] for one in coverage.as_data()["adapted_by_kind"].values()) == coverage.share
        assert "attention 8 layers" in str(coverage) and "feed-forward 6 layers" in str(coverage)

    def test_names_are_the_ends_of_the_names_of_layers(self, tiny_model: Path) -> None:
        for targets, modules in (
            (["q_proj", "v_proj"], 4),
            (["layers.0.mlp.up_proj"], 1),
            (["mlp.up_proj"], 2),
        ):
            assert policy_on(tiny_model, targets).coverage.modules == modules

    def test_the_attention_of_a_hybrid_is_all_that_mixes_tokens(self, tmp_path: Path) -> None:
        policy = policy_on(family("Qwen 3.5").save(tmp_path), "attention")

        assert {one.kind for one in policy.coverage.kinds} == {"attention"}
        adapted = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
        assert any("linear_attn" in name for name in adapted) and any("self_attn" in name for name in adapted)

    @pytest.mark.parametrize("title", ["Llama 2, 3", "Qwen 3.5", "Qwen 3 MoE"])
    @pytest.mark.parametrize("targets", ["attention", ["q_proj", "v_proj"]], ids=str)
    @pytest.mark.slow
    def test_the_exported_adapter_is_the_same_model_in_plain_peft(
        self, title: str, targets: LoraTargets, tmp_path: Path
    ) -> None:
        folder = family(title).save(tmp_path / "base")
        policy = policy_on(folder, targets)
        compatibility.probe(policy, sampled=True)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in policy.trainable:
                parameter.normal_(std=0.2, generator=generator)
        policy.save(tmp_path / "adapter")
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        plain = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        prompt = Prompt(1, tuple(range(3, 23)), {})
        sampling = Sampling(group_size=2, temperature=1.0, max_completion_tokens=8, job_seed=0, step=0)

        for answer in TransformersSampler(policy).answers([prompt], sampling):
            ids = torch.tensor([[*prompt.ids, *answer.rollout.output_ids_T]])
            with torch.no_grad():
                logp = plain(input_ids=ids).logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)
            expected = logp.gather(-1, ids[0, len(prompt.ids) :, None])[:, 0]
            assert answer.rollout.logprobs_T == pytest.approx(expected.tolist(), abs=1e-3)


class TestActiveExperts:
    """A config names how many experts a token goes through, and the rank of each is divided by that."""

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"num_experts_per_tok": 8}, 8),
            ({"num_experts_per_token": 6}, 6),
            ({"moe_topk": 3}, 3),
            ({"moe_top_k": 5}, 5),
            ({"moe_k": 2}, 2),
            ({"top_k_experts": 4}, 4),
            ({"moe_topk": [4, 2]}, 4),
            ({"num_experts_per_tok": None, "moe_k": 7}, 7),
            ({}, None),
            ({"moe_topk": []}, None),
            ({"moe_topk": [0, 2, 2]}, 2),
        ],
        ids=str,
    )
    def test_it_has_one_of_several_names(self, fields: dict[str, Any], expected: int | None) -> None:
        assert active_experts_in(fields) == expected

    @pytest.mark.parametrize(
        "config",
        [
            Gemma4TextConfig(num_experts=8, top_k_experts=4, enable_moe_block=True, moe_intermediate_size=16),
            HunYuanMoEV1Config(num_experts=8, moe_topk=[4, 4], num_hidden_layers=2, head_dim=128),
        ],
        ids=["Gemma 4", "Hunyuan"],
    )
    def test_every_layer_of_experts_has_it(self, config: Any) -> None:
        layers = [layer for layer in adaptable_layers(without_weights(config)) if layer.experts]

        assert layers
        assert {(layer.experts, layer.rank(16)) for layer in layers} == {(8, 4)}

    def test_experts_of_an_unknown_number_of_a_token_have_no_adapter(self) -> None:
        model = without_weights(family("Qwen 3 MoE").config())
        del model.config.num_experts_per_tok

        with pytest.raises(InvalidTargets, match="does not say how many a token goes through"):
            adapter_targets(model, ["attention", "experts"])
        assert adapter_targets(model, "attention")


class TestRefused:
    @pytest.mark.parametrize(
        ("title", "target", "reason"),
        [
            ("Llama 2, 3", "query", "'query' names no layer"),
            ("Llama 2, 3", "lm_head", "'lm_head' is the head"),
            ("Llama 2, 3", "mlp", "'mlp' is no linear layer"),
            ("Llama 2, 3", "embed_tokens", "'embed_tokens' is no linear layer"),
            ("Qwen 3 MoE", "gate", "'gate' chooses experts"),
            ("Qwen 3 MoE", "down_proj", "'down_proj' is no linear layer: .*the fused weights of experts"),
            ("Llama 2, 3", "experts", "'experts' names nothing: the model is not a mixture"),
            ("Llama 4", "experts", "'experts' names experts that are not computed through transformers' interface"),
            ("Nemotron-H", "experts", "'experts' names experts .*, or have no gates"),
            ("Doge", "experts", "'experts' names experts .*, or have no gates"),
            ("Mamba 2", "out_proj", "'out_proj' is read by the kernels of state spaces"),
        ],
    )  # fmt: skip
    def test_a_name_without_an_adaptable_layer_is_refused_with_the_names_that_exist(
        self, title: str, target: str, reason: str
    ) -> None:
        model = without_weights(family(title).config())
        known = sorted({layer.name.rpartition(".")[2] for layer in adaptable_layers(model)})

        with pytest.raises(InvalidTargets, match=reason) as refused:
            adapter_targets(model, [known[0], target])

        assert str(refused.value).endswith(f"can have an adapter: {', '.join(known)}.")

    def test_a_layer_that_text_has_no_gradient_through_is_refused(self, tmp_path: Path) -> None:
        model = family("GLM 5").model()

        with pytest.raises(InvalidTargets, match=r"'indexer.wk' has no gradient of text"):
            adapter_targets(model, ["indexer.wk"])

    @pytest.mark.parametrize(
        ("advanced", "path"),
        [({"lora": {"targets": ["qproj"]}}, "lora.targets")],
    )
    def test_a_job_is_refused_at_the_name_of_its_request(
        self, advanced: dict[str, Any], path: str, tiny_model: Path
    ) -> None:
        entry = BaseModelEntry(path=tiny_model, dtype="float32", context=CONTEXT)
        config = family("Llama 2, 3").config()
        shape = memory.shape_of(config, torch.float32)
        base = BaseModel(entry, tiny_model, shape, "cpu", "transformers", "5")
        asked = Hyperparameters.model_validate({"advanced": in_groups(advanced)})
        targets = resolve(asked, rows=8, parameters=1000, context=CONTEXT).lora_targets
        job = Job(method="reinforcement", body={"hyperparameters": asked.model_dump()})

        with pytest.raises(UserMistake, match="'qproj' names no layer") as refused:
            refuse_absent_targets(base, targets, job.method)

        assert refused.value.param == f"method.reinforcement.hyperparameters.advanced.{path}"


@pytest.mark.parametrize("targets", ["all-linear", "attention", ["down_proj"]], ids=str)
@pytest.mark.parametrize("title", ["Llama 2, 3", "Qwen 3.5", "Qwen 3 MoE"])
def test_the_memory_of_an_adapter_is_that_of_its_layers(
    title: str, targets: LoraTargets, tmp_path: Path
) -> None:
    if (title, targets) == ("Qwen 3 MoE", ["down_proj"]):
        pytest.skip("the down projections of the experts are one fused tensor, which LoRA does not adapt")
    folder = family(title).save(tmp_path)
    policy = policy_on(folder, targets)
    shape = memory.shape_of(policy.model.get_base_model().config, torch.float32)

    counted = sizing.adapter_parameters(shape, 4, targets)

    assert counted == sum(parameter.numel() for parameter in policy.trainable)


def test_a_plan_counts_the_chosen_layers() -> None:
    shape = memory.shape_of(family("Llama 2, 3").config(), torch.float32)
    how: dict[str, Any] = {
        "rank": 64,
        "prompt": 50,
        "completion": 50,
        "batch": 2,
        "group": 2,
        "valid_rows": 1,
        "eval_samples": 1,
    }
    machine = sizing.Machine("cpu", GIB * 8, "transformers")

    cases: list[tuple[str, LoraTargets]] = [
        ("all", "all-linear"),
        ("attention", "attention"),
        ("q", ["q_proj"]),
    ]
    adapters = {
        name: sizing.plan("m", shape, sizing.workload(**how, targets=targets), machine).estimate.adapter
        for name, targets in cases
    }

    assert adapters["q"] == 16 * 64 * 2 * (64 + 64)
    assert adapters["q"] < adapters["attention"] < adapters["all"]
