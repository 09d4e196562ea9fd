"""Models whose files hold quantized weights: which can be trained, and with which weights."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import FineGrainedFP8Config, Mxfp4Config, PreTrainedModel

from worker.model.architecture import without_weights
from worker.refusals import UnsupportedModel

# Formats that transformers converts to plain weights, rounded once to the model's dtype. Training computes with those,
# because kernels for quantized weights have no tested backward pass.
_CONVERTED: Mapping[str, type[FineGrainedFP8Config] | type[Mxfp4Config]] = {
    "fp8": FineGrainedFP8Config,  # DeepSeek, Qwen ...-FP8
    "mxfp4": Mxfp4Config,  # the experts of gpt-oss
}


def format_of(config: Any) -> str:
    """The format of the weights in the model's files, such as "fp8"; "" if they are not quantized.

    Raises:
        UnsupportedModel: models in this format cannot be trained.
    """
    configs = (config, config.get_text_config())  # a multimodal model may name it for its text part
    stored = next((found for one in configs if (found := getattr(one, "quantization_config", None))), None)
    if stored is None:
        return ""
    name = str(stored.get("quant_method") if isinstance(stored, Mapping) else stored.quant_method)
    if name not in _CONVERTED:
        raise UnsupportedModel(
            f"The model is not supported: its weights are quantized ({name}). Only {' and '.join(_CONVERTED)} are "
            "converted for training. Use the model's files in bfloat16."
        )
    return name


def arguments(config: Any) -> dict[str, Any]:
    """The arguments of `from_pretrained` with which weights in a quantized format are loaded as plain ones.

    Raises:
        UnsupportedModel: as `format_of`.
    """
    name = format_of(config)
    return {"quantization_config": _CONVERTED[name](dequantize=True)} if name else {}


def as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that `save_pretrained` writes as they are; no memory is copied.

    transformers quantizes the weights of `model` again when it saves them, and writes no quantization to its config.
    """
    plain: PreTrainedModel = without_weights(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def described(config: Any, dtype: torch.dtype, sampler: str) -> str:
    """For an event of the job: the precision of trainer and sampler. "" if the weights are not quantized."""
    name = format_of(config)
    if not name:
        return ""
    plain = str(dtype).removeprefix("torch.")
    sampled = (
        f"vLLM with {name}, so expect a larger logprob_gap"
        if sampler == "vllm"
        else "and so does the sampler"
    )
    return (
        f"The model's files hold {name} weights. Training computes with their values in {plain}, {sampled}."
    )
