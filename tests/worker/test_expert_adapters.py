"""Adapters on the experts of mixtures: what they compute, their gradients, and their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from tests.families.zoo import FAMILIES, Family
from tests.present import present
from worker.model import experts, memory, sizing
from worker.model.expert_files import (
    Expert,
    ExpertPair,
    FusedPair,
    PerExpert,
    layout_of,
    to_fused,
    to_per_expert,
)
from worker.model.quantized import files_by_tensor
from worker.model.sharding import name_in_files

TITLES = ("Qwen 3 MoE", "Mixtral", "gpt-oss", "Qwen 3.5 MoE", "DeepSeek V3, R1", "GLM 4.5")
RANK, TOKENS = 3, 40


def family(title: str) -> Family:
    [found] = [one for one in FAMILIES if one.title == title]
    return found


def adapted(title: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model with random adapters on its experts alone, and the outermost wrapper of the first of them."""
    model = family(title).model().to(dtype)
    names = [
        f"{name}.{projection}"
        for name in experts.adaptable_experts(model)
        for projection in experts.PROJECTIONS
    ]
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=[], target_parameters=names)
    peft = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3, generator=generator)
    experts.install(peft)
    return peft, experts.outermost(peft)[0]


def routed(layer: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts of each token, and their weights. One expert has no token."""
    generator = torch.Generator().manual_seed(2)
    base = layer.get_base_layer()
    count, hidden = len(base.gate_up_proj), 64
    chosen = torch.stack([torch.randperm(count - 1, generator=generator)[:2] + 1 for _ in range(TOKENS)])
    states = torch.randn(TOKENS, hidden, generator=generator).to(dtype)
    weights = torch.rand(TOKENS, 2, generator=generator).to(dtype)
    return states.requires_grad_(), chosen, weights.requires_grad_()


def gated(x: Tensor, is_concatenated: bool) -> Tensor:
    """The gate's activation times up; if the two alternate, as gpt-oss computes it."""
    if is_concatenated:
        gate, up = x.chunk(2)
        return silu(gate) * up
    gate, up = x[::2].clamp(max=7), x[1::2].clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def looped(layer: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same, token by token and expert by expert, of adapters as PEFT documents them."""
    base = layer.get_base_layer()
    of = {name: experts.ExpertAdapter.of(one) for name, one in experts.wrappers_of(layer).items()}

    def projected(name: str, number: int, x: Tensor) -> Tensor:
        adapter = of[name]
        a = adapter.a.reshape(adapter.experts, RANK, -1)[number].to(x.dtype)
        b = adapter.b.reshape(-1, RANK, adapter.experts)[:, :, number].to(x.dtype)
        weight = getattr(base, name)[number].to(x.dtype)
        weight = weight.t() if base.is_transposed else weight
        bias = getattr(base, f"{name}_bias")[number].to(x.dtype) if base.has_bias else 0
        output: Tensor = (weight + adapter.scale * b @ a) @ x + bias
        return output

    rows = []
    for x, numbers, shares in zip(states, chosen.tolist(), weights, strict=True):
        outputs = [
            share
            * projected(
                "down_proj", number, gated(projected("gate_up_proj", number, x), base.is_concatenated)
            )
            for number, share in zip(numbers, shares, strict=True)
        ]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


def gradients(layer: Any, output: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    return list(torch.autograd.grad((output * probe).sum(), [*trained, *inputs]))


@pytest.mark.parametrize("title", TITLES)
def test_the_gradients_of_every_expert_are_those_of_a_loop_in_float64(title: str) -> None:
    _, layer = adapted(title)
    states, chosen, weights = routed(layer)
    exact = states.detach().double().requires_grad_(), weights.detach().double().requires_grad_()

    output = layer(states, chosen, weights)
    expected = looped(layer, exact[0], chosen, exact[1])

    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
    ours = gradients(layer, output, (states, weights))
    theirs = gradients(layer, expected, exact)
    for mine, one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), one.double(), rtol=1e-4, atol=1e-4 * one.abs().max().item())
        assert one.any()


def test_an_expert_without_tokens_has_no_gradient() -> None:
    _, layer = adapted("Qwen 3 MoE")
    states, chosen, weights = routed(layer)

    found = gradients(layer, layer(states, chosen, weights), ())

    for gradient in found:  # A has the rows of an expert together, B the columns of a rank
        by_expert = gradient.reshape(4, -1) if len(gradient) == 4 * RANK else gradient.reshape(-1, 4).t()
        assert not by_expert[0].any() and by_expert[1:].any(1).all()


def test_a_model_in_bfloat16_has_adapters_in_float32_and_rounds_once() -> None:
    _, layer = adapted("Mixtral", torch.bfloat16)
    states, chosen, weights = routed(layer, torch.bfloat16)

    output = layer(states, chosen, weights)

    assert {one.dtype for one in layer.parameters() if one.requires_grad} == {torch.float32}
    expected = looped(layer, states.double(), chosen, weights.double())
    assert output.dtype == torch.bfloat16
    assert (output.double() - expected).norm() / expected.norm() < 0.01
    ours, theirs = gradients(layer, output, ()), gradients(layer, expected, ())
    for mine, one in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32 and (mine - one).norm() / one.norm() < 0.02


def test_a_disabled_adapter_leaves_what_transformers_computes() -> None:
    model, layer = adapted("gpt-oss")
    states, chosen, weights = routed(layer)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(layer(states, chosen, weights), layer.get_base_layer()(states, chosen, weights))


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the largest tensor that is made while it is active, in elements."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {one.untyped_storage().data_ptr() for one in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in self._known:
                self.largest = max(self.largest, one.untyped_storage().nbytes() // one.element_size())
        return result


def test_nothing_as_large_as_the_weights_is_made_in_either_pass() -> None:
    many = Family(
        "many", "qwen3_moe", {**family("Qwen 3 MoE").options, "num_experts": 64, "num_hidden_layers": 1}
    )
    model = many.model()
    [name] = experts.adaptable_experts(model)
    config = LoraConfig(
        r=1, target_modules=[], target_parameters=[f"{name}.{one}" for one in experts.PROJECTIONS]
    )
    peft = get_peft_model(model, config)
    experts.install(peft)
    [layer] = experts.outermost(peft)
    base = layer.get_base_layer()
    smallest = min(base.gate_up_proj.numel(), base.down_proj.numel())

    with Allocations(list(peft.parameters())) as made:
        states, chosen, weights = routed(layer)
        layer(states, chosen, weights).sum().backward()

    assert 0 < made.largest <= smallest / 4


def kept_bytes(layer: Any, inputs: tuple[Tensor, ...]) -> int:
    """Of what autograd keeps of a forward pass, beside parameters and its inputs."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(*inputs)
    known = {one.untyped_storage().data_ptr() for one in [*layer.parameters(), *inputs]}
    return sum(size for place, size in kept.items() if place not in known)


@pytest.mark.parametrize("title", TITLES)
def test_the_plan_counts_what_autograd_keeps_for_adapters_on_experts(title: str) -> None:
    peft, layer = adapted(title)
    inputs = routed(layer)
    with peft.disable_adapter():
        without = kept_bytes(layer, inputs)

    kept = kept_bytes(layer, inputs) - without

    shape = memory.shape_of(family(title).config(), torch.float32)
    planned = sizing.ExpertBytes.of(shape, 2 * RANK, "experts")  # a token goes through two experts
    assert kept == pytest.approx(planned.token * TOKENS + planned.copies, rel=0.02)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class TestConversion:
    def test_a_fused_adapter_comes_back_exactly(self) -> None:
        experts, rank, hidden, inside = 5, 3, 8, 6
        gate_up = FusedPair(drawn(experts * rank, hidden), drawn(2 * inside, rank * experts))
        down = FusedPair(drawn(experts * rank, inside), drawn(hidden, rank * experts))

        back = to_fused(to_per_expert(gate_up, down, experts))

        for mine, one in zip(back, (gate_up, down), strict=True):
            assert torch.equal(mine.a, one.a) and torch.equal(mine.b, one.b)

    def test_the_matrices_of_an_expert_are_those_of_the_documented_layout(self) -> None:
        """A has the rows of an expert together, B the columns of a rank: read the other way round they are others."""
        experts, rank, inside = 3, 2, 4
        gate_up = FusedPair(drawn(experts * rank, 8), drawn(2 * inside, rank * experts))
        down = FusedPair(drawn(experts * rank, inside), drawn(8, rank * experts))

        one = to_per_expert(gate_up, down, experts)[1]

        assert torch.equal(one.gate.a, gate_up.a[2:4]) and torch.equal(one.up.a, gate_up.a[2:4])
        columns = gate_up.b[:, [1, 4]]
        assert torch.equal(one.gate.b, columns[:inside])
        assert torch.equal(one.up.b, columns[inside:])
        assert torch.equal(one.down.b, down.b[:, [1, 4]])

    def test_what_is_no_number_is_shared_too(self) -> None:
        """NaN equals nothing, and the rank of a file may not depend on it."""
        gate_up = FusedPair(torch.full((6, 8), torch.nan), drawn(8, 6))
        down = FusedPair(drawn(6, 4), drawn(8, 6))

        back, _ = to_fused(to_per_expert(gate_up, down, 2))

        assert back.a.shape == gate_up.a.shape and back.b.shape == gate_up.b.shape

    def test_gates_with_an_a_of_their_own_are_joined_at_twice_the_rank(self) -> None:
        experts, rank, hidden, inside = 2, 2, 8, 4
        pairs = [
            Expert(
                *(
                    ExpertPair(drawn(rank, size + 10 * n + k)[:, :size], drawn(out, rank + k)[:, :rank])
                    for k, (size, out) in enumerate(((hidden, inside), (hidden, inside), (inside, hidden)))
                )
            )
            for n in range(experts)
        ]

        gate_up, _ = to_fused(pairs)

        for one, fused in zip(pairs, gate_up.split(experts), strict=True):
            product = fused.b @ fused.a
            assert fused.a.shape == (2 * rank, hidden)
            gate, up = product[:inside], product[inside:]
            torch.testing.assert_close(gate, one.gate.b @ one.gate.a, rtol=0, atol=1e-6)
            torch.testing.assert_close(up, one.up.b @ one.up.a, rtol=0, atol=1e-6)


MODULE = "base_model.model.model.layers.0.mlp.experts"
LAYOUT = PerExpert("w1", "w3", "w2", 2, ".mlp.", ".block_sparse_moe.")


def saved(rank: int = 3) -> dict[str, Tensor]:
    return {
        f"{MODULE}.base_layer.lora_A.weight": drawn(2 * rank, 8),
        f"{MODULE}.base_layer.lora_B.weight": drawn(12, rank * 2),
        f"{MODULE}.lora_A.weight": drawn(2 * rank, 6),
        f"{MODULE}.lora_B.weight": drawn(8, rank * 2),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": drawn(rank, 8),
    }


class TestFiles:
    def test_a_file_has_every_expert_under_the_names_of_the_models_files(self) -> None:
        written = LAYOUT.to_file(saved())

        stored = "base_model.model.model.layers.0.block_sparse_moe.experts"
        assert len(written) == 1 + 2 * 3 * 2
        assert written[f"{stored}.1.w1.lora_A.weight"].shape == (3, 8)
        assert written[f"{stored}.1.w3.lora_B.weight"].shape == (6, 3)
        assert written[f"{stored}.0.w2.lora_A.weight"].shape == (3, 6)
        assert len({tensor.data_ptr() for tensor in written.values()}) == len(written)

    def test_it_is_read_back_exactly(self) -> None:
        back = LAYOUT.from_file(LAYOUT.to_file(saved()))

        assert back.keys() == saved().keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in saved().items())

    def test_a_file_in_pefts_layout_is_read_as_it_is(self) -> None:
        tensors = saved()

        assert LAYOUT.from_file(tensors) == tensors

    def test_a_layer_without_all_of_its_experts_is_not_joined(self) -> None:
        written = LAYOUT.to_file(saved())
        missing = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w2.lora_B.weight"
        del written[missing]

        assert LAYOUT.from_file(written).keys() == written.keys()

    def test_a_layer_of_the_file_belongs_to_the_module_of_experts(self) -> None:
        stored = MODULE.replace(".mlp.", ".block_sparse_moe.")

        assert LAYOUT.module_of(f"{stored}.1.w2") == MODULE
        assert LAYOUT.module_of("base_model.model.model.layers.0.self_attn.q_proj").endswith("q_proj")


@pytest.mark.parametrize(
    "title", ["Qwen 3 MoE", "Mixtral", "MiniMax-M2", "Phi-3.5 MoE", "Kimi Linear", "DeepSeek V4"]
)
def test_the_names_of_experts_are_those_of_the_models_files(title: str, tmp_path: Path) -> None:
    one = family(title)
    model = one.model()
    layout = present(layout_of(model, type(model).__name__))
    [module, *_] = experts.adaptable_experts(model)
    pair = {f"{module}.{half}": tensor for half, tensor in halves_of(model, module).items()}

    written = layout.to_file(pair)

    stored = files_by_tensor(one.save(tmp_path))
    names = {name.partition(".lora_")[0] for name in written}
    assert len(names) == 3 * layout.experts
    assert {name for name in names if f"{name}.weight" not in stored} == set()


def test_the_layout_is_that_of_vllms_class_for_the_files_and_not_of_the_text_part() -> None:
    """vLLM has a class for a whole model and one for its text alone, which read other files."""
    model = family("Qwen 3 MoE").model()

    assert layout_of(model, "Qwen3OmniMoeForConditionalGeneration") is None
    assert layout_of(model, "Qwen3MoeForCausalLM") is not None


def test_the_text_part_of_qwen_3_5_has_a_pair_for_each_expert_and_the_whole_model_has_not() -> None:
    model = family("Qwen 3.5 MoE").model()

    assert layout_of(model, "Qwen3_5MoeForCausalLM") is not None
    assert layout_of(model, "Qwen3_5MoeForConditionalGeneration") is None


def halves_of(model: Any, module: str) -> dict[str, Tensor]:
    """An adapter of rank 1 on a module of experts, by the ends of PEFT's names."""
    sizes = {
        f"{wrapper}lora_{half}": getattr(model.get_submodule(module), projection).shape[
            {"A": 2, "B": 1}[half]
        ]
        for wrapper, projection in (("base_layer.", "gate_up_proj"), ("", "down_proj"))
        for half in "AB"
    }
    count = len(model.get_submodule(module).gate_up_proj)
    return {
        f"{name}.weight": drawn(count, size) if name.endswith("A") else drawn(size, count)
        for name, size in sizes.items()
    }


def test_a_parameter_of_experts_has_its_own_name_in_the_files_of_a_sharded_model() -> None:
    """It is inside two wrappers of PEFT, one for each projection."""
    peft, _ = adapted("gpt-oss")
    base = dict(family("gpt-oss").model().named_parameters())

    frozen = {name_in_files(name) for name, one in peft.named_parameters() if not one.requires_grad}

    assert frozen == base.keys()
