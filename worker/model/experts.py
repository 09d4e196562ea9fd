"""Adapters on the experts of a mixture, computed without a tensor as large as the experts' weights.

transformers keeps the weights of all experts of a layer in one tensor for each projection. PEFT makes and saves
adapters of such a parameter; its own forward adds scale * B A of every expert to the weights, which is as large as they
are. Here tokens are sorted by expert, and each product is one grouped product over all experts:
grouped(x, W) + scale * grouped(grouped(x, A), B). What chooses the experts (the router) is frozen.

As linear layers do, adapters compute in the precision of the model and are float32 themselves. The weights of a layer
are computed as transformers' own "grouped_mm" does.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, pad

GATE_UP, DOWN = "gate_up_proj", "down_proj"
PROJECTIONS = (GATE_UP, DOWN)
# Of the adapters of experts in a state dict of PEFT.
_IN_NAMES = re.compile(r"\.experts(\.base_layer)?\.lora_")
# A grouped product needs rows of a multiple of 16 bytes.
ROW_BYTES = 16


def adaptable_experts(model: nn.Module) -> dict[str, Any]:
    """The modules of experts that can have an adapter, by name: those with transformers' interface and gates.

    The interface (`use_experts_implementation`) says how the weights lie, and has every family compute with them in the
    same way.
    """
    return {name: module for name, module in model.named_modules() if _has_interface(module)}


def _has_interface(module: Any) -> bool:
    if not getattr(module, "has_gate", False) or not hasattr(module, "is_transposed"):
        return False
    weights = [getattr(module, name, None) for name in PROJECTIONS]
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def is_of_experts(name: str) -> bool:
    """Whether a tensor of an adapter, by PEFT's name, is of experts."""
    return _IN_NAMES.search(name) is not None


def width(experts: Any) -> int:
    """Inputs and outputs of all projections of all experts: times the rank, the parameters of their adapter."""
    return sum(
        count * (rows + columns) for count, rows, columns in (_size(experts, name) for name in PROJECTIONS)
    )


def intermediate_size(experts: Any) -> int:
    """The intermediate size of an expert."""
    inside: int = experts.down_proj.shape[1 if experts.is_transposed else 2]
    return inside


def _size(experts: Any, projection: str) -> tuple[int, int, int]:
    count, rows, columns = getattr(experts, projection).shape
    return count, rows, columns


def rank_pattern(rank: int) -> dict[str, int]:
    """PEFT's `rank_pattern` for adapters on experts of this rank; 0: there are none."""
    return {f"experts.{name}": rank for name in PROJECTIONS} if rank else {}


@dataclass(frozen=True)
class ExpertAdapter:
    """The adapter of one projection of the experts of a layer, as PEFT keeps it."""

    a: Tensor  # [experts * rank, in], the rows of an expert together
    b: Tensor  # [out, rank * experts], the columns of a rank together
    scale: float
    experts: int

    @staticmethod
    def of(layer: ParamWrapper) -> "ExpertAdapter":
        [name] = layer.active_adapters
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        return ExpertAdapter(a, b, layer.scaling[name], layer.num_experts)

    def __call__(self, x_SI: Tensor, ends_E: Tensor) -> Tensor:
        """scale * B(A(x)) of each row's expert, [S, in] -> [S, out]."""
        a_ERI = self.a.to(x_SI.dtype).view(self.experts, -1, self.a.shape[-1])
        b_ERO = self.b.to(x_SI.dtype).view(len(self.b), -1, self.experts).permute(2, 1, 0)
        missing = -a_ERI.shape[1] % (ROW_BYTES // x_SI.element_size())
        a_ERI, b_ERO = (pad(matrices, (0, 0, 0, missing)).contiguous() for matrices in (a_ERI, b_ERO))
        low_SR = grouped_mm(x_SI, a_ERI.transpose(1, 2), offs=ends_E) * self.scale
        return grouped_mm(low_SR, b_ERO, offs=ends_E)


Adapters = Mapping[str, ExpertAdapter]  # by projection


def experts_forward(
    experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor, adapters: Adapters
) -> Tensor:
    """The sum of the outputs of each token's experts, [T, H].

    Args:
        experts: a module of `adaptable_experts`.
        chosen_TK: the numbers of the experts of each token.
        weights_TK: of their outputs.
    """
    tokens, active = chosen_TK.shape
    numbers_S, order_S = torch.sort(chosen_TK.reshape(-1), stable=True)
    counted = torch.arange(experts.gate_up_proj.shape[0], device=numbers_S.device)
    ends_E = torch.searchsorted(numbers_S, counted, right=True).to(torch.int32)
    x_SH = hidden_TH[order_S // active]
    product = experts._apply_gate(_projected(experts, GATE_UP, x_SH, numbers_S, ends_E, adapters))
    output = _projected(experts, DOWN, product, numbers_S, ends_E, adapters)
    output = output * weights_TK.reshape(-1)[order_S][:, None]
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return output[place_S].view(tokens, active, -1).sum(1).to(hidden_TH.dtype)


def _projected(
    experts: Any, projection: str, x_SI: Tensor, numbers_S: Tensor, ends_E: Tensor, adapters: Adapters
) -> Tensor:
    """One projection of rows that are sorted by expert, [S, in] -> [S, out]."""
    weight = getattr(experts, projection)
    weight_EIO = weight if experts.is_transposed else weight.transpose(1, 2)
    output = grouped_mm(x_SI, weight_EIO, offs=ends_E)
    if experts.has_bias:
        output = output + getattr(experts, f"{projection}_bias")[numbers_S]
    adapter = adapters.get(projection)
    return output if adapter is None else output + adapter(x_SI, ends_E)


def install(model: nn.Module) -> None:
    """Replace the forward of every module of experts with an adapter in a PEFT model."""
    for outer in outermost(model):
        outer.forward = _forward_of(outer)


def outermost(model: nn.Module) -> list[ParamWrapper]:
    """PEFT's wrappers of modules of experts: one for each module, around those for each of its parameters."""
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {module.base_layer for module in wrappers}
    return [module for module in wrappers if module not in inner]


def wrappers_of(outer: ParamWrapper) -> dict[str, ParamWrapper]:
    """PEFT's wrappers around one module of experts, by the parameter that each adapts."""
    wrappers, layer = {}, outer
    while isinstance(layer, ParamWrapper):
        wrappers[layer.parameter_name] = layer
        layer = layer.base_layer
    return wrappers


def _forward_of(outer: ParamWrapper) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    wrappers, experts = wrappers_of(outer), outer.get_base_layer()

    # The names are those of transformers' interface: some families pass them by name.
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        used = {} if outer.disable_adapters else wrappers
        adapters = {name: ExpertAdapter.of(layer) for name, layer in used.items()}
        return experts_forward(experts, hidden_states, top_k_index, top_k_weights, adapters)

    return forward
