"""What a job will need of memory, said before it starts: an estimate from the model's shape, to be refused by.

It errs upwards: a job that is refused with numbers costs a minute, one that runs out of memory in step 30 an hour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HEAD_CHUNK = (
    512  # rows of the vocabulary matrix product alive at once: 512 x 49,152 float32 logits are 100 MB
)


class DoesNotFit(Exception):
    """The job needs more memory than the machine has; the message has the numbers, and what to change."""


@dataclass(frozen=True)
class Shape:
    """What memory depends on. Sizes in elements."""

    parameters: int
    linear_parameters: int  # of these, in linear layers: those an adapter is put on, and the head
    layers: int
    hidden: int
    intermediate: int
    key_values: int  # of one token in one layer: keys and values of all heads
    vocabulary: int
    bytes_each: int  # of a weight

    @property
    def token_cache_bytes(self) -> int:
        """Keys and values of one token."""
        return self.layers * self.key_values * self.bytes_each


@dataclass(frozen=True)
class Estimate:
    """Bytes, by what they are for."""

    weights: int
    adapter: int
    activations: int
    head: int
    cache: int

    @property
    def overhead(self) -> int:
        """What no formula has: buffers of a backward pass, fragments, the libraries.

        Measured on SmolLM2-135M, CPU, rank 16: 3.9 GiB at peak where the parts make 3.8 (1,016 tokens), 6.3 for 5.6
        (2,040 tokens), 3.1 for 2.2 (2,040 tokens, checkpointed).
        """
        return self._parts // 5 + 2**29

    @property
    def total(self) -> int:
        return self._parts + self.overhead

    @property
    def _parts(self) -> int:
        return self.weights + self.adapter + self.activations + self.head + self.cache

    def __str__(self) -> str:
        names = [*self.__dataclass_fields__, "overhead"]
        parts = (f"{name} {getattr(self, name) / 2**30:.1f}" for name in names)
        return f"{self.total / 2**30:.1f} GiB ({', '.join(parts)})"


@dataclass(frozen=True)
class Needs:
    """What a job does with the model."""

    rank: int
    token_budget: int  # of a micro-batch
    cache_bytes: int  # of the keys and values that are alive at once while sampling
    packed: bool  # the linear weights are kept twice more, as worker/lora.py does on a CPU
    copies: int  # of the weights: a sampler in a process of its own has one, too


def estimate(shape: Shape, needs: Needs, checkpointed: bool) -> Estimate:
    """The peak of a run that samples and trains.

    `checkpointed`: a layer's activations are computed again in the backward pass, so those of one layer are alive
    at a time.
    """
    # What autograd keeps of a token in a layer, counted in the Llama block with an adapter on every linear layer: its
    # two norms (3 each), the inputs of the adapters (3 and one intermediate), queries, keys and values as attention
    # reads them, its output, gate, up and their products. In float32, as the adapters are.
    per_layer = 4 * (14 * shape.hidden + 5 * shape.intermediate + 7 * needs.rank)
    kept = 4 * shape.hidden * shape.layers + per_layer if checkpointed else per_layer * shape.layers
    adapter = adapter_parameters(shape, needs.rank)
    return Estimate(
        weights=shape.bytes_each
        * (needs.copies * shape.parameters + (2 * shape.linear_parameters if needs.packed else 0)),
        adapter=adapter * 4 * 4,  # weight, gradient and two moments, in float32
        activations=needs.token_budget * kept,
        head=HEAD_CHUNK * shape.vocabulary * 4 * 4,  # logits, their log-softmax, its exponential, a gradient
        cache=needs.cache_bytes,
    )


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Of an adapter on all seven linear layers of a block: a rank's row and column for each."""
    attention = 4 * shape.hidden + 2 * shape.hidden + shape.key_values  # q, o; k and v
    feed_forward = 3 * (shape.hidden + shape.intermediate)
    return shape.layers * rank * (attention + feed_forward)


def plan(shape: Shape, needs: Needs, available: int) -> bool:
    """Whether to checkpoint activations: only if it does not fit without.

    Raises:
        DoesNotFit: it does not fit with, either.
    """
    plain = estimate(shape, needs, False)
    if plain.total <= available:
        return False
    checkpointed = estimate(shape, needs, True)
    if checkpointed.total <= available:
        return True
    raise DoesNotFit(
        f"The job needs about {checkpointed}, and {available / 2**30:.1f} GiB are free. Choose a smaller model, "
        "lora_rank or max_completion_tokens, or have the operator lower REGRAFT_TRAIN_TOKEN_BUDGET."
    )


def shape_of(config: Any, dtype: torch.dtype) -> Shape:
    """Of a model that is described by a transformers config, without its weights."""
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
        intermediate=text.intermediate_size,
        key_values=2 * head_dim * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
        vocabulary=text.vocab_size,
        bytes_each=torch.finfo(dtype).bits // 8,
    )


def available(
    device: str, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that are free: of the GPU, or of this machine or container, whichever has less."""
    if device == "cuda":
        free: int = torch.cuda.mem_get_info()[0]
        return free
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        # What was read from files is counted as used, and given back when somebody needs the room.
        kept = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, int(most) - int(used.read_text()) + int(kept["inactive_file"]))
    return free


def checkpoint_layers(layers: nn.ModuleList) -> None:
    """Have each layer compute its activations again in the backward pass, and keep only its input till then.

    Decided at each call by whether gradients are wanted, which is a matter of the thread: sampling in another one
    goes on as before.
    """
    for layer in layers:
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # No random numbers in there: there is no dropout.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return again
