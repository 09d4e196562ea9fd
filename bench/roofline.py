"""Count what the trainer does on a GPU with a large model, without the GPU and without the model's weights.

The trainer's own forward and backward pass runs on PyTorch's meta device, where tensors have shapes and no data. Each
operation is counted: its FLOPs, the bytes that it reads and writes, what autograd keeps, the largest tensor. Operations
in place and into a given tensor count; those that touch some elements of a tensor count these. Attention
and rms_norm are stand-ins with the inputs, the output and the kept tensors of CUDA's fused kernels; the pairs of tokens
that attention computes are counted in the mask that the trainer makes of the same micro-batch.

No kernel runs, so nothing here is a measurement of time. `seconds` is a lower bound: each operation takes the longer
of its FLOPs and its bytes at the peaks that NVIDIA publishes for an H100 SXM. `expected_seconds` assumes what kernels
usually reach of them (63 % of the FLOPs in bfloat16, 67 % in float32, 84 % of the bytes) and 4.5 us to launch each.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from worker.model.batch import Tensors, tensors_of
from worker.model.full import FullPolicy
from worker.model.policy import Base, Policy, Route
from worker.model.token_logprobs import logprobs_and_entropy
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


SPARSE = ("gather", "scatter_", "scatter_add_")
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
    read: int = 0  # bytes
    written: int = 0  # bytes
    operations: int = 0  # that a GPU launches, without views
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
        if made or _is_in_place(func):  # others are views
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
        if _writes_to_given(func):  # the last argument is not read
            read = read[: -len(written)]
        elif name.startswith("new_"):
            read = []
        flops = 0
        if name.rstrip("_") in ("mm", "bmm", "addmm"):
            left, right = [one for one in read if one.dim() >= 2][-2:]
            flops = 2 * left.numel() * right.shape[-1]
        dtype = read[-1].dtype if read else torch.bfloat16
        if name in SPARSE:  # as many elements of the tensor as there are indices or values
            few = min([*read, *written], key=Tensor.numel)
            self.add("products", flops, _bytes(read[1:]) + _bytes([few]), _bytes([few]), dtype)
        else:
            self.add("products", flops, _bytes(read), _bytes(written), dtype)

    def add(self, kind: str, flops: float, read: int, written: int, dtype: torch.dtype) -> None:
        self.counted.flops[kind] += int(flops)
        self.counted.read += read
        self.counted.written += written
        self.counted.operations += 1
        self.counted.seconds += PUBLISHED.seconds(flops, read + written, dtype)
        self.counted.expected_seconds += ASSUMED.seconds(flops, read + written, dtype)


def _writes_to_given(func: Any) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def _is_in_place(func: Any) -> bool:
    return _writes_to_given(func) or func.__name__.split(".")[0].endswith("_")


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


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
        # Forward three are read and the output is written; backward all of these, and gradients of the three written.
        wide, narrow = 2 * query.numel(), 2 * key.numel()
        read = wide + 2 * narrow if passes == 1 else 3 * wide + 2 * narrow
        written = wide if passes == 1 else wide + 2 * narrow
        ctx.operations.add("attention", flops, read, written, torch.bfloat16)


class _RootMeanSquare(torch.autograd.Function):
    """The shapes of CUDA's kernels for rms_norm. PyTorch computes it in ten operations on other devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, operations: Operations) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.operations = operations
        operations.add("norms", 0, _bytes([x]), _bytes([x]), x.dtype)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.operations.add("norms", 0, 2 * _bytes([gradient]), _bytes([gradient]), gradient.dtype)
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

    def logprobs(tensors: Tensors) -> Tensor:
        return gradient.forward(tensors)[0]

    count_pass(gradient, packs, counted, logprobs)


def count_head(gradient: PolicyLoss, packs: Sequence[Pack], counted: Counted) -> None:
    """Add the head of one micro-batch: from hidden states to log-probabilities and entropy, and back."""
    policy = gradient.policy
    hidden = torch.empty(
        len(gradient.tensors(packs).target_M),
        policy.hidden_size,
        dtype=policy.causal.dtype,
        device="meta",
        requires_grad=True,
    )

    def head(tensors: Tensors) -> Tensor:
        return logprobs_and_entropy(policy, hidden, tensors, gradient.settings.temperature)[0]

    count_pass(gradient, packs, counted, head)


def count_pass(
    gradient: PolicyLoss, packs: Sequence[Pack], counted: Counted, compute: Callable[[Tensors], Tensor]
) -> None:
    """Add what `compute` does with the tensors of the packs, and the backward pass of its sum."""
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
            total = compute(tensors).sum()
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
