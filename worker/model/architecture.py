"""Read an architecture from its transformers config, for checks before the weights are loaded and for messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from core.outages import outage
from worker.model.targets import experts_in
from worker.out_of_memory import is_out_of_memory, memory_named
from worker.refusals import NotEnoughMemory, Refusal, UnsupportedModel, first_line

# Config fields by which layers limit what a token attends to: (q - k) < n, or the same chunk of n tokens.
WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "sliding_window_size",
    "local_attention",
    "window_size",
    "attention_window_size",
)
# Values of `layer_types` and its like that are attention over all earlier tokens, or over a window of them.
ATTENTION = frozenset({"full_attention", "attention", "sliding_attention", "chunked_attention"})
# Rotary embeddings whose frequencies depend on the length of what is computed together.
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})


def windows(config: Any) -> dict[str, int]:
    """The attention windows and chunks that layers of the model use, in tokens, by the config's field."""
    text = config.get_text_config()
    kinds = layer_kinds(text)
    if kinds and not any("sliding" in kind or "chunk" in kind for kind in kinds):
        return {}
    found = {field: getattr(text, field, None) for field in WINDOWS}
    return {field: value for field, value in found.items() if isinstance(value, int) and value > 0}


def rope_limits(text: Any) -> dict[str, int]:
    """By the type of the rotary embedding, the length beyond which it changes."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]  # one for each type of layer
    limits: dict[str, int] = {}
    for one in nested or [rope]:
        kind = one.get("rope_type")
        if kind in LENGTH_DEPENDENT_ROPE:
            # Which of the two counts differs between the kinds, and between versions of transformers.
            original = one.get("original_max_position_embeddings") or text.max_position_embeddings
            limits[kind] = min(original, text.max_position_embeddings)
    return limits


def layer_kinds(text: Any) -> list[str]:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    return [str(kind) for kind in kinds]


def recurrent_layers(text: Any) -> list[str]:
    feed_forward = {"mlp", "moe"}
    return sorted(set(layer_kinds(text)) - ATTENTION - feed_forward)


def refuse_beyond_full_attention(config: Any, context: int) -> None:
    """Refuse layers that do not attend to all earlier tokens, for a caller whose masks have no other rule.

    A window that no sequence of `context` tokens (prompt and answer together) exceeds changes nothing.

    Raises:
        UnsupportedModel: with the field and its value.
    """
    name = architecture(config)
    if recurrent := recurrent_layers(config.get_text_config()):
        raise UnsupportedModel(
            f"{name} is not served by regraft's own engine: it has layers of type {', '.join(recurrent)}. Use vLLM."
        )
    for field, tokens in windows(config).items():
        if tokens < context:
            raise UnsupportedModel(
                f"{name} is not served by regraft's own engine with a context of {context} tokens: its layers attend "
                f"to a window ({field} = {tokens}). Use vLLM, or set context = {tokens} or less in its entry of the "
                "model registry."
            )


def architecture(config: Any) -> str:
    """The class's name where the config has it, otherwise its model type."""
    names = getattr(config, "architectures", None) or [config.model_type]
    return str(names[0])


def has_experts(config: Any) -> bool:
    """Whether the model is a mixture of experts."""
    return experts_in(vars(config.get_text_config())) is not None


def suspects(config: Any) -> str:
    """List features of the config that this service does not implement, for a message."""
    text = config.get_text_config()
    reasons = [f"layers of type {kind}" for kind in recurrent_layers(text)]
    reasons += [f"a window of {tokens} tokens ({field})" for field, tokens in windows(config).items()]
    reasons += [f"a rotary embedding of type {kind}" for kind in rope_limits(text)]
    if getattr(text, "kv_lora_rank", None):
        reasons.append(f"latent attention (kv_lora_rank = {text.kv_lora_rank})")
    reasons += [
        f"{field} = {getattr(text, field)}"
        for field in (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "logits_scaling",
            "logit_scale",
            "lm_head_multiplier",
        )
        if getattr(text, field, None) not in (None, 1, 1.0)
    ]
    return "; ".join(reasons) or "a part of the architecture that is not in its config"


@contextmanager
def refusing(config: Any) -> Iterator[None]:
    """Convert errors inside the context to refusals of the model."""
    try:
        yield
    except Refusal:
        raise
    except Exception as cause:
        if is_out_of_memory(cause):
            raise NotEnoughMemory(
                f"Not enough {memory_named(cause)} to check {architecture(config)} on this machine: {first_line(cause)}"
            ) from cause
        if outage(cause) is not None:  # of the machine, whatever the model
            raise
        raise UnsupportedModel(
            f"{architecture(config)} is not supported: it fails with {first_line(cause)}. Likely "
            f"because of: {suspects(config)}."
        ) from cause


def class_of(config: Any) -> Any:
    """The transformers class, automatic or not, that makes a causal model from this config.

    The automatic class for text does not know multimodal models (Mistral 3, Qwen-VL), nor some of their text parts
    (Mistral 4), whose class is named in the config.
    """
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    for name in getattr(config, "architectures", None) or []:
        if (found := getattr(transformers, name, None)) is not None:
            return found
    return transformers.AutoModelForCausalLM  # refuses it by name


def without_weights(config: Any) -> Any:
    """The model of this config with its parameters on the meta device: names and shapes, no memory."""
    made_by = class_of(config)
    with torch.device("meta"):
        return made_by.from_config(config) if hasattr(made_by, "from_config") else made_by(config)
