"""Formats of quantized weights that stay packed in memory: which tensors a layer has in the files, and its weight.

The arithmetic is that of vLLM's weight-only kernels, so that trainer and sampler compute with the same weights: scales
are rounded to the model's dtype first, and the product of integer and scale is rounded once. compressed-tensors itself
multiplies in the dtype of the scale and rounds last, which differs where scales are in float16 and the model is not.

Imports no torch, so that memory can be estimated from a config.json alone.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from worker.refusals import UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Role = Literal["packed", "scale", "zero"]
MODEL = "model"  # in place of a dtype: that of the model
BYTES_OF = {"int32": 4, "float32": 4, "float8_e4m3fn": 1}
DECODED_ELEMENTS = 1 << 22  # of an fp8 weight, that are in float32 at a time

CONVERT = "Use the bfloat16 model that it was made from, or its conversion to W4A16 by llmcompressor."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a packed layer. A layer of `rows` outputs and `columns` inputs has the weight [rows, columns]."""

    name: str  # in the files, after the name of the layer
    shape: tuple[int, ...]
    dtype: str  # the name of torch's dtype, or MODEL

    def bytes(self, bytes_each: int) -> int:
        """`bytes_each`: of a number in the model's dtype."""
        return math.prod(self.shape) * BYTES_OF.get(self.dtype, bytes_each)


class PackedFormat(Protocol):
    """The format of the packed linear layers of one model."""

    @property
    def name(self) -> str:
        """For events and reports, such as "awq W4A16"."""
        ...

    @property
    def weight_only(self) -> bool:
        """Whether vLLM computes with these weights and plain activations; else it quantizes activations, too."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """The names of tensors of a packed layer that are not needed."""
        ...

    def skips(self, layer: str) -> bool:
        """Whether the config leaves this layer plain."""
        ...

    def tensors(self, rows: int, columns: int) -> Mapping[Role, StoredTensor]: ...

    def problem(self, rows: int, columns: int) -> str:
        """The reason for which a layer of this size cannot be packed, as the rest of a sentence; "" if it can be."""
        ...

    def decode(
        self, tensors: Mapping[Role, "Tensor"], rows: int, columns: int, dtype: "torch.dtype"
    ) -> "Tensor":
        """The weight [rows, columns], contiguous, of `tensors` in the model's dtype `dtype`."""
        ...


def packed_bytes(format: PackedFormat, rows: int, columns: int, bytes_each: int) -> int:
    return sum(one.bytes(bytes_each) for one in format.tensors(rows, columns).values())


@dataclass(frozen=True)
class CompressedTensors:
    """`pack-quantized`: integers along the inputs, lowest bits first, offset by half of their range."""

    bits: int
    group: int  # inputs with one scale; 0: all
    symmetric: bool
    ignored: tuple[str, ...] = ()
    weight_only: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = ("weight_shape",)

    @property
    def name(self) -> str:
        return f"compressed-tensors W{self.bits}A16"

    def skips(self, layer: str) -> bool:
        return any(
            re.match(one.removeprefix("re:"), layer) is not None if one.startswith("re:") else one == layer
            for one in self.ignored
        )

    def tensors(self, rows: int, columns: int) -> Mapping[Role, StoredTensor]:
        per, groups = 32 // self.bits, _groups(columns, self.group)
        found: dict[Role, StoredTensor] = {
            "packed": StoredTensor("weight_packed", (rows, -(-columns // per)), "int32"),
            "scale": StoredTensor("weight_scale", (rows, groups), MODEL),
        }
        if not self.symmetric:
            found["zero"] = StoredTensor("weight_zero_point", (-(-rows // per), groups), "int32")
        return found

    def problem(self, rows: int, columns: int) -> str:
        return _uneven(columns, self.group)

    def decode(
        self, tensors: Mapping[Role, "Tensor"], rows: int, columns: int, dtype: "torch.dtype"
    ) -> "Tensor":
        packed = tensors["packed"]
        weight = packed.new_empty((rows, columns), dtype=dtype)
        places = range(32 // self.bits)
        _unpack(packed, weight, self.bits, places)
        zero: Tensor | int = 1 << (self.bits - 1)
        if not self.symmetric:
            zero = weight.new_empty((rows, tensors["zero"].shape[1]))
            _unpack(tensors["zero"].t(), zero.t(), self.bits, places)
        return _scale(weight, tensors["scale"].to(dtype), zero)


@dataclass(frozen=True)
class Awq:
    """The layout "gemm": integers along the outputs, eight to a word in the order of PLACES, with zero points."""

    group: int
    unconverted: tuple[str, ...] = ()
    name: ClassVar[str] = "awq W4A16"
    weight_only: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = ()
    PLACES: ClassVar[Sequence[int]] = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs, in multiples of 4 bits

    def skips(self, layer: str) -> bool:
        return any(one in layer for one in self.unconverted)

    def tensors(self, rows: int, columns: int) -> Mapping[Role, StoredTensor]:
        groups = _groups(columns, self.group)
        return {
            "packed": StoredTensor("qweight", (columns, rows // 8), "int32"),
            "scale": StoredTensor("scales", (groups, rows), MODEL),
            "zero": StoredTensor("qzeros", (groups, rows // 8), "int32"),
        }

    def problem(self, rows: int, columns: int) -> str:
        return f"its {rows} outputs are no multiple of 8" if rows % 8 else _uneven(columns, self.group)

    def decode(
        self, tensors: Mapping[Role, "Tensor"], rows: int, columns: int, dtype: "torch.dtype"
    ) -> "Tensor":
        weight = tensors["packed"].new_empty((rows, columns), dtype=dtype)
        _unpack(tensors["packed"], weight.t(), 4, self.PLACES)
        zero = weight.new_empty((rows, len(tensors["zero"])))
        _unpack(tensors["zero"], zero.t(), 4, self.PLACES)
        return _scale(weight, tensors["scale"].to(dtype).t(), zero)


@dataclass(frozen=True)
class Gptq:
    """Symmetric, without act-order: integers along the inputs, lowest bits first. Zero points are not read."""

    bits: int
    group: int
    weight_only: ClassVar[bool] = True
    # Some packers write a bias of zeros where the layer has none.
    unread: ClassVar[tuple[str, ...]] = ("qzeros", "g_idx", "bias")

    @property
    def name(self) -> str:
        return f"gptq W{self.bits}A16"

    def skips(self, layer: str) -> bool:
        return False

    def tensors(self, rows: int, columns: int) -> Mapping[Role, StoredTensor]:
        return {
            "packed": StoredTensor("qweight", (columns // (32 // self.bits), rows), "int32"),
            "scale": StoredTensor("scales", (_groups(columns, self.group), rows), MODEL),
        }

    def problem(self, rows: int, columns: int) -> str:
        per = 32 // self.bits
        return (
            f"its {columns} inputs are no multiple of {per}"
            if columns % per
            else _uneven(columns, self.group)
        )

    def decode(
        self, tensors: Mapping[Role, "Tensor"], rows: int, columns: int, dtype: "torch.dtype"
    ) -> "Tensor":
        weight = tensors["packed"].new_empty((rows, columns), dtype=dtype)
        _unpack(tensors["packed"].t(), weight, self.bits, range(32 // self.bits))
        return _scale(weight, tensors["scale"].to(dtype).t(), 1 << (self.bits - 1))


@dataclass(frozen=True)
class Fp8Blocks:
    """e4m3 numbers with one scale for each block. Blocks at the edges may be cut off."""

    block: tuple[int, int]  # rows, columns
    unconverted: tuple[str, ...] = field(default=())
    name: ClassVar[str] = "fp8"
    weight_only: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ("input_scale",)

    def skips(self, layer: str) -> bool:
        return any(f".{one}." in f".{layer}." for one in self.unconverted)

    def tensors(self, rows: int, columns: int) -> Mapping[Role, StoredTensor]:
        scales = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        return {
            "packed": StoredTensor("weight", (rows, columns), "float8_e4m3fn"),
            "scale": StoredTensor("weight_scale_inv", scales, "float32"),
        }

    def problem(self, rows: int, columns: int) -> str:
        return ""

    def decode(
        self, tensors: Mapping[Role, "Tensor"], rows: int, columns: int, dtype: "torch.dtype"
    ) -> "Tensor":
        packed, scale = tensors["packed"], tensors["scale"]
        height, width = self.block
        weight = packed.new_empty((rows, columns), dtype=dtype)
        many = max(1, DECODED_ELEMENTS // (height * columns))  # rows of blocks
        for first in range(0, len(scale), many):
            part = slice(first * height, (first + many) * height)
            target = weight[part]
            factors = scale[first : first + many].repeat_interleave(width, 1)[:, :columns]
            target.copy_(
                packed[part].to(scale.dtype).mul_(factors.repeat_interleave(height, 0)[: len(target)])
            )
        return weight


def _groups(columns: int, group: int) -> int:
    return columns // group if group else 1


def _uneven(columns: int, group: int) -> str:
    return f"its {columns} inputs are not whole groups of {group}" if group and columns % group else ""


def _unpack(packed: "Tensor", integers: "Tensor", bits: int, places: Sequence[int]) -> None:
    """Write the integers of packed [m, n / len(places)], int32, into integers [m, n].

    Args:
        places: of the bits of the first columns, the second ..., as multiples of `bits`.
    """
    mask = (1 << bits) - 1
    for column, place in enumerate(places):
        target = integers[:, column :: len(places)]
        target.copy_((packed[:, : target.shape[1]] >> (bits * place)).bitwise_and_(mask))


def _scale(integers: "Tensor", scale: "Tensor", zero: "Tensor | int") -> "Tensor":
    """(integers [rows, columns] - zero) * scale [rows, groups], in place. The difference is exact in any dtype."""
    rows, groups = scale.shape
    grouped = integers.view(rows, groups, -1)
    grouped.sub_(zero if isinstance(zero, int) else zero[..., None]).mul_(scale[..., None])
    return integers


Quantization = Mapping[str, Any]


def _unsupported(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The model is not supported: its weights are quantized ({name}), and {reason}. {CONVERT}"
    )


def _read_compressed_tensors(stored: Quantization) -> PackedFormat:
    name = f"compressed-tensors, format {stored.get('format')}"
    if stored.get("format") != "pack-quantized":
        raise _unsupported(name, "of its formats only pack-quantized is computed here")
    groups = list((stored.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    if not weights or any(one != weights[0] for one in weights):
        raise _unsupported(name, "its layers are quantized in more than one way")
    if any(group.get("input_activations") for group in groups):
        raise _unsupported(name, "activations are quantized, too")
    scheme = weights[0]
    bits, strategy = scheme.get("num_bits"), scheme.get("strategy")
    if bits not in (4, 8) or scheme.get("type", "int") != "int":
        raise _unsupported(
            name, f"only integers of 4 and 8 bits are computed here, not {scheme.get('type')}{bits}"
        )
    if strategy not in ("group", "channel"):
        raise _unsupported(name, f"scales by {strategy} are not computed here")
    if scheme.get("actorder") not in (None, False, "weight", "static"):
        raise _unsupported(name, "it has act-order (actorder)")
    group_size = _group_size(scheme.get("group_size")) if strategy == "group" else 0
    return CompressedTensors(
        bits, group_size, bool(scheme.get("symmetric", True)), _names(stored.get("ignore"))
    )


def _read_awq(stored: Quantization) -> PackedFormat:
    bits, version = stored.get("bits", stored.get("w_bit")), str(stored.get("version", "gemm"))
    name = f"awq, {bits} bits, version {version}"
    if bits != 4 or version.lower() != "gemm" or not stored.get("zero_point", True):
        raise _unsupported(name, "only 4 bits in the version gemm with zero points are computed here")
    group = _group_size(stored.get("group_size", stored.get("q_group_size")))
    return Awq(group, _names(stored.get("modules_to_not_convert")))


def _read_gptq(stored: Quantization) -> PackedFormat:
    bits, group = stored.get("bits"), _group_size(stored.get("group_size"))
    name = f"gptq, {bits} bits"
    if bits not in (4, 8) or not stored.get("sym", True):
        raise _unsupported(name, "only symmetric weights of 4 and 8 bits are computed here, as by vLLM")
    if stored.get("desc_act") and group:  # the order changes nothing where a row has one scale
        raise _unsupported(name, "it has act-order (desc_act), with which vLLM's kernel for CPUs is wrong")
    if stored.get("dynamic"):
        raise _unsupported(name, "its layers are quantized in more than one way (dynamic)")
    if str(stored.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        raise _unsupported(name, f"the layout {stored['checkpoint_format']} is not computed here")
    return Gptq(bits, group)


def _read_fp8(stored: Quantization) -> PackedFormat | None:
    block = stored.get("weight_block_size")
    if not block or len(block) != 2:
        return None
    return Fp8Blocks((int(block[0]), int(block[1])), _names(stored.get("modules_to_not_convert")))


# By `quant_method` of a config. The functions return None for weights that they leave to transformers to convert.
FORMATS: Mapping[str, Callable[[Quantization], PackedFormat | None]] = {
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
}


def format_in(stored: Quantization) -> PackedFormat | None:
    """The format in which weights with this `quantization_config` stay packed; None: there is none.

    Raises:
        UnsupportedModel: its variant is not computed here; the message has the way out.
    """
    read = FORMATS.get(str(stored.get("quant_method")))
    return None if read is None else read(stored)


def _group_size(size: Any) -> int:
    return int(size) if isinstance(size, int) and size > 0 else 0


def _names(names: Any) -> tuple[str, ...]:
    return tuple(map(str, names or ()))
