"""Adapters and the head in bfloat16, compared with the same formulas in float64."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from worker.model import lora

IN, OUT, RANK, SCALE = 96, 160, 4, 2.0


class Two(nn.Module):
    """Two layers on the same input, one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN, OUT, bias=False), nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.tanh(self.first(x)) * self.second(x)
        return output


def adapted(dtype: torch.dtype) -> Any:
    """Of numbers that bfloat16 has, so that models of all precisions are equal. Adapters are in float32 or float64."""
    torch.manual_seed(0)
    base = Two()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(parameter.bfloat16())
    config = LoraConfig(r=RANK, lora_alpha=int(SCALE * RANK), target_modules=["first", "second"])
    model = get_peft_model(base.requires_grad_(False).to(dtype), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape) * 0.1
                if dtype == torch.float64:
                    parameter.data = parameter.data.double()
    lora.install(model)
    return model


def results(model: Any, dtype: torch.dtype) -> list[Tensor]:
    """The output [2, 50, OUT], and the gradients of the input and of the adapters."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 50, IN, generator=generator).bfloat16().to(dtype).requires_grad_()
    gradient = torch.randn(2, 50, OUT, generator=generator).bfloat16().to(dtype)
    output = model(x)
    output.backward(gradient)
    trained = [one for one in model.parameters() if one.requires_grad]
    found = [output, x.grad, *(one.grad for one in trained)]
    for one in trained:
        one.grad = None
    return [one.detach().clone() for one in found if one is not None]


def distance(ours: Tensor, exact: Tensor) -> float:
    found: float = ((ours.double() - exact.double()).norm() / exact.double().norm()).item()
    return found


def test_in_float64_values_and_gradients_are_those_of_peft() -> None:
    model = adapted(torch.float64)

    ours = results(model, torch.float64)

    with lora.uninstalled(model):
        peft = results(model, torch.float64)
    assert len(ours) == len(peft) == 6
    assert max(distance(a, b) for a, b in zip(ours, peft, strict=True)) < 1e-14


def test_in_bfloat16_they_are_those_of_float64_but_for_rounding() -> None:
    exact = results(adapted(torch.float64), torch.float64)

    ours = results(adapted(torch.bfloat16), torch.bfloat16)

    assert [one.dtype for one in ours] == [torch.bfloat16] * 2 + [torch.float32] * 4
    assert [distance(a, b) for a, b in zip(ours, exact, strict=True)] == pytest.approx([0.003] * 6, abs=0.003)


def test_a_disabled_adapter_is_the_base() -> None:
    model = adapted(torch.bfloat16)
    x = torch.randn(3, IN).bfloat16()

    with model.disable_adapter():
        found = model(x)

    base = model.get_base_model()
    layers = [base.first.base_layer, base.second.base_layer]
    first, second = (nn.functional.linear(x, layer.weight, layer.bias) for layer in layers)
    assert torch.equal(found, torch.tanh(first) * second)


@pytest.mark.parametrize("bias", [False, True])
def test_a_float32_output_is_not_rounded_to_the_precision_of_the_weight(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(IN, 1000, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(7, IN).bfloat16().requires_grad_()
    gradient = torch.randn(7, 1000)

    output = lora.FrozenLinear(layer, float32=True)(x)
    torch.autograd.backward(output, gradient)

    exact = x.detach().double() @ layer.weight.double().t() + (layer.bias.double() if bias else 0.0)
    assert output.dtype == torch.float32
    assert distance(output, exact) < 1e-6
    assert distance(lora.FrozenLinear(layer)(x), exact) > 1e-3
    assert x.grad is not None
    assert distance(x.grad, gradient.double() @ layer.weight.double()) < 0.006
