"""Memory of this machine, the shape of a model as transformers describes it, and activation checkpointing.

worker/model/sizing.py computes a model's memory requirements, without torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from worker.model.sizing import Shape


def shape_of(config: Any, dtype: torch.dtype) -> Shape:
    """Return the shape of a model from its transformers config, without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    return Shape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_parameters=linear,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        queries=head_dim * text.num_attention_heads,
        heads=text.num_attention_heads,
        intermediate=text.intermediate_size,
        key_values=2 * head_dim * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
        vocabulary=text.vocab_size,
        bytes_each=torch.finfo(dtype).bits // 8,
    )


def available(
    device: str, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the free bytes of the GPU, or the lesser of this machine's and its container's."""
    if device == "cuda":
        free: int = torch.cuda.mem_get_info()[0]
        return free
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        # The page cache counts as used, but the kernel reclaims it on demand.
        kept = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, int(most) - int(used.read_text()) + int(kept["inactive_file"]))
    return free


def checkpoint_layers(layers: nn.ModuleList) -> None:
    """Recompute the activations of each layer in the backward pass, and keep only its input.

    Applies to calls with gradients enabled, a per-thread state, so sampling in another thread is not affected.
    """
    for layer in layers:
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Layers use no random numbers, because there is no dropout.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return again
