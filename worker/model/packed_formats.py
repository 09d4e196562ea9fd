"""Formats of quantized weights that stay packed in memory: which tensors a layer has in the files, and its weight.

The arithmetic is that of vLLM's weight-only kernels for scales by group: scales are rounded to the model's dtype first,
and the product of integer and scale is rounded once. With one scale for each output, Marlin on GPUs multiplies the sum
in float32 by the scale instead, and rounds no weight. compressed-tensors itself multiplies in the dtype of the scale
and rounds last, which differs where scales are in float16 and the model is not.

Imports no torch, so that memory can be estimated from a config.json alone.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from core.registry import Device
from worker.refusals import UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Role = Literal["packed", "scale", "zero"]
MODEL = "model"  # in place of a dtype: that of the model
BYTES_OF = {"int32": 4, "float32": 4, "float8_e4m3fn": 1}
MARLIN_GROUPS = (32, 64, 128)  # vLLM's kernel for packed integers on GPUs
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

    def no_kernel(self, device: Device, dtype: str) -> str:
        """For what vLLM 0.32 has no kernel on this device with a model in `dtype`; "": it has one."""
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
    targets: tuple[str, ...] = ("Linear",)
    ignored: tuple[str, ...] = ()
    weight_only: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = ("weight_shape",)

    @property
    def name(self) -> str:
        return f"compressed-tensors W{self.bits}A16"

    def skips(self, layer: str) -> bool:
        spellings = _spellings(layer)
        packed = "Linear" in self.targets or _named(self.targets, spellings)
        return not packed or _named(self.ignored, spellings)

    def no_kernel(self, device: Device, dtype: str) -> str:
        if self.bits == 8 and not self.symmetric:
            return "8 bits with zero points"
        return _no_kernel_for_integers(device, self.bits, self.group, (256,) if self.bits == 4 else ())

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
        return any(one in own for own in _spellings(layer) for one in self.unconverted)

    def no_kernel(self, device: Device, dtype: str) -> str:
        return "awq with `dtype` float32" if dtype == "float32" else ""

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
    converted: tuple[str, ...] = ()  # the ends of the names of the packed layers; empty: all
    weight_only: ClassVar[bool] = True
    # Some packers write a bias of zeros where the layer has none.
    unread: ClassVar[tuple[str, ...]] = ("qzeros", "g_idx", "bias")

    @property
    def name(self) -> str:
        return f"gptq W{self.bits}A16"

    def skips(self, layer: str) -> bool:
        return bool(self.converted) and not any(f".{layer}".endswith(f".{one}") for one in self.converted)

    def no_kernel(self, device: Device, dtype: str) -> str:
        if dtype == "float32":
            return "gptq with `dtype` float32"
        return _no_kernel_for_integers(device, self.bits, self.group)

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
    unconverted: tuple[str, ...] = ()
    has_fixed_activations: bool = False  # their scales are in the files
    name: ClassVar[str] = "fp8"
    weight_only: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ("input_scale",)

    def skips(self, layer: str) -> bool:
        return any(f".{one}." in f".{own}." for own in _spellings(layer) for one in self.unconverted)

    def no_kernel(self, device: Device, dtype: str) -> str:
        if self.has_fixed_activations:
            return "fp8 blocks with fixed scales of activations (activation_scheme)"
        return "fp8 with `dtype` float32" if dtype == "float32" else ""

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


def _no_kernel_for_integers(device: Device, bits: int, group: int, more_groups: Sequence[int] = ()) -> str:
    """`more_groups`: that a GPU has a kernel for beside those of Marlin."""
    if device == "cpu":
        return "8 bits on a CPU" if bits == 8 else ""
    if group and group not in (*MARLIN_GROUPS, *more_groups):
        return f"groups of {group} inputs on a GPU"
    return ""


def _spellings(layer: str) -> set[str]:
    """The names that a layer of a text model may have in the config of a multimodal model that it is a part of."""
    own = layer.removeprefix("model.")
    return {layer, f"model.language_model.{own}", f"language_model.model.{own}"}


def _named(names: Sequence[str], spellings: Collection[str]) -> bool:
    """Whether names of compressed-tensors, or its regular expressions behind "re:", have one of the spellings."""
    return any(
        any(re.match(one.removeprefix("re:"), layer) for layer in spellings)
        if one.startswith("re:")
        else one in spellings
        for one in names
    )


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
    if (stored.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _unsupported(name, "they are sparse (sparsity_config), which is not computed here")
    groups = list((stored.get("config_groups") or {}).values())
    scheme = _scheme(name, groups)
    bits, size = scheme.get("num_bits"), scheme.get("group_size")
    strategy = scheme.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    kind = scheme.get("type", "int")
    if bits not in (4, 8) or kind != "int":
        raise _unsupported(name, f"only integers of 4 and 8 bits are computed here, not {kind}{bits}")
    if strategy not in ("group", "channel"):
        raise _unsupported(name, f"scales by {strategy} are not computed here")
    if scheme.get("actorder") not in (None, False, "weight", "static"):
        raise _unsupported(name, "it has act-order (actorder)")
    group_size = _group_size(name, size) if strategy == "group" else 0
    targets = [target for group in groups for target in _names(group.get("targets") or ("Linear",))]
    symmetric = bool(scheme.get("symmetric", True))
    return CompressedTensors(bits, group_size, symmetric, tuple(targets), _names(stored.get("ignore")))


def _scheme(name: str, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """How weights are quantized in all of the `config_groups`."""
    if not groups:
        raise _unsupported(name, "its config_groups are empty, so nothing says how")
    weights = [group.get("weights") for group in groups]
    if not all(weights):
        raise _unsupported(name, "one of its config_groups says nothing of the weights")
    if any(one != weights[0] for one in weights):
        raise _unsupported(name, "its layers are quantized in more than one way")
    if any(group.get("input_activations") or group.get("output_activations") for group in groups):
        raise _unsupported(name, "activations are quantized, too")
    if any(group.get("format") not in (None, "pack-quantized") for group in groups):
        raise _unsupported(name, "one of its config_groups has another format")
    return weights[0] or {}


def _read_awq(stored: Quantization) -> PackedFormat:
    bits, version = stored.get("bits", stored.get("w_bit")), str(stored.get("version", "gemm"))
    name = f"awq, {bits} bits, version {version}"
    if bits != 4 or version.lower() != "gemm" or not stored.get("zero_point", True):
        raise _unsupported(name, "only 4 bits in the version gemm with zero points are computed here")
    group = _group_size(name, stored.get("group_size", stored.get("q_group_size")))
    return Awq(group, _names(stored.get("modules_to_not_convert")))


def _read_gptq(stored: Quantization) -> PackedFormat:
    bits = stored.get("bits")
    name = f"gptq, {bits} bits"
    group = _group_size(name, stored.get("group_size"))
    if bits not in (4, 8) or not stored.get("sym", True):
        raise _unsupported(name, "only symmetric weights of 4 and 8 bits are computed here, as by vLLM")
    if stored.get("desc_act") and group:  # the order changes nothing where a row has one scale
        raise _unsupported(name, "it has act-order (desc_act), which is not computed here")
    if stored.get("dynamic"):
        raise _unsupported(name, "its layers are quantized in more than one way (dynamic)")
    if str(stored.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        raise _unsupported(name, f"the layout {stored['checkpoint_format']} is not computed here")
    blocks = stored.get("modules_in_block_to_quantize") or ()
    return Gptq(
        bits,
        group,
        tuple(one for part in blocks for one in _names([part] if isinstance(part, str) else part)),
    )


def _read_fp8(stored: Quantization) -> PackedFormat | None:
    block = stored.get("weight_block_size")
    if not block or len(block) != 2:
        return None
    plain = stored.get("ignored_layers") or stored.get("modules_to_not_convert")
    return Fp8Blocks(
        (int(block[0]), int(block[1])), _names(plain), stored.get("activation_scheme") == "static"
    )


# By `quant_method` of a config. The functions return None for weights that they leave to transformers to convert.
FORMATS: Mapping[str, Callable[[Quantization], PackedFormat | None]] = {
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
}


# Keys that say how a quantizer found the numbers and where it ran. They do not change what the numbers mean.
_ORIGIN = (
    "quant_method batch_size dataset nsamples seqlen model_seqlen tokenizer pad_token_id max_input_length meta backend "
    "use_exllama exllama_config disable_exllama use_cuda_fp16 do_fuse fuse_max_seq_len modules_to_fuse "
    "cache_block_outputs model_name_or_path model_file_base_name damp_percent damp_auto_increment true_sequential "
    "static_groups block_name_to_quantize module_name_preceding_first_block mse iters lr minmax_lr amp scale_dtype "
    "low_gpu_mem_usage gradient_accumulate_steps enable_minmax_tuning enable_quanted_input autoround_version "
    "to_quant_block_names provider"
).split()
# The keys of a `quantization_config` that are read or change nothing. A value of another one may change the weights,
# or what vLLM computes with them.
_UNDERSTOOD: Mapping[str, Collection[str]] = {
    "compressed-tensors": (
        "format config_groups ignore sparsity_config quantization_status version "
        "global_compression_ratio run_compressed"
    ).split(),
    "awq": (
        "bits w_bit group_size q_group_size zero_point version modules_to_not_convert data_type sym packing_format"
    ).split(),
    "gptq": (
        "bits group_size sym desc_act dynamic checkpoint_format modules_in_block_to_quantize data_type packing_format "
        "pack_dtype act_group_aware lm_head format"
    ).split(),
    "fp8": (
        "activation_scheme weight_block_size modules_to_not_convert ignored_layers fmt scale_fmt dequantize"
    ).split(),
}


def _refuse_unknown(format: PackedFormat, stored: Quantization, understood: Collection[str]) -> None:
    """Refuse what the config says beside the format."""
    if stored.get("kv_cache_scheme"):
        raise _unsupported(
            format.name, "vLLM would keep keys and values in fewer bits than training (kv_cache_scheme)"
        )
    unknown = [key for key, value in stored.items() if value and key not in _ORIGIN and key not in understood]
    if unknown:
        raise _unsupported(
            format.name, f"the meaning of {', '.join(sorted(unknown))} in its config is not computed here"
        )


def format_in(stored: Quantization) -> PackedFormat | None:
    """The format in which weights with this `quantization_config` stay packed; None: there is none.

    Raises:
        UnsupportedModel: its variant is not computed here; the message has the way out.
    """
    method = str(stored.get("quant_method"))
    found = FORMATS[method](stored) if method in FORMATS else None
    if found is not None:
        _refuse_unknown(found, stored, _UNDERSTOOD[method])
    return found


def _group_size(name: str, size: Any) -> int:
    """Inputs with one scale; 0: all."""
    if size is None or size == -1:
        return 0
    if not isinstance(size, int) or size < 1:
        raise _unsupported(name, f"its group_size is {size!r}, which is no number of inputs")
    return size


def _names(names: Any) -> tuple[str, ...]:
    return tuple(map(str, names or ()))
