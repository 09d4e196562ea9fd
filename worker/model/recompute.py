"""Keep less for the backward pass: what is computed element by element is computed again there.

Autograd keeps the result of each step of a norm in float32, and four results of a gated feed-forward layer. Here only
the inputs are kept. The matrix products, which take the time, are not repeated. Values and gradients are the same, but
for the rounding of norms that PyTorch has as one operation: it rounds once, where the model's own code rounds twice.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class _Recomputed(torch.autograd.Function):
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


def recompute_in_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs). If a gradient is needed, the function is called again in the backward pass."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return function(*inputs)
    output: Tensor = _Recomputed.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, eq=False)
class _Norm:
    """The forward of a norm whose weights are frozen."""

    own: Callable[[Tensor], Tensor]  # the module's

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return recompute_in_backward(self.own, hidden_states)


@dataclass(frozen=True, eq=False)
class _RootMeanSquare:
    """The forward of a norm whose weights are frozen and that equals PyTorch's rms_norm, one kernel on a GPU."""

    module: nn.Module
    epsilon: float
    own: Callable[[Tensor], Tensor]

    def __call__(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.module.weight.dtype:
            return recompute_in_backward(self.own, hidden_states)
        if hidden_states.device.type == "cpu":  # not one operation there: autograd would keep its parts
            return recompute_in_backward(self._norm, hidden_states)
        return self._norm(hidden_states)

    def _norm(self, x: Tensor) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return nn.functional.rms_norm(x, weight.shape, weight, self.epsilon)


class _GatedProduct(torch.autograd.Function):
    """activation(gate) * up, of which autograd keeps the two factors. The product itself is not computed again."""

    @staticmethod
    def forward(ctx: Any, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.activation(gate)
        of_gate = torch.autograd.grad(activated, gate, gradient * up)[0] if ctx.needs_input_grad[1] else None
        of_up = gradient * activated.detach() if ctx.needs_input_grad[2] else None
        return None, of_gate, of_up


@dataclass(frozen=True, eq=False)
class _Gated:
    """The forward of a gated feed-forward layer: down(activation(gate(x)) * up(x))."""

    layer: Any

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        product = _GatedProduct.apply(layer.act_fn, layer.gate_proj(x), layer.up_proj(x))  # type: ignore[no-untyped-call]
        output: Tensor = layer.down_proj(product)
        return output


Replaced = _Norm | _RootMeanSquare | _Gated


def install(model: nn.Module, *, norms: bool = True) -> None:
    """Replace the forward of norms and gated feed-forward layers, whatever family the model belongs to.

    Call it while the adapters are zero or absent: layers are compared with their own forward on random inputs, and
    keep it if the results differ.

    Args:
        norms: whether the weights of norms are frozen. If not, norms keep their own forward.
    """
    for module in model.modules():
        if norms and _is_norm(module):
            epsilon = _epsilon_of_rms(module)
            own = module.forward
            module.forward = _Norm(own) if epsilon is None else _RootMeanSquare(module, epsilon, own)
        elif _is_gated(module):
            module.forward = _Gated(module)


def keep_as_in(model: nn.Module, other: nn.Module) -> None:
    """Restore the own forward of modules whose like in `other` has its own: `model` had no weights to compare with."""
    replaced = {type(one) for one in other.modules() if isinstance(one.__dict__.get("forward"), Replaced)}
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), Replaced) and type(module) not in replaced:
            del module.forward


def norms_of_a_layer(model: nn.Module) -> int:
    """How many norms of hidden states a decoder layer has, at most; 2 if the layers are not in one list."""
    layers = max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len, default=())
    return max((sum(_called_norm(part) for part in layer.children()) for layer in layers), default=0) or 2


def supports_norms(model: nn.Module) -> bool:
    """Whether all norms of the model are replaced."""
    return all(_is_norm(module) for module in model.modules() if _called_norm(module))


def supports_gates(model: nn.Module) -> bool:
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


def _called_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def _is_norm(module: nn.Module) -> bool:
    """A module without parts that is called a norm, takes one tensor and gives one of its shape."""
    weight = getattr(module, "weight", None)
    if not _called_norm(module) or not isinstance(weight, Tensor):
        return False
    if len(inspect.signature(module.forward).parameters) != 1:  # gated norms of Mamba take a gate, or None
        return False
    return weight.dim() == 1 and _equal(module, _Norm(module.forward), len(weight), weight)


@torch.no_grad()
def _epsilon_of_rms(module: nn.Module) -> float | None:
    """The epsilon with which PyTorch's rms_norm is this norm; None: it is another function.

    Compared in float32, with other weights than the module's own, which may all be equal.
    """
    found = [getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
    epsilon = next((one for one in found if isinstance(one, float)), None)
    if epsilon is None:
        return None
    generator = torch.Generator().manual_seed(0)
    twin: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    for parameter in twin.parameters():
        parameter.normal_(generator=generator)
    sizes = torch.tensor([1e-3, 1.0, 30.0])[:, None]  # beside the first, the epsilon counts
    x = torch.randn(3, len(twin.weight), generator=generator) * sizes
    ours = nn.functional.rms_norm(x, twin.weight.shape, twin.weight, epsilon)
    try:
        return epsilon if torch.allclose(twin(x), ours, rtol=1e-5, atol=1e-6) else None
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return None


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
    """Whether module and forward give the same for random numbers [1, 3, width], small and large.

    Large ones, because some families clamp what comes out of the gate (DeepSeek V4 at 10, Step 3.7 at 16).
    """
    sizes = torch.tensor([1.0, 30.0, 1000.0])[:, None]
    x = (torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0)) * sizes).to(like)
    try:
        own, ours = module(x), forward(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False  # it takes other arguments (gated norms), or inputs of another shape
    if not isinstance(own, Tensor):
        return False
    return own.is_meta or torch.equal(own, ours)  # tensors without data have shapes only
