"""Tiny models with packed weights, and what these weights are by a slow loop that shares no code with the product."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

Tensors = dict[str, Tensor]
HALF = torch.float16


@dataclass(frozen=True)
class Kind:
    """A variant of a format."""

    config: Mapping[str, Any]  # quantization_config
    make: Callable[[int, int, Generator], Tensors]  # random tensors of a layer of so many rows and columns
    # The exact number, and its scale, at a row and a column of the weight of a layer, given as nested lists.
    element: Callable[[Mapping[str, Any], int, int], tuple[float, float]]
    wide_scales: bool = False  # the scales are not rounded to the dtype of the model


def words(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Random int32 in their whole range."""
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)


def scales(shape: tuple[int, ...], generator: Generator, dtype: torch.dtype = HALF) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.01 + 0.005).to(dtype)


def bits_of(word: int, number: int, bits: int) -> int:
    """The integer of so many bits at a place of a word, counted from its lowest bit."""
    return ((word & 0xFFFFFFFF) >> (number * bits)) % (1 << bits)


def compressed(bits: int, group: int, *, symmetric: bool = True, dtype: torch.dtype = HALF) -> Kind:
    """`group` 0: a scale for each row."""
    per = 32 // bits

    def make(rows: int, columns: int, generator: Generator) -> Tensors:
        groups = columns // group if group else 1
        made = {
            "weight_packed": words((rows, -(-columns // per)), generator),
            "weight_scale": scales((rows, groups), generator, dtype),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            made["weight_zero_point"] = words((-(-rows // per), groups), generator)
        return made

    def element(layer: Mapping[str, Any], row: int, column: int) -> tuple[float, float]:
        place = column // group if group else 0
        zero = 1 << (bits - 1)
        if not symmetric:
            zero = bits_of(layer["weight_zero_point"][row // per][place], row % per, bits)
        stored = bits_of(layer["weight_packed"][row][column // per], column % per, bits)
        return stored - zero, layer["weight_scale"][row][place]

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
    }
    weights |= {"group_size": group or None, "actorder": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return Kind(config | {"config_groups": groups}, make, element)


def awq(group: int) -> Kind:
    places = [0, 4, 1, 5, 2, 6, 3, 7]

    def make(rows: int, columns: int, generator: Generator) -> Tensors:
        return {
            "qweight": words((columns, rows // 8), generator),
            "qzeros": words((columns // group, rows // 8), generator),
            "scales": scales((columns // group, rows), generator),
        }

    def element(layer: Mapping[str, Any], row: int, column: int) -> tuple[float, float]:
        place = column // group
        stored = bits_of(layer["qweight"][column][row // 8], places[row % 8], 4)
        zero = bits_of(layer["qzeros"][place][row // 8], places[row % 8], 4)
        return stored - zero, layer["scales"][place][row]

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Kind(config, make, element)


def gptq(bits: int, group: int) -> Kind:
    """`group` 0: a scale for each row."""
    per = 32 // bits

    def make(rows: int, columns: int, generator: Generator) -> Tensors:
        groups = columns // group if group else 1
        return {
            "qweight": words((columns // per, rows), generator),
            "qzeros": words((groups, rows // per), generator),
            "scales": scales((groups, rows), generator),
            "g_idx": torch.arange(columns, dtype=torch.int32) // (group or columns),
            "bias": torch.zeros(rows, dtype=HALF),
        }

    def element(layer: Mapping[str, Any], row: int, column: int) -> tuple[float, float]:
        stored = bits_of(layer["qweight"][column // per][row], column % per, bits)
        place = column // group if group else 0
        return stored - (1 << (bits - 1)), layer["scales"][place][row]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": True, "desc_act": False}
    return Kind(config, make, element)


def fp8(height: int, width: int) -> Kind:
    def make(rows: int, columns: int, generator: Generator) -> Tensors:
        numbers = torch.randn((rows, columns), generator=generator) * 20
        blocks = (-(-rows // height), -(-columns // width))
        return {
            "weight": numbers.to(torch.float8_e4m3fn),
            "weight_scale_inv": scales(blocks, generator, torch.bfloat16) / 8,
        }

    def element(layer: Mapping[str, Any], row: int, column: int) -> tuple[float, float]:
        return layer["weight"][row][column], layer["weight_scale_inv"][row // height][column // width]

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [height, width]}
    return Kind(config, make, element, wide_scales=True)


KINDS: Mapping[str, Kind] = {
    "W4A16": compressed(4, 32),
    "W4A16 with zero points": compressed(4, 16, symmetric=False),
    "W8A16": compressed(8, 0),
    "awq": awq(16),
    "gptq": gptq(4, 32),
    "gptq of 8 bits": gptq(8, 0),
    "fp8 with blocks that are cut off": fp8(48, 40),
}


def decoded(kind: Kind, layer: Tensors, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, columns], element by element: the scale in `dtype`, and a product that is rounded once.

    Scales of fp8 stay in float32, to which such a product is rounded first.
    """
    lists = {
        name: _exact(tensor, None if kind.wide_scales else dtype).tolist() for name, tensor in layer.items()
    }
    rounded = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        products = [number * scale for number, scale in (kind.element(lists, row, n) for n in range(columns))]
        rounded[row] = torch.tensor(products, dtype=torch.float64)  # exact until here
    return rounded.float().to(dtype)


def _exact(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A stored tensor, its numbers rounded to `dtype` if it has a fraction, in a dtype that lists are made of."""
    if not tensor.is_floating_point():
        return tensor
    return (tensor if dtype is None else tensor.to(dtype)).double()


def pack(folder: Path, name: str, seed: int = 0, only: str = "") -> dict[str, Tensor]:
    """Give the linear layers of a saved model's blocks random packed weights. Returns their float32 values by name.

    Args:
        only: a part of the names of the layers that get them; "": all.
    """
    kind, generator = KINDS[name], torch.Generator().manual_seed(seed)
    file = folder / "model.safetensors"
    stored, values = Tensors(), {}
    for tensor, weight in sorted(load_file(file).items()):
        if not tensor.endswith("proj.weight") or only not in tensor:
            stored[tensor] = weight
            continue
        rows, columns = weight.shape
        layer = kind.make(rows, columns, generator)
        prefix = tensor.removesuffix("weight")
        stored |= {f"{prefix}{own}": one for own, one in layer.items()}
        values[tensor] = decoded(kind, layer, rows, columns, torch.float32)
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kind.config}))
    return values
