"""Write a checkpoint as files of GGUF: an adapter, or a whole model with the adapter merged into it.

One tensor at a time is in memory. Adapters are added in float32, and the sum is rounded once, to the type in the file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFEndian, LlamaFileType, quants
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from core.storage.disk import require_room
from worker.model import quantized
from worker.refusals import InvalidModel, UnsupportedModel
from worker.serving.export import OUTPUT, WeightType
from worker.serving.gguf_architectures import Architecture, Rows
from worker.serving.gguf_vocabulary import add_vocabulary

WEIGHT_TYPES: Mapping[WeightType, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_LARGEST_F16 = float(np.finfo(np.float16).max)
# Q8_0 multiplies integers up to 127 by a scale in 16 bits.
_LARGEST = {GGMLQuantizationType.F16: _LARGEST_F16, GGMLQuantizationType.Q8_0: 127 * _LARGEST_F16}
_PREFIX = "base_model.model."  # of the names in PEFT's files


@contextmanager
def written(file: Path) -> Iterator[Path]:
    """A path that becomes `file` when the context ends without an error, and is deleted otherwise."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class Origin:
    """The origin of the weights, for the file's metadata. `hub`: the base model's id on the Hugging Face Hub."""

    name: str
    base: str
    hub: str | None

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_name(self.name)
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, self.base)
        if self.hub:
            writer.add_base_model_repo_url(0, f"https://huggingface.co/{self.hub}")


@dataclass(frozen=True)
class Pair:
    """The adapter of a linear layer: its product is scale * b @ a."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float

    def added_to(self, weight: Tensor) -> Tensor:
        """`weight`: [out, in] in float32."""
        return torch.addmm(weight, self.b, self.a, alpha=self.scale)


def read_pairs(folder: Path) -> dict[str, Pair]:
    """The adapter of a folder in PEFT's format, by the names of the layers' weights in the model's files.

    Raises:
        UnsupportedModel: it is more than pairs of matrices.
    """
    config: Any = LoraConfig.from_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    layers = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    others = tensors.keys() - {f"{layer}.lora_{half}.weight" for layer in layers for half in "AB"}
    if others or config.use_dora or config.fan_in_fan_out:
        detail = f"such as {min(others)}" if others else "by DoRA or for transposed weights"
        raise UnsupportedModel(
            f"GGUF is not supported for this adapter: it has more than A and B of linear layers, {detail}. Export the "
            "format 'peft'."
        )
    pairs = {}
    for layer in sorted(layers):
        a, b = (tensors[f"{layer}.lora_{half}.weight"].float() for half in "AB")
        name = layer.removeprefix(_PREFIX)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
        rank = len(a)
        pairs[f"{name}.weight"] = Pair(a, b, alpha / (rank**0.5 if config.use_rslora else rank))
    return pairs


def write_adapter(file: Path, config: Any, pairs: Mapping[str, Pair], origin: Origin) -> None:
    """Write an adapter in float32, which llama.cpp loads beside any GGUF file of its base.

    Args:
        config: the base model's transformers config.

    Raises:
        UnsupportedModel: the architecture has no tested mapping, or llama.cpp has no place for a pair.
        InvalidModel: the adapter has values that are not numbers.
    """
    architecture = Architecture(config)
    targets = architecture.targets(pairs)
    writer = gguf.GGUFWriter(file, architecture.name, endianess=GGUFEndian.LITTLE)
    writer.add_type(gguf.GGUFType.ADAPTER)
    origin.add_to(writer)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # llama.cpp multiplies by alpha / r, with one alpha for all layers, and by 1 if alpha is 0. So each B has the rest.
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 1.0)
    for name, pair in pairs.items():
        b = (pair.b * (pair.scale * len(pair.a))).numpy()
        for half, tensor in (("a", pair.a.numpy()), ("b", architecture.rows(name, b))):
            _refuse_too_large(name, tensor, GGMLQuantizationType.F32)
            writer.add_tensor(f"{targets[name]}.lora_{half}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(
    file: Path,
    weight_type: WeightType,
    source: Path | str,
    config: Any,
    tokenizer_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Mapping[str, Pair],
    origin: Origin,
) -> None:
    """Write a whole model.

    Args:
        source: folder or hub id of the model that the adapter is added to.
        config: its transformers config.
        tokenizer_folder: with the files of `tokenizer`.
        pairs: the adapter, as `read_pairs` returns it. Empty: the model as it is.

    Raises:
        UnsupportedModel: the architecture, the tokenizer or the format of its weights has no tested mapping.
        InvalidModel: files are missing, or a weight is no number or too large for the type.
        NoRoom: the file does not fit on its disk.
    """
    refuse_quantized(config)
    architecture = Architecture(config)
    architecture.targets(pairs)
    files = _written_files(architecture, source, pairs)
    shapes = quantized.shapes_in(source)
    weights_stored_as, file_type = WEIGHT_TYPES[weight_type]
    writer = gguf.GGUFWriter(file, architecture.name, endianess=GGUFEndian.LITTLE)
    writer.add_type(gguf.GGUFType.MODEL)
    origin.add_to(writer)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture.add_to(writer)
    add_vocabulary(writer, tokenizer_folder, tokenizer, config.vocab_size)
    _write_tensors(
        file, writer, architecture, files, {name: shapes[name] for name in files}, pairs, weights_stored_as
    )


def refuse_quantized(config: Any) -> None:
    """Raises UnsupportedModel: the weights of the whole model cannot be written as they are."""
    if stored := quantized.format_of(config):
        raise UnsupportedModel(
            f"GGUF is not supported for quantized weights ({stored}). Export the format 'merged', which has them in "
            "bfloat16, and 'gguf-adapter' for a GGUF file of this base."
        )


def _written_files(
    architecture: Architecture, source: Path | str, pairs: Mapping[str, Pair]
) -> dict[str, str]:
    """The files of the tensors that are written, by tensor. Raises UnsupportedModel if the adapter changes another."""
    files = {
        name: path
        for name, path in quantized.files_by_tensor(source).items()
        if architecture.is_written(name)
    }
    if absent := sorted(pairs.keys() - files.keys()):
        raise UnsupportedModel(
            f"GGUF is not supported: the model's files have no {absent[0]}, which the adapter changes."
        )
    return files


def _write_tensors(
    file: Path,
    writer: gguf.GGUFWriter,
    architecture: Architecture,
    files: Mapping[str, str],
    shapes: Mapping[str, Any],
    pairs: Mapping[str, Pair],
    weights_stored_as: GGMLQuantizationType,
) -> None:
    """Write the header, then one tensor after the other.

    Args:
        files: of the tensors, by their names in the model's files.
        shapes: of the same tensors, in the same order.
        weights_stored_as: the type of matrices; vectors and uneven rows have others.
    """
    extra = architecture.extra_tensors()
    needed = 0
    for name, tensor in extra.items():
        writer.add_tensor_info(name, tensor.shape, tensor.dtype, tensor.nbytes)
    for name, shape in shapes.items():
        stored_as = _stored_as(shape, weights_stored_as)
        in_bytes = quants.quant_shape_to_byte_shape(shape, stored_as)
        needed += int(np.prod(in_bytes))
        writer.add_tensor_info(
            architecture.tensor_name(name), in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), stored_as
        )
    require_room(file.parent, OUTPUT, needed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in extra.values():
        writer.write_tensor_data(tensor)
    for name, tensor in _merged(files, pairs, architecture):
        writer.write_tensor_data(_encoded(name, tensor, _stored_as(tensor.shape, weights_stored_as)))
    writer.close()


def _merged(
    files: Mapping[str, str], pairs: Mapping[str, Pair], architecture: Architecture
) -> Iterator[tuple[str, Rows]]:
    """Each tensor with its adapter added, in float32 and llama.cpp's order of rows, by its name in the files."""
    for name, path in files.items():
        with safe_open(path, "pt") as tensors:
            weight = tensors.get_tensor(name).float()
        if name in pairs:
            weight = pairs[name].added_to(weight)
        yield name, architecture.rows(name, weight.numpy())


def _stored_as(shape: Any, weights_stored_as: GGMLQuantizationType) -> GGMLQuantizationType:
    """Norms and biases stay in float32, as llama.cpp needs them. Rows that are no whole blocks stay in 16 bits."""
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[weights_stored_as]
    return GGMLQuantizationType.F16 if shape[-1] % block else weights_stored_as


def _encoded(name: str, tensor: Rows, stored_as: GGMLQuantizationType) -> Any:
    _refuse_too_large(name, tensor, stored_as)
    return quants.quantize(tensor, stored_as).view(np.uint8)


def _refuse_too_large(name: str, tensor: Rows, stored_as: GGMLQuantizationType) -> None:
    largest = np.abs(tensor).max(initial=0)
    if not np.isfinite(largest):
        raise InvalidModel(
            f"The weight {name} has values that are not finite numbers: the model is unusable."
        )
    if largest > _LARGEST.get(stored_as, np.inf):
        raise InvalidModel(
            f"The weight {name} has values that {stored_as.name} of GGUF cannot hold. Export the format 'merged'."
        )
