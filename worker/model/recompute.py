"""Keep less for the backward pass: what is computed element by element is computed again there.

Autograd keeps the result of each step of a norm in float32, and four results of a gated feed-forward layer. Here only
the inputs are kept. The matrix products, which take the time, are not repeated. Values and gradients are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class _Again(torch.autograd.Function):
    """function(*inputs), of which autograd keeps the inputs alone. The function's own weights are frozen."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        found = iter(torch.autograd.grad(output, [one for one in inputs if one.requires_grad], gradient))
        return None, *(next(found) if needed else None for needed in wanted)


def again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs). If a gradient is needed, the function is called again in the backward pass."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return function(*inputs)
    output: Tensor = _Again.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, eq=False)
class _Norm:
    """The forward of a norm whose weights are frozen."""

    own: Callable[[Tensor], Tensor]  # the module's

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return again(self.own, hidden_states)


@dataclass(frozen=True, eq=False)
class _Gated:
    """The forward of a gated feed-forward layer: down(activation(gate(x)) * up(x))."""

    layer: Any

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer.down_proj(
            again(self._product, self.layer.gate_proj(x), self.layer.up_proj(x))
        )
        return output

    def _product(self, gate: Tensor, up: Tensor) -> Tensor:
        product: Tensor = self.layer.act_fn(gate) * up
        return product


Replaced = _Norm | _Gated


def install(model: nn.Module) -> None:
    """Replace the forward of norms and gated feed-forward layers, whatever family the model belongs to.

    Call it while the adapters are zero or absent: layers are compared with their own forward on random inputs, and
    keep it if the results differ.
    """
    for module in model.modules():
        if _is_norm(module):
            module.forward = _Norm(module.forward)
        elif _is_gated(module):
            module.forward = _Gated(module)


def knows(model: nn.Module) -> bool:
    """Whether all feed-forward layers of the model are replaced. Experts in one tensor have a forward that is not."""
    modules = list(model.modules())
    experts = any(parameter.dim() == 3 for parameter in model.parameters())
    layers = max((len(module) for module in modules if isinstance(module, nn.ModuleList)), default=0)
    return not experts and 0 < layers <= sum(_is_gated(module) for module in modules)


@contextmanager
def uninstalled(model: nn.Module) -> Iterator[None]:
    """Restore the model's own forwards during the context, as a reference for these."""
    ours = {
        module: module.__dict__.pop("forward")
        for module in model.modules()
        if isinstance(module.__dict__.get("forward"), Replaced)
    }
    try:
        yield
    finally:
        for module, forward in ours.items():
            module.forward = forward


def _is_norm(module: nn.Module) -> bool:
    """A module without parts that is called a norm and gives a tensor of its input's shape."""
    weight = getattr(module, "weight", None)
    if "Norm" not in type(module).__name__ or list(module.children()) or not isinstance(weight, Tensor):
        return False
    return weight.dim() == 1 and _equal(module, _Norm(module.forward), len(weight), weight)


def _is_gated(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Module) for part in parts) or not callable(
        getattr(module, "act_fn", None)
    ):
        return False
    weight = getattr(parts[0], "weight", None)
    return isinstance(weight, Tensor) and _equal(module, _Gated(module), weight.shape[-1], weight)


@torch.no_grad()
def _equal(module: nn.Module, forward: Callable[[Tensor], Tensor], width: int, like: Tensor) -> bool:
    """Whether module and forward give the same for random numbers [1, 3, width]."""
    x = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0)).to(like)
    try:
        own, ours = module(x), forward(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False  # it takes other arguments (gated norms), or inputs of another shape
    if not isinstance(own, Tensor):
        return False
    return own.is_meta or torch.equal(own, ours)  # tensors without data have shapes only
