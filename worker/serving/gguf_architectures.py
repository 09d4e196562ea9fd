"""The architectures that an export writes as GGUF: names of tensors, order of rows, and hyperparameters."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import MODEL_ARCH
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.model.memory import head_width
from worker.refusals import UnsupportedModel

Rows = npt.NDArray[np.float32]
ROPE_FACTORS = "rope_freqs.weight"
# Options of a config that add biases to the layers.
BIASES = ("attention_bias", "mlp_bias")
# Buffers in the files of old checkpoints, which llama.cpp computes itself.
COMPUTED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Family:
    """An architecture of llama.cpp.

    Args:
        rotates_neighbors: rotary embeddings turn rows 2i and 2i+1 of a head of q and k together, where transformers
            turns rows i and i + d/2.
        rope_types: of transformers' rotary embeddings.
        biases: options of a config that llama.cpp loads the biases of.
    """

    arch: MODEL_ARCH
    rotates_neighbors: bool
    rope_types: Sequence[str] = ("default",)
    biases: Sequence[str] = ()


# By `model_type`. tests/worker/test_gguf.py compares each with llama.cpp itself.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(MODEL_ARCH.LLAMA, True, ("default", "llama3"), ("attention_bias", "mlp_bias")),
    "mistral": Family(MODEL_ARCH.LLAMA, rotates_neighbors=True),
    "qwen2": Family(MODEL_ARCH.QWEN2, rotates_neighbors=False),
    "qwen3": Family(MODEL_ARCH.QWEN3, rotates_neighbors=False),
    "smollm3": Family(MODEL_ARCH.SMOLLM3, rotates_neighbors=True),
}


class Architecture:
    """The mapping of one model to llama.cpp."""

    def __init__(self, config: Any) -> None:
        """`config`: the model's transformers config.

        Raises:
            UnsupportedModel: its architecture, or an option of its config, has no tested mapping.
        """
        self._config = config
        self._family = _family_of(config)
        self._names = gguf.get_tensor_name_map(self._family.arch, config.num_hidden_layers)
        self.name: str = gguf.MODEL_ARCH_NAMES[self._family.arch]

    def tensor_name(self, name: str) -> str:
        """The name in GGUF of a tensor in the model's files, such as model.layers.0.mlp.up_proj.weight.

        Raises:
            UnsupportedModel: llama.cpp has no such tensor.
        """
        found: str | None = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UnsupportedModel(
                f"GGUF has no name for the tensor {name} of {self._config.model_type}. Export the format 'merged'."
            )
        return found

    def is_written(self, name: str) -> bool:
        """Whether a tensor of the model's files has a place in GGUF. A tied head is read from the embeddings."""
        is_tied_head = name == "lm_head.weight" and self._config.tie_word_embeddings
        return not is_tied_head and not name.endswith(COMPUTED)

    def targets(self, names: Collection[str]) -> dict[str, str]:
        """The names in GGUF of the weights that an adapter changes.

        Raises:
            UnsupportedModel: llama.cpp has no such tensor, or no place for a change of it.
        """
        for name in names:
            if not self.is_written(name):
                raise UnsupportedModel(
                    f"GGUF is not supported for this adapter: it changes {name}, which the model shares with its "
                    "embeddings, and llama.cpp reads one tensor for both. Export the format 'merged'."
                )
        return {name: self.tensor_name(name) for name in names}

    def rows(self, name: str, tensor: Rows) -> Rows:
        """Put the rows of a weight [out, in], a bias [out] or a B [out, r] into llama.cpp's order.

        Args:
            name: of the layer's tensor in the model's files.
        """
        layer = name.rpartition(".")[0].rpartition(".")[2]
        if not self._family.rotates_neighbors or layer not in ("q_proj", "k_proj"):
            return tensor
        config = self._config
        heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))

    def extra_tensors(self) -> dict[str, Rows]:
        """Tensors that the model's files do not have, by their names in GGUF."""
        rope = self._config.rope_parameters
        if rope["rope_type"] != "llama3":
            return {}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self._config, torch.device("cpu"))
        width = 2 * len(scaled)
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        return {ROPE_FACTORS: (plain / scaled).numpy()}

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Write the hyperparameters."""
        config = self._config
        width = head_width(config)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(width)
        writer.add_vocab_size(config.vocab_size)


def _family_of(config: Any) -> Family:
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModel(
            f"GGUF is not supported for {config.model_type}: its tensors and hyperparameters have no tested mapping to "
            f"llama.cpp. There is one for {', '.join(FAMILIES)}. Export the format 'merged' or 'peft' instead."
        )
    problem = _problem(config, family)
    if problem:
        raise UnsupportedModel(
            f"GGUF is not supported for this {config.model_type}: {problem}. Export the format 'merged' or 'peft'."
        )
    return family


def _problem(config: Any, family: Family) -> str:
    """The option of a config whose mapping is not tested; empty if there is none."""
    rope = config.rope_parameters
    if rope.get("rope_type") not in family.rope_types:
        known = " or ".join(map(repr, family.rope_types))
        return f"its rotary embedding is of the type {rope.get('rope_type')!r}, and not {known}"
    for option in BIASES:
        if getattr(config, option, False) and option not in family.biases:
            return f"its layers have biases ({option})"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding turns a part of each head"
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    if getattr(config, "sliding_window", None) or set(kinds) != {"full_attention"}:
        return "its attention has a window"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and not silu"
    # llama.cpp has this pattern in its code, and reads none from the file.
    interval = 4 if config.model_type == "smollm3" else 0
    skipped = [number for number, rotates in enumerate(getattr(config, "no_rope_layers", [])) if not rotates]
    if skipped != [
        number for number in range(config.num_hidden_layers) if interval and number % interval == 3
    ]:
        return "other layers than every fourth have no rotary embedding"
    return ""
