"""Linear layers whose weights stay packed, as the model's files hold them. A layer is decoded whenever it is computed.

The forward pass decodes the weight, multiplies, and keeps nothing of it; the backward pass decodes it again. So the
memory of the weights is that of the files and one decoded layer. The files' own layout is kept. No library of a
quantizer is needed.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from worker.model.architecture import architecture, without_weights
from worker.model.packed_formats import MODEL, PackedFormat, Role
from worker.refusals import UnsupportedModel

ROLES: tuple[Role, ...] = get_args(Role)
Layer = TypeVar("Layer", bound=nn.Module)


class PackedLinear(nn.Linear):
    """x [..., in] -> x W' + bias [..., out] with a frozen weight that is packed. Has the gradient of x only."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(
        self,
        format: PackedFormat,
        size: tuple[int, int],
        tensors: Mapping[Role, Tensor],
        bias: nn.Parameter | None,
        dtype: torch.dtype,
    ) -> None:
        """Keep the tensors of a layer.

        Args:
            size: outputs and inputs.
            dtype: of the decoded weight, to which it is rounded.
        """
        nn.Module.__init__(self)
        self.format, self.dtype = format, dtype
        self.out_features, self.in_features = size
        for role in ROLES:
            self.register_buffer(role, tensors.get(role))
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The decoded weight [out, in], a new tensor at each access."""
        return self.weight_in(self.dtype)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """The decoded weight [out, in] as a new tensor, rounded to the model's dtype and then converted to `dtype`."""
        tensors = {role: one for role in ROLES if (one := getattr(self, role)) is not None}
        with torch.no_grad():
            return self.format.decode(tensors, self.out_features, self.in_features, self.dtype).to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        if not input.requires_grad:
            return linear(input, self.weight_in(input.dtype), bias)
        output: Tensor = _Decoded.apply(input, self, bias)  # type: ignore[no-untyped-call]
        return output


class _Decoded(torch.autograd.Function):
    """x [..., in] -> x W' + bias [..., out]. Keeps the packed layer, of which the weight is decoded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.weight_in(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = rows @ ctx.layer.weight_in(gradient.dtype)
        return of_x.view(*gradient.shape[:-1], -1), None, None


class _Stored(nn.Module):
    """The tensors of a packed layer under the names that they have in the files, while these are read."""

    def __init__(self, format: PackedFormat, layer: nn.Linear, dtype: torch.dtype) -> None:
        """With empty tensors on the device of `layer`."""
        super().__init__()
        self.format, self.dtype = format, dtype
        self.size = layer.out_features, layer.in_features
        for stored in format.tensors(*self.size).values():
            kind = dtype if stored.dtype == MODEL else getattr(torch, stored.dtype)
            self.register_buffer(
                stored.name, torch.empty(stored.shape, dtype=kind, device=layer.weight.device)
            )
        self.register_parameter("bias", layer.bias)

    bias: nn.Parameter | None

    def packed(self) -> PackedLinear:
        stored = self.format.tensors(*self.size)
        tensors = {role: self.get_buffer(one.name) for role, one in stored.items()}
        return PackedLinear(self.format, self.size, tensors, self.bias, self.dtype)


def load(
    config: Any, source: Path | str, format: PackedFormat, names: Mapping[str, str], dtype: torch.dtype
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Load a model whose linear layers stay packed, and what transformers says about the loading.

    transformers reads the files as for any model, tensor by tensor, into placeholders of the packed layers.

    Args:
        names: of all tensors in the model's files, with the file of each.

    Raises:
        UnsupportedModel: layers in the files are not linear layers of the model, or are packed otherwise.
    """
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    made = type(without_weights(plain))

    def init(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        made.__init__(self, config, *arguments, **named)
        _place(self, format, names, dtype)

    # transformers makes the model on the meta device, so that no weight of a packed layer is ever allocated.
    unread = [rf"\.{name}$" for name in format.unread]
    own = {*(made._keys_to_ignore_on_load_unexpected or ()), *unread}
    members = {"__init__": init, "__module__": made.__module__, "_keys_to_ignore_on_load_unexpected": own}
    placing: Any = type(made.__name__, (made,), members)
    model, loading = placing.from_pretrained(source, config=plain, dtype=dtype, output_loading_info=True)
    model.__class__ = made
    _refuse_unread(model, format, loading["unexpected_keys"])
    for parent, name, stored in list(_layers(model, _Stored)):
        setattr(parent, name, stored.packed())
    return model, loading


def _refuse_unread(model: PreTrainedModel, format: PackedFormat, names: Iterable[str]) -> None:
    """Refuse tensors in the files that belong to a packed layer or a part of it and have no place in this format."""
    for name in sorted(names):
        parts = name.split(".")
        owners = (".".join(parts[:length]) for length in range(1, len(parts)))
        if any(isinstance(_module(model, owner), _Stored) for owner in owners):
            raise _unsupported(
                model, format, f"its files have the tensor {name}, which this format does not have"
            )


def _place(
    model: PreTrainedModel, format: PackedFormat, names: Mapping[str, str], dtype: torch.dtype
) -> None:
    """Replace each linear layer that is packed in the files by a placeholder."""
    head = model.get_output_embeddings()
    for layer, stored in _packed_layers(model, format, names).items():
        parent, _, own = layer.rpartition(".")
        module = _module(model, layer)
        if type(module) is not nn.Linear:
            raise _unsupported(
                model, format, f"its files have packed weights of {layer}, which is no linear layer here"
            )
        if module is head:
            raise _unsupported(model, format, f"its head ({layer}) is packed")
        bias = f"{stored}.bias"
        if (
            module.bias is None
            and "bias" in format.unread
            and bias in names
            and _has_numbers(names[bias], bias)
        ):
            raise _unsupported(
                model, format, f"its files have the bias {bias}, which the model does not have"
            )
        if problem := format.problem(module.out_features, module.in_features):
            raise _unsupported(model, format, f"{layer} cannot be decoded: {problem}")
        setattr(model.get_submodule(parent), own, _Stored(format, module, dtype))


def _has_numbers(file: str, name: str) -> bool:
    """Whether a tensor of a safetensors file is not all zeros."""
    with safe_open(file, "pt") as tensors:
        return bool(tensors.get_tensor(name).any())


def _packed_layers(model: PreTrainedModel, format: PackedFormat, names: Iterable[str]) -> Mapping[str, str]:
    """The names in the model of the layers that are packed in the files, with the names that they have there.

    Without those that transformers leaves out: the heads of multi-token prediction, the vision of a text model.
    """
    mapping = get_model_conversion_mapping(model, None, None)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    known = model.state_dict()
    # The scale, because the packed tensor of a format may be called as a plain weight.
    suffix = f".{format.tensors(8, 8)['scale'].name}"
    layers = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    left_out = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    found = {}
    for layer in layers:
        stored = f"{layer}.weight"
        name, _ = rename_source_key(stored, renamings, converters, model.base_model_prefix, known)
        if not any(pattern.search(one) for pattern in left_out for one in (stored, name)):
            found[name.removesuffix(".weight")] = layer
    return found


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _unsupported(model: nn.Module, format: PackedFormat, reason: str) -> UnsupportedModel:
    name = architecture(model.config)
    return UnsupportedModel(
        f"{name} is not supported with {format.name} weights: {reason}. Use its files in bfloat16."
    )


def _layers(model: nn.Module, kind: type[Layer]) -> Iterator[tuple[nn.Module, str, Layer]]:
    """The modules of a kind with the modules and the attributes that they are in."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if isinstance(module, kind):
                yield parent, name, module


def expand(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace packed layers by plain ones with their weights, converted to `dtype`."""
    for parent, name, layer in list(_layers(model, PackedLinear)):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(layer.weight_in(dtype), requires_grad=False)
        plain.bias = layer.bias
        setattr(parent, name, plain)


def packed_elements(model: nn.Module) -> int:
    """The elements of the weights that are packed, and so no parameters of the model."""
    layers = (module for module in model.modules() if isinstance(module, PackedLinear))
    return sum(layer.in_features * layer.out_features for layer in layers)
