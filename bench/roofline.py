"""Count what the trainer does on a GPU with a large model, without the GPU and without the model's weights.

The trainer's own forward and backward pass runs on PyTorch's meta device, where tensors have shapes and no data. Each
operation is counted: its FLOPs, the bytes that it reads and writes, what autograd keeps, the largest tensor. Attention
and rms_norm are stand-ins with the inputs, the output and the kept tensors of CUDA's fused kernels; the pairs of tokens
that attention computes are counted in the mask that the trainer makes of the same micro-batch.

No kernel runs, so nothing here is a measurement of time. `seconds` is a lower bound: each operation takes the longer
of its FLOPs and its bytes at the peaks that NVIDIA publishes for an H100 SXM. `expected_seconds` assumes what kernels
usually reach of them (63 % of the FLOPs in bfloat16, 67 % in float32, 84 % of the bytes) and 4.5 us to launch each.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, masking_utils

from core.jobs import hyperparameters
from core.jobs.hyperparameters import Hyperparameters
from worker.model import attention
from worker.model.batch import tensors_of
from worker.model.full import FullPolicy
from worker.model.policy import Base, Policy, Route
from worker.training.policy_loss import PolicyLoss
from worker.types import Pack

RANK = 16


@dataclass(frozen=True)
class Rates:
    bf16: float  # FLOPs per second, dense
    fp32: float
    bandwidth: float  # bytes per second
    launch: float = 0.0  # least seconds of an operation

    def seconds(self, flops: float, size: int, dtype: torch.dtype) -> float:
        peak = self.fp32 if dtype == torch.float32 else self.bf16
        return max(flops / peak, size / self.bandwidth, self.launch)


PUBLISHED = Rates(989e12, 67e12, 3.35e12)  # NVIDIA's data sheet of the H100 SXM
ASSUMED = Rates(620e12, 45e12, 2.8e12, 4.5e-6)


def llama(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, key_heads: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=65_536,
    )


MODELS = {
    "8b": llama(128_256, 4096, 14_336, 32, 32, 8),
    "32b": llama(152_064, 5120, 27_648, 64, 40, 8),
    "70b": llama(128_256, 8192, 28_672, 80, 64, 8),
}


@dataclass
class Counted:
    """Of one or more micro-batches, forward and backward."""

    flops: Counter[str] = field(default_factory=Counter)  # by "products" and "attention"
    seconds: float = 0.0  # at the published rates
    expected_seconds: float = 0.0  # at the assumed rates
    saved: int = 0  # bytes that autograd keeps of the largest micro-batch
    tokens: int = 0  # padding included
    largest: int = 0  # elements of the largest tensor that is not a weight
    squared: int = 0  # tensors with at least as many elements as a micro-batch has pairs of tokens

    @property
    def total(self) -> float:
        return float(sum(self.flops.values()))


class Operations(TorchDispatchMode):
    """Counts every operation on tensors without data."""

    def __init__(self, counted: Counted, weights: set[int], pairs: int) -> None:
        super().__init__()
        self.counted, self.weights, self.pairs = counted, weights, pairs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        written = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        if not any(one.is_meta for one in [*read, *written]):
            return result
        known = {one.untyped_storage()._cdata for one in read}
        made = [one for one in written if one.untyped_storage()._cdata not in known]
        in_place = func.__name__.split(".")[0].endswith("_")
        if made or in_place:  # others are views
            self._count(func, read, written)
        for one in made:
            if one.untyped_storage()._cdata not in self.weights:
                self.counted.largest = max(self.counted.largest, one.numel())
                self.counted.squared += one.numel() >= self.pairs
        return result

    def _count(self, func: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        name = func.__name__.split(".")[0]
        if "empty" in name:  # writes nothing
            return
        size = sum(one.numel() * one.element_size() for one in [*read, *written])
        flops = 0
        if name.rstrip("_") in ("mm", "bmm", "addmm"):
            left, right = [one for one in read if one.dim() >= 2][-2:]
            flops = 2 * left.numel() * right.shape[-1]
        self.add("products", flops, size, read[-1].dtype if read else torch.bfloat16)

    def add(self, kind: str, flops: float, size: int, dtype: torch.dtype) -> None:
        self.counted.flops[kind] += int(flops)
        self.counted.seconds += PUBLISHED.seconds(flops, size, dtype)
        self.counted.expected_seconds += ASSUMED.seconds(flops, size, dtype)


class _Attention(torch.autograd.Function):
    """A fused kernel's shapes. FLOPs: two products of the pairs forward; backward five, as it computes scores again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pairs: int, operations: Operations
    ) -> Tensor:
        output = torch.empty_like(query)
        statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, statistics)
        ctx.pairs, ctx.operations = pairs, operations
        _Attention._count(ctx, query, key, products=2, passes=1)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        _Attention._count(ctx, query, key, products=5, passes=2)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None

    @staticmethod
    def _count(ctx: Any, query: Tensor, key: Tensor, products: int, passes: int) -> None:
        flops = 2 * products * query.shape[1] * query.shape[3] * ctx.pairs
        size = passes * 2 * 2 * (query.numel() + key.numel())
        ctx.operations.add("attention", flops, size, torch.bfloat16)


class _RootMeanSquare(torch.autograd.Function):
    """The shapes of CUDA's kernels for rms_norm. PyTorch computes it in ten operations on other devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, operations: Operations) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.operations = operations
        operations.add("norms", 0, 2 * x.numel() * x.element_size(), x.dtype)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.operations.add("norms", 0, 3 * gradient.numel() * gradient.element_size(), gradient.dtype)
        return torch.empty_like(gradient), None, None


def executed_pairs(packs: Sequence[Pack]) -> int:
    """Pairs of tokens in the blocks that FlexAttention computes for these packs, in one layer with a causal rule."""
    tensors = tensors_of(packs, "meta")
    width = tensors.input_ids.shape[1]
    real = tensors_of(packs)
    padding = width - real.position_ids.shape[1]
    position = torch.nn.functional.pad(real.position_ids, (0, padding))
    segment = torch.nn.functional.pad(real.segment, (0, padding), value=attention.PADDING)
    layout = attention.Layout.of_rows(position, segment, blocks=True)
    blocks = attention.block_mask(layout, attention.causal_mask_function)
    assert blocks.full_kv_num_blocks is not None
    return int((blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum()).item()) * attention.BLOCK**2


class _Tokens:
    eos_token_id = 2
    chat_template = None


def trainer(
    config: Any,
    forward: str,
    *,
    checkpointed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    full: bool = False,
) -> PolicyLoss:
    """The trainer's gradient of a model without data, as a GPU computes it. `full`: of all weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.requires_grad_(False)
    base = Base("m", "", model.eval(), _Tokens(), 65_536)  # type: ignore[arg-type]
    policy = FullPolicy(base) if full else Policy(base, rank=RANK, alpha=32, seed=0)
    policy.use(Route("packed", blocks=True) if forward == "packed" else Route("rows", decode="padded"))
    if checkpointed:
        policy.checkpoint_layers()
    settings = hyperparameters.resolve(Hyperparameters(), rows=8, parameters=8_000_000_000, context=65_536)
    return PolicyLoss(policy, settings)


def count(gradient: PolicyLoss, packs: Sequence[Pack], counted: Counted) -> None:
    """Add one micro-batch."""
    policy = gradient.policy
    weights = {one.untyped_storage()._cdata for one in policy.model.parameters()}
    tensors = gradient.tensors(packs)
    rows, width = tensors.input_ids.shape
    if policy.route.forward == "packed":
        pairs = executed_pairs(packs)
    else:  # the causal blocks of each row
        pairs = rows * (width * (width + attention.BLOCK) // 2)
    operations = Operations(counted, weights, width * width)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    alive: list[Any] = []  # so that no other storage gets the address of one that is counted
    with fused(pairs, operations), operations:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = gradient.logprobs(tensors)[0].sum()
        total.backward()  # type: ignore[no-untyped-call]
    counted.tokens += rows * width
    counted.saved = max(counted.saved, sum(kept.values()))


@contextmanager
def fused(pairs: int, operations: Operations) -> Iterator[None]:
    """Attention, in blocks and in transformers' own forward, and rms_norm are the stand-ins during the context."""

    def in_blocks(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        output: Tensor = _Attention.apply(query, key, value, pairs, operations)  # type: ignore[no-untyped-call]
        return output.transpose(1, 2)

    def sdpa(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Tensor:
        output: Tensor = _Attention.apply(query, key, value, pairs, operations)  # type: ignore[no-untyped-call]
        return output

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, epsilon: float) -> Tensor:
        output: Tensor = _RootMeanSquare.apply(x, weight, operations)  # type: ignore[no-untyped-call]
        return output

    # transformers looks at the positions, which have no data here, whether rows hold several documents: they hold one.
    with (
        patch.object(attention, "_in_blocks", in_blocks),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", sdpa),
        patch.object(torch.nn.functional, "rms_norm", rms_norm),
        patch.object(masking_utils, "find_packed_sequence_indices", lambda *args: None),
    ):
        yield


def necessary(gradient: PolicyLoss, prompt: int, answers: Sequence[int]) -> float:
    """FLOPs that no exact method can save: the prompt once, visible pairs only, nothing computed twice.

    Of a frozen product, 2 for a weight and token forward and 2 for the gradient of its input; of an adapter also 2 for
    the gradient of its weight; of attention two products forward and four backward.
    """
    config = gradient.policy.model.get_base_model().config
    policy = gradient.policy
    adapter = sum(parameter.numel() for parameter in policy.trainable)
    head = config.hidden_size * config.vocab_size
    embeddings = head if config.tie_word_embeddings else 2 * head
    frozen = sum(one.numel() for one in policy.model.parameters() if not one.requires_grad)
    base = frozen - embeddings
    tokens, trained = prompt + sum(answers), sum(answers)
    pairs = prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in answers)
    size = config.num_attention_heads * config.head_dim
    return float(
        4 * base * tokens
        + 6 * adapter * tokens
        + 4 * head * trained
        + 12 * size * pairs * config.num_hidden_layers
    )
