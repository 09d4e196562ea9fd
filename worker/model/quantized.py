"""Models whose files hold quantized weights: which can be trained, and with which weights."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import FineGrainedFP8Config, Mxfp4Config, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from core.outages import outage
from core.registry import Device
from worker.model import packed
from worker.model.architecture import class_of, has_experts, without_weights
from worker.model.packed_formats import CONVERT, FORMATS, PackedFormat, format_in
from worker.refusals import InvalidModel, UnsupportedModel, first_line

# Formats that transformers converts to plain weights, rounded once to the model's dtype, where they do not stay packed
# (packed_formats.py): in mixtures of experts, and fp8 weights with one scale.
_CONVERTED: Mapping[str, type[FineGrainedFP8Config] | type[Mxfp4Config]] = {
    "fp8": FineGrainedFP8Config,  # DeepSeek, Qwen ...-FP8
    "mxfp4": Mxfp4Config,  # the experts of gpt-oss
}


def format_of(config: Any) -> str:
    """The format of the weights in the model's files, such as "fp8"; "" if they are not quantized.

    Raises:
        UnsupportedModel: models in this format cannot be trained.
    """
    stored = _stored_quantization(config)
    if not stored:
        return ""
    name = str(stored.get("quant_method"))
    if (found := packed_format_of(config)) is not None:
        return found.name
    if name not in _CONVERTED:
        raise UnsupportedModel(
            f"The model is not supported: its weights are quantized ({name}). Only "
            f"{', '.join(sorted({*FORMATS, *_CONVERTED}))} are trained. {CONVERT}"
        )
    return name


def packed_format_of(config: Any) -> PackedFormat | None:
    """The format in which linear layers stay packed in memory; None: the weights are plain, or are converted.

    Raises:
        UnsupportedModel: the format has a variant that is not computed here, or the model is a mixture of experts.
    """
    stored = _stored_quantization(config)
    found = format_in(stored)
    if found is None or not has_experts(config):
        return found
    if str(stored.get("quant_method")) in _CONVERTED:
        return None
    raise UnsupportedModel(
        f"The model is not supported: its weights are quantized ({found.name}), and it is a mixture of experts, which "
        "are not computed with packed weights. Use the bfloat16 model that it was made from."
    )


def _stored_quantization(config: Any) -> Mapping[str, Any]:
    """The quantization of the model's files according to its config; empty if they are not quantized.

    Raises:
        UnsupportedModel: it has a name that transformers does not read.
    """
    configs = (config, config.get_text_config())  # a multimodal model may name it for its text part
    if any(getattr(one, "compression_config", None) for one in configs):
        raise UnsupportedModel(
            "The model is not supported: its config.json names the quantization of its weights compression_config, "
            "which transformers does not read. Rename it to quantization_config."
        )
    found: Any = next((has for one in configs if (has := getattr(one, "quantization_config", None))), {})
    return found if isinstance(found, Mapping) else found.to_dict()


def load(config: Any, source: Path | str, dtype: torch.dtype) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Load the model that is trained, with packed layers or with plain weights, and what transformers says about it.

    Args:
        source: where the model's files are, a folder or a hub id.

    Raises:
        UnsupportedModel: as `format_of`, or the files cannot be computed with.
    """
    if (format := packed_format_of(config)) is not None:
        return packed.load(config, source, format, files_by_tensor(source), dtype)
    conversion = _conversion(config, source)
    model, loading = class_of(config).from_pretrained(
        source, dtype=dtype, output_loading_info=True, **conversion
    )
    if conversion:
        model = model.to(dtype)  # converted weights of mxfp4 are in bfloat16, whatever `dtype` is
    return model, loading


def load_wide(config: Any, source: Path | str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model with plain weights in float32: packed ones have the values that they have in `dtype`.

    Arguments and errors are those of `load`.
    """
    if packed_format_of(config) is None:
        model, _ = load(config, source, torch.float32)
        return model
    model, _ = load(config, source, dtype)
    packed.expand(model, torch.float32)
    return model.float()


def _conversion(config: Any, source: Path | str) -> dict[str, Any]:
    """The arguments of `from_pretrained` with which weights in a quantized format are loaded as plain ones.

    Raises:
        UnsupportedModel: transformers would convert the files to wrong weights.
    """
    name = format_of(config)
    block = _stored_quantization(config).get("weight_block_size") if name == "fp8" else None
    if block:
        refuse_uneven_blocks(shapes_in(source), block)
    return {"quantization_config": _CONVERTED[name](dequantize=True)} if name else {}


def refuse_uneven_blocks(shapes: Mapping[str, Sequence[int]], block: Sequence[int]) -> None:
    """Refuse fp8 weights of which the last block is cut off at the edge, in a model that is converted.

    transformers 5.19 takes the size of a block to be the weight's divided by the number of scales (Fp8Dequantize), so
    it would multiply other elements with a scale, or fail.

    Args:
        shapes: of all tensors in the model's files, by name.
        block: rows and columns of a block.

    Raises:
        UnsupportedModel: the message names the weight.
    """
    for name, shape in shapes.items():
        scales = shapes.get(f"{name}_scale_inv", ())
        if len(scales) < 2:
            continue  # not in blocks
        for length, count, side in zip(shape[-2:], scales[-2:], block, strict=True):
            if count > 1 and (length % count or (count == math.ceil(length / side) and length % side)):
                raise UnsupportedModel(
                    f"The model is not supported: its weight {name} {list(shape)} is not a whole number of fp8 blocks "
                    f"{list(block)}, and transformers would convert it to wrong numbers. Use the model's files in "
                    "bfloat16."
                )


def shapes_in(source: Path | str) -> dict[str, Sequence[int]]:
    """The shapes of all tensors in the safetensors files of a folder or of a hub id, by name.

    Raises:
        OSError: there are none, or the hub cannot be reached.
    """
    shapes: dict[str, Sequence[int]] = {}
    for file in _files_of(source):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return shapes


def files_by_tensor(source: Path | str) -> dict[str, str]:
    """The safetensors file of each tensor of a folder or of a hub id, by name. Raises InvalidModel: there are none."""
    found: dict[str, str] = {}
    try:
        files = _files_of(source)
    except OSError as cause:
        if outage(cause) is not None:
            raise
        raise InvalidModel(
            "The model has no safetensors files, which packed weights, sharding, full training and GGUF exports are "
            f"read from: {first_line(cause)}"
        ) from cause
    for file in files:
        with safe_open(file, "pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


def _files_of(source: Path | str) -> list[str]:
    files = [
        str(cached_file(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False) or "")
    ]
    if files[0]:
        files, _ = get_checkpoint_shard_files(source, files[0])
    else:
        files = [str(cached_file(source, SAFE_WEIGHTS_NAME))]
    return files


def as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that `save_pretrained` writes as they are; no memory is copied.

    transformers quantizes the weights of `model` again when it saves them, and writes no quantization to its config.
    """
    plain: PreTrainedModel = without_weights(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def no_kernel(config: Any, dtype: str, device: Device) -> str:
    """For what vLLM has no kernel to sample the model on this device; "": it has one, or computes plain weights."""
    found = packed_format_of(config)
    return "" if found is None else found.no_kernel(device, dtype)


def refuse_without_kernel(config: Any, dtype: str, device: Device) -> None:
    """Raises UnsupportedModel: vLLM cannot sample the quantized model on this device."""
    if missing := no_kernel(config, dtype, device):
        raise UnsupportedModel(
            f"vLLM cannot sample the model: its weights are quantized ({format_of(config)}), and vLLM has no kernel "
            f'for {missing}. Set `sampler = "transformers"` in the model\'s entry, or use other files of it.'
        )


def quantizes_activations(config: Any) -> bool:
    """Whether vLLM may quantize the activations of the model, and not its weights alone."""
    found = packed_format_of(config)
    return bool(format_of(config)) and not (found is not None and found.weight_only)


def agreement(config: Any) -> str:
    """The class of agreement between vLLM and training, in words; "" if the weights are not quantized."""
    name = format_of(config)
    if not name:
        return ""
    if not quantizes_activations(config):
        return "weight-only: vLLM is meant to compute with the same weights and with plain activations"
    return f"activations too: vLLM with {name} may quantize activations, so expect a larger logprob_gap"


def described(config: Any, dtype: torch.dtype, sampler: str) -> str:
    """For an event of the job: the precision of trainer and sampler. "" if the weights are not quantized."""
    name = format_of(config)
    if not name:
        return ""
    plain = str(dtype).removeprefix("torch.")
    packed = ", and decodes one layer at a time" if packed_format_of(config) is not None else ""
    sampled = (
        f"The sampler: {agreement(config)}."
        if sampler == "vllm"
        else "The sampler computes with the same values."
    )
    return f"The model's files hold {name} weights. Training computes with their values in {plain}{packed}. {sampled}"
