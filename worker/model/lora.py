"""Compute a frozen layer and its adapter, base(x) + scale * B(A(x)), in few kernel calls.

PEFT creates and saves the adapters. Its own forward needs about ten operations per layer, a third of the time when
decoding one token per row.

The adapter is float32 for any base precision, so that small updates are not rounded away. It is computed in the
precision of the base, as vLLM does. Except in float32 on a CPU, adapter and layer are one operation for autograd
(`_Adapted`): four additions and a multiplication of whole activations are parts of its matrix products.

On a CPU the frozen weights are also kept in oneDNN's own layout, for the forward and for the backward product. Measured
on an AMD EPYC with two cores: 2 to 3 times quicker than torch's linear, whose library does not use AVX-512 on AMD.
It needs two more copies of the frozen weights, which is little for models that are trained on a CPU. Weights that are
packed (packed.py) get that layout whenever they are decoded, so that they give what plain weights give, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import linear

from worker.model import experts
from worker.model.packed import PackedLinear

NARROW = (torch.bfloat16, torch.float16)


class FrozenLinear:
    """x [..., in] -> [..., out] with a weight that never changes, and the gradient with respect to x only."""

    def __init__(self, layer: nn.Linear, *, trained: bool = True, float32: bool = False) -> None:
        """Keep the layer's own weight, and on a CPU copies of it unless it is packed.

        Args:
            trained: whether the gradient is needed. If not, skips that copy of the weight.
            float32: return float32, not rounded to the precision of the weight.
        """
        self.layer, self.float32 = layer, float32
        device, dtype = _kind_of(layer)
        self.is_cpu_float32 = device.type == "cpu" and dtype == torch.float32
        self._weights: _ReorderedWeights | None = None
        if self.is_cpu_float32 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            packed = isinstance(layer, PackedLinear)
            self._weights = (
                _DecodedWeights(layer)
                if packed
                else _CopiedWeights.of(layer.weight.detach(), trained=trained)
            )

    def __call__(self, x: Tensor) -> Tensor:
        if self.float32 and x.dtype in NARROW:
            return linear_in_float32(x, self.layer)
        if self._weights is None or x.dtype != torch.float32:
            if isinstance(self.layer, PackedLinear):  # whose own `forward` may have been replaced
                return PackedLinear.forward(self.layer, x)
            return linear(x, self.layer.weight, self.layer.bias)
        if x.requires_grad:
            output: Tensor = _Reordered.apply(x, self._weights)  # type: ignore[no-untyped-call]
        else:
            output = _product(x, self._weights.forward())
        return output if self.layer.bias is None else output + self.layer.bias

    def of_input(self, gradient: Tensor) -> Tensor:
        """The gradient [M, out] of an output, in the precision of the weight -> that of x [M, in] in float32."""
        if self._weights is not None and gradient.dtype == torch.float32:
            return _product(gradient, self._weights.backward())
        return _product_in_float32(gradient, self.layer.weight)


def _kind_of(layer: nn.Linear) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a layer's weight, which is not decoded if it is packed."""
    if isinstance(layer, PackedLinear):
        return layer.device, layer.dtype
    return layer.weight.device, layer.weight.dtype


class _ReorderedWeights(Protocol):
    """A weight [out, in] in oneDNN's own layout."""

    def forward(self) -> Tensor:
        """For x W'."""
        ...

    def backward(self) -> Tensor:
        """For g W."""
        ...


@dataclass(frozen=True)
class _CopiedWeights:
    """Implements _ReorderedWeights with copies."""

    ahead: Tensor
    back: Tensor | None

    @staticmethod
    def of(weight: Tensor, *, trained: bool) -> "_CopiedWeights":
        return _CopiedWeights(_reordered(weight), _reordered(weight.t().contiguous()) if trained else None)

    def forward(self) -> Tensor:
        return self.ahead

    def backward(self) -> Tensor:
        assert self.back is not None, "the layer was not made for training"
        return self.back


@dataclass(frozen=True)
class _DecodedWeights:
    """Implements _ReorderedWeights: decoded at each use."""

    layer: nn.Linear

    def forward(self) -> Tensor:
        return _reordered(self.layer.weight)

    def backward(self) -> Tensor:
        return _reordered(self.layer.weight.t().contiguous())


def _reordered(weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return found


class TrainedLinear:
    """x [..., in] -> x W' + bias [..., out] in float32, with weights that have gradients."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return linear_in_float32(x, self.layer)

    def of_input(self, gradient: Tensor) -> Tensor:
        """As that of FrozenLinear."""
        return _product_in_float32(gradient, self.layer.weight)


def linear_in_float32(x: Tensor, layer: nn.Linear) -> Tensor:
    """x [..., in] -> [..., out] in float32, whatever the precision of the weight, which may be trained."""
    if x.dtype not in NARROW:
        return linear(x, layer.weight, layer.bias)
    wide: Tensor = _InFloat32.apply(x, layer.weight)  # type: ignore[no-untyped-call]
    return wide if layer.bias is None else wide + layer.bias


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: _ReorderedWeights) -> Tensor:
        # It needs no gradients, and a tensor in oneDNN's layout cannot be saved the usual way.
        ctx.weights = weights
        return _product(x, weights.forward())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _product(gradient.contiguous(), ctx.weights.backward()), None


def _product(x: Tensor, reordered: Tensor) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")
    return output


def _product_in_float32(left: Tensor, right: Tensor) -> Tensor:
    """left [M, K] @ right [K, N] with a float32 result of narrow factors. GPUs add up in float32 in any case."""
    if left.dtype not in NARROW:
        return left @ right
    if left.device.type == "cpu":  # PyTorch has `out_dtype` for other devices only
        return left.float() @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [M, n]"""
    return x.reshape(-1, x.shape[-1])


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left [M, K] @ right [K, N] in one operation."""
    return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)


class _InFloat32(torch.autograd.Function):
    """x [..., in] -> x W' [..., out] in float32. Keeps x only if W is trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product_in_float32(_rows(x), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = _rows(gradient).t() @ _rows(x) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def _weight(layer: PackedLinear | None, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`weight`, or that of the packed layer in its place, which is decoded."""
    if weight is None:
        assert layer is not None, "a weight, or a layer that has it packed"
        return layer.weight_in(dtype)
    return weight


class _Adapted(torch.autograd.Function):
    """x [..., in] -> x W' + bias + scale * x A' B' [..., out], with a frozen W and gradients of A and B in float32.

    Keeps x, which layers with the same input share, scale * x A', and A and B in the precision of x. The product with B
    is added up in the output, and its counterpart in the gradient of x. W is None if the layer decodes it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: PackedLinear | None,
        weight: Tensor | None,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        output = linear(x, _weight(layer, weight, x.dtype), bias)
        a, b = a.to(x.dtype), b.to(x.dtype)
        low = _scaled_product(_rows(x), a.t(), scale)
        output.view(-1, output.shape[-1]).addmm_(low, b.t())
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.layer, ctx.scale = layer, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, a, b = ctx.saved_tensors
        gradient = _rows(gradient)
        of_low = _scaled_product(gradient, b, ctx.scale)
        of_x = of_a = of_b = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ _weight(ctx.layer, weight, x.dtype)).addmm_(of_low, a).view_as(x)
        if ctx.needs_input_grad[4]:
            of_a = _product_in_float32(of_low.t(), _rows(x))
            of_b = _product_in_float32(gradient.t(), low)
        return of_x, None, None, None, of_a, of_b, None


def install(model: nn.Module) -> None:
    """Replace the forward of every adapted layer of a PEFT model."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            _install(module)
    experts.install(model)


@contextmanager
def uninstalled(model: nn.Module) -> Iterator[None]:
    """Restore PEFT's own forward in every adapted layer during the context, as a reference for ours."""
    ours = {
        module: module.__dict__.pop("forward")
        for module in model.modules()
        if isinstance(module, LoraLinear | ParamWrapper) and "forward" in module.__dict__
    }
    try:
        yield
    finally:
        for module, forward in ours.items():
            module.forward = forward


def _install(layer: LoraLinear) -> None:
    [adapter] = layer.active_adapters
    frozen = FrozenLinear(layer.base_layer)
    base = frozen.layer
    a, b, scale = layer.lora_A[adapter], layer.lora_B[adapter], layer.scaling[adapter]

    def forward(x: Tensor) -> Tensor:
        if layer.disable_adapters:
            return frozen(x)
        if not frozen.is_cpu_float32:
            own = (base, None) if isinstance(base, PackedLinear) else (None, base.weight)
            adapted: Tensor = _Adapted.apply(x, *own, base.bias, a.weight, b.weight, scale)  # type: ignore[no-untyped-call]
            return adapted
        output = frozen(x)
        return torch.add(output, linear(linear(x, a.weight), b.weight), alpha=scale)

    layer.forward = forward
