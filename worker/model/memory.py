"""Memory of this machine, the shape of a model as transformers describes it, and activation checkpointing.

worker/model/sizing.py computes a model's memory requirements, without torch.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from core.units import GIB
from worker import main_memory
from worker.model import quantized, recompute
from worker.model.adapters import adaptable_layers
from worker.model.architecture import without_weights
from worker.model.packed_formats import PackedFormat
from worker.model.sizing import PackedSizes, Shape
from worker.model.targets import active_experts_in, experts_in
from worker.out_of_memory import OutOfMainMemory, lacking
from worker.refusals import MemoryTaken, NotEnoughMemory, first_line
from worker.sharing.base import RunsAlone

log = logging.getLogger(__name__)

DRIVER_BYTES = GIB  # of a GPU, for the driver and the CUDA context of a process
# Contexts of CUDA, and what an engine allocates beside its plan. Other processes with less than this are no reason for
# an out-of-memory error.
UNEXPLAINED_BYTES = GIB


def shape_of(config: Any, dtype: torch.dtype) -> Shape:
    """Return the shape of a model from its transformers config, without weights."""
    model = without_weights(config)
    text = config.get_text_config()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings()
    bytes_each = torch.finfo(dtype).bits // 8
    format = quantized.packed_format_of(config)
    # A model without attention (state spaces) has no heads: one of the width of its hidden states stands for its mixer.
    heads = _heads(text)
    queries = query_width(text)
    widest = max((module.out_features for module in linear if module is not head), default=text.hidden_size)
    intermediate = getattr(text, "intermediate_size", None)
    wide = max(intermediate if isinstance(intermediate, int) else widest, _width_of_experts(text))
    return Shape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_parameters=sum(module.weight.numel() for module in linear),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        queries=queries,
        heads=heads,
        intermediate=wide,
        key_values=2 * queries // heads * (getattr(text, "num_key_value_heads", None) or heads),
        vocabulary=text.vocab_size,
        bytes_each=bytes_each,
        adaptable=tuple(adaptable_layers(model)),
        packed=PackedSizes.of(format, _packed_layers(format, model), bytes_each),
        recurrent_layers=recurrent_layers_of(config),
        state_bytes=state_bytes_of(config),
        head_norms=_has_head_norms(model),
        layer_norms=recompute.norms_of_a_layer(model),
        gated=_has_gates(model, text.hidden_size, intermediate),
        recomputes_norms=recompute.supports_norms(model),
        recomputes_gates=recompute.supports_gates(model),
        keeps_scores=bool(getattr(text, "attn_logit_softcapping", None))
        or any("sinks" in name for name, _ in model.named_parameters()),
    )


def _packed_layers(format: PackedFormat | None, model: PreTrainedModel) -> list[tuple[int, int]]:
    """Outputs and inputs of the layers that stay packed, as the config says."""
    if format is None:
        return []
    head = model.get_output_embeddings()
    return [
        (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and not format.skips(name)
    ]


def query_width(text: Any) -> int:
    """Return the elements of a token's queries in one layer, of all heads, from the config of the text model."""
    return head_width(text) * _heads(text)


def head_width(text: Any) -> int:
    """Return the elements of a head of attention, from the config of the text model."""
    given: int | None = getattr(text, "head_dim", None)
    return given or int(text.hidden_size // _heads(text))


def _heads(text: Any) -> int:
    return int(getattr(text, "num_attention_heads", None) or 1)


def _has_head_norms(model: nn.Module) -> bool:
    """Whether modules of attention contain norms: of queries and keys, or of what these are made of."""
    return any(
        "Norm" in type(part).__name__
        for module in model.modules()
        if "Attention" in type(module).__name__
        for part in module.children()
    )


def _width_of_experts(text: Any) -> int:
    """The intermediate sizes of all experts that one token goes through; 0: not a mixture."""
    active = active_experts_in(vars(text))
    if experts_in(vars(text)) is None or active is None:
        return 0
    each = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    return each * active if isinstance(each, int) else 0


def _has_gates(model: nn.Module, hidden: int, intermediate: object) -> bool:
    """Whether a layer makes more than one tensor of the intermediate size, or makes them with no linear layers."""
    layers = max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len, default=())
    made = [
        part.out_features
        for part in next((layer.modules() for layer in layers), iter(()))
        if isinstance(part, nn.Linear) and part.in_features == hidden
    ]
    return [size for size in made if size == intermediate] != [intermediate]


def recurrent_layers_of(config: Any) -> int:
    """How many layers keep a state instead of the keys and values of each token."""
    kinds = DynamicCache(config=config.get_text_config()).layers
    return sum(
        isinstance(kind, LinearAttentionCacheLayerMixin) and not isinstance(kind, DynamicLayer)
        for kind in kinds
    )


def state_bytes_of(config: Any) -> int:
    """Bytes in float32 of the recurrent state of one layer of a sequence, at most; 0: the model has none.

    Families name the sizes of their states differently, and only a forward pass would make one.
    """
    text = config.get_text_config()
    kinds = DynamicCache(config=text).layers
    if not any(isinstance(kind, LinearAttentionCacheLayerMixin) for kind in kinds):
        return 0

    def size(*names: str) -> int:
        found = (getattr(text, name, None) for name in names)
        return next((value for value in found if isinstance(value, int)), 0)

    convolved = size(
        "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_kernel_size", "conv_L_cache"
    )
    # Gated delta networks: a matrix for each head of values.
    keys, values = size("linear_key_head_dim"), size("linear_num_value_heads") * size("linear_value_head_dim")
    delta = values * keys + convolved * (2 * size("linear_num_key_heads") * keys + values)
    # State spaces: a vector for each channel.
    state = size("mamba_d_state", "ssm_state_size", "state_size")
    heads = size("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    wide = heads * size("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    inner = max(wide, text.hidden_size * max(1, size("mamba_expand", "expand")))
    groups = max(1, size("mamba_n_groups", "n_groups", "mamba_ngroups"))
    spaces = state * inner + convolved * (inner + 2 * groups * state) if state else 0
    if not keys and not spaces and convolved:
        return 4 * convolved * int(text.hidden_size)  # a convolution alone
    # Others are linear attention: a matrix for each head.
    return 4 * (max(delta, spaces) or query_width(text) ** 2 // _heads(text))


def expects_rows(config: Any) -> bool:
    """Whether the model will probably be computed in rows; worker/checks/compatibility.py finds out with its weights.

    Recurrent states and indexes of keys cannot be shared in a pack, nor can a class that does not ask for attention.
    """
    model = without_weights(
        config
    )  # first: the module of some models registers their kinds of cache (DeepSeek V4)
    kinds = DynamicCache(config=config.get_text_config()).layers
    mixed = any(isinstance(kind, LinearAttentionCacheLayerMixin | DynamicIndexedLayer) for kind in kinds)
    return mixed or not type(model)._supports_attention_backend


def available(device: str) -> int:
    """Return the free bytes of the GPU, or the lesser of this machine's and its container's."""
    if device == "cuda":
        free: int = torch.cuda.mem_get_info()[0]
        return free
    return main_memory.available()


def capacity(device: str) -> int:
    """Return the bytes that the device has for a job when no other job or server uses it."""
    if device == "cuda":
        whole: int = torch.cuda.mem_get_info()[1]
        return whole - DRIVER_BYTES
    return main_memory.capacity()


def device_name(device: str) -> str:
    """Return the kind of the device, such as "NVIDIA H100 80GB HBM3"."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def own(device: str, statm: Path = Path("/proc/self/statm")) -> int:
    """Return the bytes of the device that this process uses."""
    if device == "cuda":
        return torch.cuda.memory_reserved()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device in bytes: what is free now, all that a job could get, and what this process uses."""

    available: Callable[[str], int] = available
    capacity: Callable[[str], int] = capacity
    own: Callable[[str], int] = own

    def used_by_others(self, device: str) -> int:
        """Return the bytes that other processes use, beyond what a job never gets."""
        return max(0, self.capacity(device) - self.available(device) - self.own(device))


@contextmanager
def later_if_memory_is_taken(
    device: str,
    *,
    beside_others: bool,
    ask: Callable[[], None] = lambda: None,
    memory: DeviceMemory = DeviceMemory(),
) -> Iterator[None]:
    """A job that has run out of memory before it has computed anything is refused only on a free device.

    Args:
        ask: asks idle models for their memory, for the next attempt.
        beside_others: whether other jobs of the worker share the device.

    Raises:
        RunsAlone: the memory did not suffice beside other jobs of the worker.
        MemoryTaken: it did not suffice beside the memory that other processes use now.
        NotEnoughMemory: as before, because no other process uses the device.
        OutOfMainMemory: main memory did not suffice for a job on a GPU.
    """
    try:
        yield
    except Exception as cause:
        lacks = lacking(cause, device) or (device if isinstance(cause, NotEnoughMemory) else None)
        if lacks is None:
            raise
        if beside_others:
            raise RunsAlone(f"beside others {first_line(cause)}") from cause
        if not (taken := memory.used_by_others(lacks)):
            if lacks == device or isinstance(cause, NotEnoughMemory):
                raise
            raise OutOfMainMemory(cause, memory.available(lacks), device) from cause
        log.warning("other processes use %.1f GiB of the memory of %s: %s", taken / GIB, lacks, cause)
        if lacks == device:
            ask()
        raise MemoryTaken(lacks) from cause


def use_expandable_segments() -> None:
    """Have PyTorch release all memory that it does not use at `empty_cache`, page by page.

    An engine that sleeps wakes in that memory. Otherwise a small tensor that lives on, such as a moment of AdamW, keeps
    the whole segment that it is in. A setting of this process: vLLM refuses it in an engine that sleeps.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def release_unused(device: str) -> None:
    """Give back the memory of what is not used any more, which Python or the allocator may still have."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def checkpoint_layers(layers: Iterable[nn.Module]) -> None:
    """Recompute the activations of each layer in the backward pass, and keep only its input. Once, if called again.

    Applies to calls with gradients enabled, a per-thread state, so sampling in another thread is not affected.
    """
    for layer in layers:
        if not getattr(layer.forward, "recomputes", False):
            layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Layers use no random numbers, because there is no dropout.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    recomputing.recomputes = True  # type: ignore[attr-defined]
    return recomputing
