"""A base model whose decoder layers are sharded over GPUs with FSDP2, read from its files shard by shard.

Each GPU keeps a part of every layer and gathers a layer while it is computed. The adapter, the embeddings and the head
are on every GPU: the head is used outside of any module's forward pass. The base is frozen, so nothing is reduced, and
groups of GPUs that hold the same shards need not know of each other.

The checks that need whole weights run on a stand-in: the same config with few layers and random weights, on one GPU.
"""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from core import fingerprint
from core.chat_templates import Arguments
from core.registry import BaseModelEntry
from worker.model import quantized
from worker.model.architecture import architecture, class_of, layer_kinds, refusing
from worker.model.policy import (
    DTYPES,
    Base,
    Policy,
    read_config,
    read_generation_config,
    read_tokenizer,
    source_of,
)
from worker.refusals import InvalidModel, UnsupportedModel

LEAST_LAYERS = 2  # of the stand-in


def load_bases(
    name: str,
    entry: BaseModelEntry,
    cache: Path,
    device: str,
    chat_template: str | None = None,
    template_arguments: Arguments | None = None,
) -> tuple[Base, Base]:
    """Return the base model without weights, on the meta device, and its stand-in with random ones on `device`.

    Raises:
        UnsupportedModel: the model cannot be sharded; the message says why.
        InvalidModel, ModelUnavailable, NotEnoughMemory: as `load_base`.
    """
    source, dtype = source_of(entry, cache), DTYPES[entry.dtype]
    files = fingerprint.of_folder(source) if isinstance(source, Path) else ""
    config = read_config(source)
    refuse_unsharded(config)
    tokenizer = read_tokenizer(entry, source, chat_template, template_arguments)
    with refusing(config):
        with torch.device("meta"):
            empty = _model_from_config(config, dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = _model_from_config(few_layers(config), dtype)
        if getattr(empty, "_keep_in_fp32_modules", None) or getattr(
            empty, "_keep_in_fp32_modules_strict", None
        ):
            raise _unsupported(config, "some of its weights are kept in another precision")
        stand_in = Base(name, source, small.requires_grad_(False).to(device).eval(), tokenizer, entry.context)
        read_generation_config(empty, source)
        empty.requires_grad_(False)
        base = Base(name, source, empty.eval(), tokenizer, entry.context, files, logits=stand_in.parts.logits)
        if type(base.parts.decoder) is not type(stand_in.parts.decoder) or base.parts.layers is None:
            raise _unsupported(config, "its layers are not in one list")
    return base, stand_in


def refuse_unsharded(config: Any) -> None:
    """Raises UnsupportedModel: the weights are quantized."""
    if found := quantized.format_of(config):
        raise _unsupported(config, f"its weights are quantized ({found})")


def _unsupported(config: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{architecture(config)} cannot be sharded over several GPUs: {why}. Use a GPU with room for the whole model, "
        "or another model."
    )


def _model_from_config(config: Any, dtype: torch.dtype) -> Any:
    made_by = class_of(config)
    make = made_by.from_config if hasattr(made_by, "from_config") else made_by._from_config
    return make(copy.deepcopy(config), dtype=dtype)


def few_layers(config: Any) -> Any:
    """The config with as few layers as have one of each kind, at least LEAST_LAYERS."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = layer_kinds(text)
    layers = next((n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds)), 1)
    text.num_hidden_layers = min(text.num_hidden_layers, max(layers, LEAST_LAYERS))
    for field in ("layer_types", "layers_block_type"):
        if isinstance(getattr(text, field, None), list):
            setattr(text, field, getattr(text, field)[: text.num_hidden_layers])
    return small


def shard(policy: Policy, stand_in: Policy, mesh: DeviceMesh, *, seed: int) -> None:
    """Shard a policy without weights over the GPUs of `mesh` (one dimension), and fill it from the model's files.

    Args:
        stand_in: the policy on the stand-in, which has the buffers.

    Raises:
        UnsupportedModel: the files do not have the model's parameters under their own names.
        InvalidModel: parameters are missing in the files.
    """
    config = policy.causal.config
    adapter = set(policy.trainable)
    outside = set(policy.outside_of_layers)
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=adapter)
    # The last norm is sharded again after each forward too: a state dict shards it on the one rank that saves a
    # checkpoint, and that rank alone would gather it in the next step.
    fully_shard(policy.text_decoder, mesh=mesh, reshard_after_forward=True, ignored_params=adapter | outside)

    place(policy, stand_in)
    _draw_adapter(policy, seed)
    files = quantized.files_by_tensor(policy.source)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if not parameter.requires_grad:
                fill(name_in_files(name), parameter, files, mesh, config, parameter.dtype)


def place(policy: Policy, stand_in: Policy) -> None:
    """Move a model without weights to the stand-in's device, where it has memory for them, and fill its buffers.

    Raises:
        UnsupportedModel: the stand-in has other buffers.
    """
    device = stand_in.device

    def placed(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    policy.model._apply(placed)
    policy.causal.tie_weights()
    _copy_buffers(policy.model, dict(stand_in.model.named_buffers()), policy.causal.config)


@torch.no_grad()
def _draw_adapter(policy: Policy, seed: int) -> None:
    """Draw a fresh adapter as PEFT does, which has drawn none without weights: A is random, B is zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.model.named_parameters():
        if ".lora_A." in name:
            fresh = torch.empty(parameter.shape)
            parameter.copy_(nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator))
        elif ".lora_B." in name:
            parameter.zero_()


def _copy_buffers(model: nn.Module, known: Mapping[str, Tensor], config: Any) -> None:
    for name, buffer in model.named_buffers():
        if name not in known or known[name].shape != buffer.shape:
            raise _unsupported(config, f"its layers have the buffer {name}")
        buffer.copy_(known[name])


def name_in_files(name: str) -> str:
    """Of a parameter of a PEFT model."""
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part != "base_layer")  # one of each wrapper: experts have two


def fill(
    name: str,
    parameter: Tensor,
    files: Mapping[str, str],
    mesh: DeviceMesh,
    config: Any,
    dtype: torch.dtype,
) -> None:
    """Read a parameter, or this process's part of it, from the model's files, rounded to `dtype`.

    Raises:
        UnsupportedModel: the files have no tensor of this name.
        InvalidModel: it has another shape.
    """
    if name not in files:
        raise _unsupported(config, f"its files have no tensor {name}, so they need a conversion")
    with safe_open(files[name], "pt") as tensors:
        rows = tensors.get_slice(name)
        if list(rows.get_shape()) != list(parameter.shape):
            raise InvalidModel(
                f"The model's tensor {name} has another shape in its files than in its config.json."
            )
        if not isinstance(parameter, DTensor):
            parameter.copy_(rows[:].to(dtype))
        elif len(local := parameter.to_local()):
            local.copy_(rows[rows_of(parameter, mesh)].to(dtype))


def rows_of(parameter: DTensor, mesh: DeviceMesh) -> slice:
    """The rows of a parameter that this process keeps: as torch.chunk divides it."""
    each = -(-parameter.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * each, parameter.shape[0])
    return slice(first, first + parameter.to_local().shape[0])
