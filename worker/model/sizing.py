"""How much memory a model needs for training and for serving, and how a GPU is shared between its uses. Pure.

`Shape` describes the model, `Workload` the job, `Machine` where it runs. `plan` chooses the size of the KV cache and of
the micro-batches together, and refuses with numbers what does not fit. Nothing here imports torch, so a machine without
a GPU can compute the need of a model from its config.json.

Estimates err upwards: a job that is refused costs a minute, one that runs out of memory in step 30 an hour.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.jobs.hyperparameter_groups import LoraTargets
from core.registry import Device, SamplerName
from core.settings import Settings
from core.units import GIB
from worker.model.engine_sizes import (
    BATCHED_TOKENS,
    LARGER,
    SEQUENCES,
    EngineSizes,
    context_bucket,
    is_useful,
    slot_rank,
)
from worker.model.packed_formats import PackedFormat, format_in, packed_bytes
from worker.model.targets import Kind, LinearLayer, active_experts_in, chosen, experts_in

HEAD_CHUNK = 512  # rows of the vocabulary product alive at once: 512 x 49,152 float32 logits are 100 MB
MAX_SEQUENCES = SEQUENCES[-1]  # that vLLM decodes side by side
MAX_TOKENS_IN_FLIGHT = 131_072  # of the transformers sampler: more rows are sampled in several waves

# Tokens of a micro-batch. 2,048 keep the matrix units of a GPU busy; above 8,192 nothing gets faster.
CPU_TOKEN_BUDGET = 2048
GPU_TOKEN_BUDGETS = (2048, 8192)
# A decoding step reads all weights once, for one sequence or for many, so sampling gets faster almost in proportion to
# the sequences in flight at first. Recomputing activations adds about a third to the update. So up to this many
# sequences the cache comes before keeping activations.
COMFORTABLE_SEQUENCES = 32
CPU_CACHE_BYTES = GIB

# What no formula has on a GPU: the CUDA contexts of two processes (about 0.5 GiB each), vLLM's activations and CUDA
# graphs, cuBLAS workspaces, fragmentation. The trainer alone was measured: docs/measured/h200.md.
MARGIN_TWO_PROCESSES = 4 * GIB
MARGIN_ONE_PROCESS = 2 * GIB
MARGIN_SERVING = 3 * GIB

DEGREES = (1, 2, 4, 8)  # of sharding, inside one machine

# What sleep costs and gains. Rates of an update of 8B on an H200 (docs/measured/h200.md), with micro-batches of 2,048
# and of 8,192 tokens; smaller GPUs gain more. Whole weights have no frozen copy: their engines sleep only if they must.
SMALL_BATCH_RATE, LARGE_BATCH_RATE = 330e12, 380e12  # FLOPs a second
HOST_BANDWIDTH = 25e9  # bytes a second between a GPU and main memory, in one direction: PCIe 4. Assumed
SLEEP_SECONDS = 2.0  # to release memory and to map it again, and to send the adapter anew. Assumed
LEARNED_SHARE = 0.5  # of the tokens that a step has at most
SLEEP_GAIN = 1.1  # the estimates are rough

SAFETY_SHARE = 0.05  # of a GPU, that no plan uses
BUFFER_SHARE = (
    0.125  # of the cache of a model that is served, that it may give to more sequences side by side
)
SERVED_TOKENS = 1024  # of a chat with a model that is served, in the mean. Assumed

_BLOCK = 128  # a multiple of every block size that vLLM uses


class DoesNotFit(Exception):
    """The job needs more memory than the machine has. The message has the numbers, and what to change."""


@dataclass(frozen=True)
class PackedSizes:
    """Of the linear layers whose weights stay packed in memory (worker/model/packed.py)."""

    parameters: int = 0
    bytes: int = 0  # of these, with their scales
    widest: int = 0  # parameters of the largest layer; a layer is decoded when it is computed

    @staticmethod
    def of(format: PackedFormat | None, layers: Sequence[tuple[int, int]], bytes_each: int) -> "PackedSizes":
        """Add up layers.

        Args:
            layers: outputs and inputs of each packed layer; empty without a format.
            bytes_each: of a number in the model's dtype.
        """
        if format is None:
            return PackedSizes()
        sizes = [rows * columns for rows, columns in layers]
        stored = sum(packed_bytes(format, *layer, bytes_each) for layer in layers)
        return PackedSizes(sum(sizes), stored, max(sizes, default=0))


@dataclass(frozen=True)
class Shape:
    """What memory depends on. Sizes in elements."""

    parameters: int
    linear_parameters: int  # of these, in linear layers: those an adapter is put on, and the head
    layers: int
    hidden: int
    queries: int  # of one token in one layer: the queries of all heads
    heads: int
    intermediate: int
    key_values: int  # of one token in one layer: keys and values of all heads
    vocabulary: int
    bytes_each: int  # of a weight
    adaptable: tuple[LinearLayer, ...]  # the layers that can have an adapter
    packed: PackedSizes = PackedSizes()  # of linear_parameters
    recurrent_layers: int = 0  # whose states do not grow with the tokens
    state_bytes: int = (
        0  # of a sequence in one layer with a recurrent state, at most; a layer may have keys too
    )
    head_norms: bool = False  # norms of queries and keys
    layer_norms: int = 2  # norms of hidden states in a layer
    gated: bool = True  # the feed-forward layer multiplies a gate with what it lets through
    # A bfloat16 model computes these again in the backward pass (worker/model/recompute.py).
    recomputes_norms: bool = False
    recomputes_gates: bool = False
    keeps_scores: bool = False  # attention with sinks or soft caps, which no fused kernel of PyTorch has

    @property
    def token_cache_bytes(self) -> int:
        """Keys and values of one token, if all layers have them. vLLM gives recurrent layers pages of the same size."""
        return self.layers * self.key_values * self.bytes_each

    @property
    def own_token_bytes(self) -> int:
        """Keys and values of one token in the cache of the transformers sampler."""
        return max(1, self.layers - self.recurrent_layers) * self.key_values * self.bytes_each

    @property
    def weight_bytes(self) -> int:
        return (self.parameters - self.packed.parameters) * self.bytes_each + self.packed.bytes

    @property
    def plain_linear_bytes(self) -> int:
        """Of the linear layers that are not packed."""
        return (self.linear_parameters - self.packed.parameters) * self.bytes_each

    def divided(self, processes: int) -> "Shape":
        """What one of the processes of an engine keeps of a token. With more processes than heads they keep copies."""
        if processes == 1:
            return self
        heads = max(1, self.key_values * self.heads // (2 * self.queries))
        return replace(
            self,
            key_values=self.key_values // heads * math.ceil(heads / processes),
            state_bytes=math.ceil(self.state_bytes / processes),
        )

    @property
    def state_block_bytes(self) -> int:
        """Bytes of one block in vLLM's cache of a model with recurrent states, at most; 0: it has none.

        A block is a page of each layer of a group. All pages have one size: that of the fewest keys and values that
        take no less than a state. Groups are as large as the smallest kind of layers, or up to one and a half of it.
        """
        if not self.state_bytes:
            return 0
        page = self.state_bytes + _BLOCK * self.key_values * self.bytes_each
        recurrent = self.recurrent_layers or self.layers
        attention = self.layers - self.recurrent_layers or self.layers
        group = min(max(recurrent, attention), math.ceil(1.5 * min(recurrent, attention)))
        return group * page

    @property
    def end_parameters(self) -> int:
        """Of the embeddings and the head; twice the vocabulary, unless too little is outside of linear layers."""
        table = self.vocabulary * self.hidden
        return table if self.parameters - self.linear_parameters < table else 2 * table

    def shard_bytes(self, degree: int) -> int:
        """Bytes of the trainer's weights on each of the GPUs that share a copy (worker/model/sharding.py).

        The embeddings and the head whole, a part of each layer, and two whole layers: the one that is computed and
        the next one, which is being gathered. Layers are taken to be of one size.
        """
        inside = -(-self.inside_parameters // degree)
        return (self.end_parameters + inside + self.gathered_parameters) * self.bytes_each

    @property
    def inside_parameters(self) -> int:
        """Of all layers: everything but embeddings and head."""
        return self.parameters - self.end_parameters

    @property
    def gathered_parameters(self) -> int:
        """Of the two layers of a sharded copy that are whole at a time."""
        return min(2, self.layers) * -(-self.inside_parameters // self.layers)

    @property
    def trained_shard_bytes(self) -> int:
        """As `shard_bytes`, if all weights are trained: the parts of layers are the optimizer's (`optimizer_bytes`)."""
        return (self.end_parameters + self.gathered_parameters) * self.bytes_each

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of a KV cache for one sequence of `tokens` in vLLM: whole blocks, and one that vLLM keeps empty."""
        return (math.ceil(tokens / _BLOCK) + 1) * _BLOCK * self.token_cache_bytes


@dataclass(frozen=True)
class Workload:
    """Sizes of a job in tokens, and its adapter."""

    rank: int
    prompt: int  # the longest
    completion: int  # max_completion_tokens
    in_flight: int  # prompts and answers of a whole step, or of a whole validation, whichever has more
    targets: LoraTargets = "all-linear"
    full: bool = False  # all weights are trained, and there is no adapter
    references: int = 0  # copies of all weights that it is compared with, if all are trained
    adapter_copies: int = 0  # in main memory, in float32
    has_values: bool = False  # a value head learns, too (PPO)
    undoes: bool = False  # updates may be undone, so what they change is copied to main memory
    learned: int = 0  # tokens of a step that the trainer computes, at most; 0: unknown
    answers: int = 0  # in flight, at most; 0: unknown
    limit: int = 0  # the model's context; 0: unknown

    @property
    def longest(self) -> int:
        """One sequence: the longest prompt and the longest answer."""
        return self.prompt + self.completion

    def answers_of_one(self, engines: int) -> int:
        """Answers in flight of one engine; if their number is unknown, as many as are in the tokens in flight."""
        return math.ceil((self.answers or self.in_flight // self.longest) / max(1, engines))

    @property
    def slot_rank(self) -> int:
        """Of the engine's adapter; 0: it has none."""
        return 0 if self.full else self.rank


def workload(
    *,
    rank: int,
    prompt: int,
    completion: int,
    batch: int,
    group: int,
    valid_rows: int,
    eval_samples: int,
    targets: LoraTargets = "all-linear",
    copied: bool = False,
    full: bool = False,
    references: int = 0,
    off_policy_steps: int = 0,
    has_values: bool = False,
    undoes: bool = False,
    limit: int = 0,
) -> Workload:
    """Of a job with `batch` prompts a step, `group` answers each; `eval_samples` answers to each validation row.

    Args:
        copied: each answer has a copy of its prompt in the cache (the transformers sampler in rows mode).
        limit: the model's context, up to which that of an engine may be rounded up.
    """
    training, validating = (
        prompts * ((answers if copied else 1) * prompt + answers * completion)
        for prompts, answers in ((batch, group), (valid_rows, eval_samples))
    )
    return Workload(
        rank,
        prompt,
        completion,
        max(training, validating),
        targets,
        full,
        references,
        adapter_copies(off_policy_steps),
        has_values,
        undoes,
        learned=training,
        answers=max(batch * group, valid_rows * eval_samples),
        limit=limit,
    )


def adapter_copies(off_policy_steps: int) -> int:
    """Copies of adapters in main memory: earlier ones and two of the current step at the trainer, and one for each
    batch at the sampler."""
    return 2 * off_policy_steps + 2 if off_policy_steps else 0


@dataclass(frozen=True)
class Machine:
    """The device that a job runs on. `plan` chooses the values that are None ("auto")."""

    device: Device
    available: int  # bytes that are free before anything is loaded
    sampler: SamplerName
    spared: int = 0  # of these, that no plan uses
    reordered: bool = False  # plain linear weights are kept twice more, as worker/model/lora.py does on a CPU
    kv_cache_bytes: int | None = None
    token_budget: int | None = None
    gpu_class: str = ""  # if `available` is what a GPU of that class has, and not what is free here
    engines: int = 1  # of vLLM, which share the answers of a step; 0: others sample, or nothing is sampled
    tensor_parallel: int = 1  # devices that share the weights and the cache of an engine
    split: bool = False  # the engines have devices of the same size that no trainer uses
    degree: int = 1  # GPUs that share one copy of the trainer's weights
    ranks: int = 1  # of a job that trains all weights, each with a whole copy of them
    may_sleep: bool = False  # nothing is sampled while the trainer learns, so that vLLM can sleep then
    sleeps: bool = False  # vLLM sleeps while the trainer learns
    main_memory: int | None = None  # free bytes beside the GPUs, for vLLM's weights; None: unknown

    @property
    def usable(self) -> int:
        """The bytes that a plan may use."""
        return self.available - self.spared

    @property
    def has_engine(self) -> bool:
        return self.sampler == "vllm" and self.engines > 0

    @property
    def margin_tokens(self) -> int:
        """Of one step of an engine, that its margin has room for."""
        return BATCHED_TOKENS[-1 if self.split else 0]

    @property
    def copies(self) -> int:
        """Of the weights: the engine of vLLM has its own."""
        return 2 if self.has_engine else 1


def spared(device: Device, available: int) -> int:
    """Of the free bytes of a device, those that no plan uses."""
    return int(available * SAFETY_SHARE) if device == "cuda" else 0


def machine(
    settings: Settings,
    device: Device,
    available: int,
    sampler: SamplerName,
    *,
    reordered: bool = False,
    gpu_class: str = "",
    engines: int = 1,
    tensor_parallel: int = 1,
    split: bool = False,
    may_sleep: bool = False,
    main_memory: int | None = None,
    teacher_bytes: int = 0,
) -> Machine:
    """One whose operator has set these settings.

    Args:
        available: free bytes of the device.
        teacher_bytes: of them, for the weights of a teacher.
    """
    cache, budget = settings.kv_cache_gib, settings.train_token_budget
    return Machine(
        device,
        max(0, available - teacher_bytes),
        sampler,
        spared(device, available),
        reordered,
        kv_cache_bytes=None if cache == "auto" else int(cache * GIB),
        token_budget=None if budget == "auto" else budget,
        gpu_class=gpu_class,
        engines=engines,
        tensor_parallel=tensor_parallel,
        split=split,
        may_sleep=may_sleep,
        main_memory=main_memory,
    )


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, by what they are for. With `sleeps` not all of them at once."""

    copies: int
    weights: int  # of one copy
    adapter: int
    activations: int  # that autograd keeps, and the gradients of one layer
    attention: int  # masks: what grows with the square of the tokens
    head: int
    cache: int
    margin: int
    slots: int = 0  # the engine's buffers for an adapter
    buffers: int = 0  # the engine's, for larger sizes than its margin has room for
    tensor_parallel: int = 1  # devices that share the engine's copy of the weights
    shard: int | None = None  # of the trainer's copy, where several GPUs share it, with the layers in use
    degree: int = 1  # GPUs that share it
    optimizer: int = 0  # of all weights, if they are trained: master weights, gradients and moments
    reference: int = 0  # copies of all weights that it is compared with
    sleeps: bool = False  # the engine has neither weights nor cache here while the trainer learns

    @property
    def total(self) -> int:
        """The peak."""
        if self.sleeps:
            return max(self.sampling, self.learning)
        return self.own + self.engine + self.parts + self.cache + self.margin

    @property
    def sampling(self) -> int:
        """While engines sample and the trainer computes nothing."""
        kept = self.adapter + self.optimizer + self.reference
        return self.own + kept + self.engine + self.cache + MARGIN_TWO_PROCESSES

    @property
    def learning(self) -> int:
        """While the trainer computes and engines sleep."""
        return self.own + self.parts + self.margin

    @property
    def own(self) -> int:
        """Of the trainer's weights."""
        return self.weights if self.shard is None else self.shard

    @property
    def engine(self) -> int:
        """Of an engine's weights, its adapter and what it computes with."""
        weights = (self.copies - 1) * math.ceil(self.weights / self.tensor_parallel)
        return weights + self.slots + self.buffers

    @property
    def parts(self) -> int:
        """Of the trainer, besides weights."""
        return self.adapter + self.optimizer + self.reference + self.activations + self.attention + self.head

    def __str__(self) -> str:
        divided = self.copies > 1 and self.tensor_parallel > 1
        copies = f"{self.copies} x " if self.copies > 1 and not divided else ""
        engine = f" + {self.weights / self.tensor_parallel / GIB:.1f}" if divided else ""
        names = ("adapter", "slots", "buffers", "optimizer", "reference", "activations", "attention", "head")
        shown = [(name, getattr(self, name)) for name in names]
        parts = [f"{name} {size / GIB:.1f}" for name, size in shown if size >= 0.05 * GIB]
        weights = f"weights {copies}{self.weights / GIB:.1f}{engine}"
        if self.shard is not None:
            engines = f"{self.weights / self.tensor_parallel / GIB:.1f} and " if self.copies > 1 else ""
            weights = (
                f"weights {engines}{self.shard / GIB:.1f} of a copy that is sharded over {self.degree} GPUs"
            )
        rest = [f"KV cache {self.cache / GIB:.1f}", f"margin {self.margin / GIB:.1f}"]
        peak = f"{self.total / GIB:.1f} GiB"
        if self.sleeps:
            peak += f" ({self.sampling / GIB:.1f} while sampling, {self.learning / GIB:.1f} while learning)"
        return f"{peak}: {', '.join([weights, *parts, *rest])}"


def saved_bytes_per_token(shape: Shape, rank: int, *, full: bool = False) -> int:
    """What autograd keeps of one token in one layer, without what grows with its square.

    Counted in the Llama block with an adapter on every linear layer, and with norms of queries and keys where the model
    has them, as Qwen3; tests/worker/test_memory.py compares it with what a backward pass of the real code saves.

    Args:
        rank: of the adapter; 0 with `full`.
        full: all weights are trained, also those of the norms.
    """
    each = shape.bytes_each
    # Inputs of norms; of adapters (one tensor for q, k, v, one for gate and up; of down); between A and B.
    heads = shape.queries + shape.key_values // 2 if shape.head_norms else 0
    norms = (shape.layer_norms * shape.hidden + heads) * _norm_bytes(shape, full)
    inputs = 2 * shape.hidden + shape.intermediate
    inner = 7 * rank
    # Queries, keys and values of every query head, and the output. FlexAttention keeps keys and values once.
    attention = 4 * shape.queries
    activated = _feed_forward_tensors(shape) * shape.intermediate
    statistics = 16 * shape.heads  # of softmax and norms
    return norms + each * (inputs + inner + attention + activated) + statistics


@dataclass(frozen=True)
class ExpertBytes:
    """What autograd keeps of a layer for adapters on experts (worker/model/experts.py), beside what it keeps anyway."""

    token: int = 0  # of each token
    copies: int = 0  # of the adapter in the model's precision, with ranks filled up to rows of 16 bytes

    @staticmethod
    def of(shape: Shape, rank: int, targets: LoraTargets) -> "ExpertBytes":
        """Args: `rank`: 0 if there is no adapter."""
        layers = [layer for layer in chosen(shape.adaptable, targets) if layer.experts] if rank else []
        if not layers:
            return ExpertBytes()
        layer = max(layers, key=lambda one: one.width)
        filled = -(-layer.rank(rank) * shape.bytes_each // 16) * 16 // shape.bytes_each
        # For each of its experts: the inputs of both projections, and what is between A and B of both.
        token = layer.active_experts * (shape.hidden + layer.expert_size + 2 * filled) * shape.bytes_each
        return ExpertBytes(token, layer.width * filled * shape.bytes_each)


def kernel_padding(shape: Shape, tokens: int) -> int:
    """Bytes of one layer that FlexAttention keeps beyond `saved_bytes_per_token`, which has keys of all query heads."""
    # Its output is by heads, so the adapter after it keeps a copy by tokens.
    of_kernel = kernel_tokens(tokens) * (2 * shape.queries + shape.key_values) + shape.queries * tokens
    return max(0, of_kernel - 4 * shape.queries * tokens) * shape.bytes_each


def _feed_forward_tensors(shape: Shape) -> int:
    """Of the intermediate size, that autograd keeps beside the input of the last product."""
    if not shape.gated:
        return 1  # the activation's input
    if not shape.recomputes_gates:
        return 4  # gate and up in one product or in experts: also copies of the two
    return 3 if shape.bytes_each == 4 else 2  # gate and up; the gate's activation


def _norm_bytes(shape: Shape, full: bool) -> int:
    """That autograd keeps of an element of a norm's input; for trained weights also of what they are multiplied by."""
    if full:
        return 4 + shape.bytes_each
    return shape.bytes_each if shape.recomputes_norms else 4


def optimizer_bytes(shape: Shape, ranks: int, degree: int = 1) -> int:
    """Of a job that trains all weights: a gradient and two moments in float32, and a float32 copy of narrow weights.

    Several ranks, each with a whole copy, exchange weights and gradients as one vector in float32.

    Args:
        degree: GPUs that share one copy (worker/model/sharded_full.py). Each has its part of the layers in float32, of
            whatever precision, and the gradients of two whole layers, which are added up in float32. Embeddings and
            head are as with several ranks.
    """
    master = 4 if shape.bytes_each < 4 else 0
    if degree == 1:
        vector = 4 if ranks > 1 else 0
        return shape.parameters * (master + 3 * 4 + vector)
    parts = -(-shape.inside_parameters // degree) * 4 * 4
    return (
        parts + shape.end_parameters * (master + 4 * 4) + shape.gathered_parameters * (shape.bytes_each + 4)
    )


def undo_bytes(shape: Shape, work: Workload, machine: Machine) -> int:
    """Of the weights and moments of before an update, in float32, in main memory (worker/training/undo.py)."""
    if not work.undoes:
        return 0
    if not work.full:
        return 3 * 4 * adapter_parameters(shape, work.rank, work.targets)
    return 3 * 4 * (shape.inside_parameters + machine.degree * shape.end_parameters)


def reference_bytes(shape: Shape, degree: int) -> int:
    """Of a copy of all weights. While a sharded model computes as its reference, its own parts are beside it."""
    if degree == 1:
        return shape.weight_bytes
    parts = -(-shape.inside_parameters // degree) * (shape.bytes_each + 4)
    return parts + 2 * shape.end_parameters * shape.bytes_each


def estimate(
    shape: Shape,
    *,
    rank: int,
    token_budget: int,
    cache: int,
    checkpointed: bool,
    machine: Machine,
    targets: LoraTargets = "all-linear",
    full: bool = False,
    references: int = 0,
    adapter_copies: int = 0,
    has_values: bool = False,
    undo: int = 0,
    engine: EngineSizes | None = None,
) -> Estimate:
    """The peak of a run that samples and trains.

    `checkpointed`: a layer's activations are computed again in the backward pass, so those of one layer are alive
    at a time. `full`, `references`, `adapter_copies` and `has_values` as in Workload; `engine` as in MemoryPlan;
    `undo`: `undo_bytes` on a CPU.
    """
    if full:
        rank = 0
    of_experts = ExpertBytes.of(shape, rank, targets)
    layer = saved_bytes_per_token(shape, rank, full=full) + of_experts.token
    entries = shape.bytes_each * shape.hidden * shape.layers  # the inputs of all layers
    # Of the last norm, and of the head (worker/model/head.py): its input, or if it is frozen a gradient in float32.
    # A value head keeps its input in float32 (worker/model/value_head.py).
    ends = (_norm_bytes(shape, full) + (shape.bytes_each if full else 4) + 4 * has_values) * shape.hidden
    gradients = 4 * (2 * shape.intermediate + 4 * shape.hidden)  # of the layer that is being computed
    kept = entries + layer if checkpointed else layer * shape.layers
    padding = kernel_padding(shape, token_budget) * (1 if checkpointed else shape.layers)
    reordered = machine.reordered and not full  # weights that do not change
    weights = shape.weight_bytes + (2 * shape.plain_linear_bytes if reordered else 0)
    shard = None
    if machine.degree > 1:
        shard = shape.trained_shard_bytes if full else shape.shard_bytes(machine.degree)
    found = Estimate(
        copies=machine.copies,
        weights=weights,
        # Weight, gradient and two moments, in float32; on a CPU the copies too.
        adapter=adapter_parameters(shape, rank, targets)
        * 4
        * (4 + (adapter_copies if machine.device == "cpu" else 0))
        + (0 if full else undo),
        activations=token_budget * (kept + ends + gradients)
        + (padding if machine.device == "cuda" else 0)
        + decoded_bytes(shape, reordered=reordered)
        + of_experts.copies * (1 if checkpointed else shape.layers),
        attention=_mask_bytes(shape, machine.device, token_budget, 1 if checkpointed else shape.layers),
        head=_head_bytes(shape, machine.device, full=full),
        cache=cache,
        margin=0,
        slots=slot_bytes(
            shape,
            rank,
            slots=machine.copies - 1,
            tensor_parallel=machine.tensor_parallel,
            targets=targets,
        ),
        buffers=buffer_bytes(shape, engine, machine.tensor_parallel),
        tensor_parallel=machine.tensor_parallel,
        shard=shard,
        degree=machine.degree,
        optimizer=optimizer_bytes(shape, machine.ranks, machine.degree) + undo if full else 0,
        reference=references * reference_bytes(shape, machine.degree),
        sleeps=machine.sleeps,
    )
    return replace(found, margin=_margin(found, machine))


def _mask_bytes(shape: Shape, device: Device, token_budget: int, layers: int) -> int:
    """Of what grows with the square of the tokens of a micro-batch. `layers`: that keep it until the backward pass."""
    square = token_budget**2
    # On a GPU one bias for all layers (worker/model/batch.py). On a CPU the bool mask, and the bias that SDPA makes of
    # it in each layer and autograd keeps.
    masks = square * (shape.bytes_each if device == "cuda" else 1 + 4 * layers)
    if shape.keeps_scores:  # before and after the softmax, in float32: measured on tiny Gemma 2 and gpt-oss
        masks += 2 * 4 * square * shape.heads * layers
    return masks


def decoded_bytes(shape: Shape, *, reordered: bool) -> int:
    """Of one packed layer while it is computed: its weight, and the integers that become a part of it.

    Args:
        reordered: it is also transposed, and copied to oneDNN's layout (worker/model/lora.py).
    """
    return shape.packed.widest * ((3 if reordered else 1) * shape.bytes_each + 1)


def _head_bytes(shape: Shape, device: Device, *, full: bool) -> int:
    """Of a chunk of the head, and with `full` of the gradients of its weights, which are of all chunks."""
    # Logits and probabilities in float32, and half as much: the gradient in bfloat16, or a part of the entropy.
    logits = HEAD_CHUNK * shape.vocabulary * (4 + 4 + 2)
    if device == "cpu" and shape.bytes_each < 4:
        # Copies of the weights and of the logits' gradients in float32 (worker/model/lora.py), in which they are added.
        logits += 4 * (shape.vocabulary * shape.hidden + HEAD_CHUNK * shape.vocabulary)
    return logits + (shape.vocabulary * shape.hidden * shape.bytes_each if full else 0)


def _margin(found: Estimate, machine: Machine) -> int:
    if machine.device == "cuda":
        # A tenth for what the allocator cannot use of what it has.
        least = MARGIN_TWO_PROCESSES if machine.copies > 1 else MARGIN_ONE_PROCESS
        return least + (found.activations + found.head) // 10
    # Measured on SmolLM2-135M, rank 16: 3.9 GiB at peak at 1,016 tokens, 6.3 at 2,040, 3.1 at 2,040 checkpointed. That
    # was before the head took less, so the fixed part is larger than it has to be.
    return (found.total - found.margin) // 5 + GIB * 5 // 8


def adapter_parameters(shape: Shape, rank: int, targets: LoraTargets = "all-linear") -> int:
    """Of an adapter on the chosen layers: a rank's row and column for each, and for each expert."""
    if not rank:
        return 0
    return sum(layer.rank(rank) * layer.width for layer in chosen(shape.adaptable, targets))


def slot_bytes(
    shape: Shape,
    rank: int,
    *,
    slots: int = 1,
    tensor_parallel: int = 1,
    targets: LoraTargets = "all-linear",
) -> int:
    """Bytes of an engine's buffers for adapters of up to this rank, on each of its GPUs. Rank 0: it has none.

    They are for all linear layers, whatever layers a job chooses, and for experts if it chooses these
    (worker/engine/extension.py). Of the two matrices of a layer, vLLM divides the one on the side of heads or of the
    feed-forward layer's inside.
    """
    if not rank or not slots:
        return 0
    has_experts = any(layer.experts for layer in chosen(shape.adaptable, targets))
    widths = (
        _slot_width(shape, layer, tensor_parallel)
        for layer in shape.adaptable
        if not layer.experts or has_experts
    )
    return slots * slot_rank(rank) * sum(widths) * shape.bytes_each


def _slot_width(shape: Shape, layer: LinearLayer, tensor_parallel: int) -> int:
    """Elements of a layer's buffers for each rank, on each of the GPUs that share it."""
    if layer.experts:
        # gate_up_proj [2 expert_size, hidden] and down_proj [hidden, expert_size]. vLLM has an A for the gate and one
        # for up, and all have the engine's rank, not that of experts.
        return layer.experts * (3 * shape.hidden + math.ceil(3 * layer.expert_size / tensor_parallel))
    whole = min(shape.hidden, layer.width)
    return whole + math.ceil((layer.width - whole) / tensor_parallel)


def buffer_bytes(
    shape: Shape,
    engine: EngineSizes | None,
    tensor_parallel: int = 1,
    *,
    margin_tokens: int = BATCHED_TOKENS[0],
) -> int:
    """Bytes of a GPU that an engine computes with beyond what its margin has room for.

    Of a sequence: its logits, in the precision of the weights, in float32, and once more for log-probabilities. Of a
    token: hidden states before and after a block, and a part of queries, keys, values and the feed-forward layer.

    Args:
        margin_tokens: of one step, that the margin has room for, beside the logits of SEQUENCES[0] sequences.
    """
    if engine is None:
        return 0
    logits = shape.vocabulary * (shape.bytes_each + 4 + 4)
    divided = 2 * shape.queries + 2 * shape.key_values + 3 * shape.intermediate
    token = (4 * shape.hidden + math.ceil(divided / tensor_parallel)) * shape.bytes_each
    sequences, tokens = engine.sequences - SEQUENCES[0], engine.batched_tokens - margin_tokens
    return max(0, sequences) * logits + max(0, tokens) * token


def with_sizes(
    shape: Shape, work: Workload, machine: Machine, *, least: int, room: int, wanted: int
) -> tuple[int, EngineSizes | None]:
    """The cache of an engine and its other sizes, where it has `room` bytes beside a cache of `least`.

    More sequences side by side are useful as far as the cache holds them. Buffers come after a comfortable cache, so
    that more memory never means fewer sequences. The margin of an engine without a trainer (MARGIN_SERVING) has room
    for the largest step.
    """
    if not machine.has_engine:
        return min(wanted, least + room), None
    shared = shape.divided(machine.tensor_parallel)
    comfortable = COMFORTABLE_SEQUENCES * shared.cache_bytes(work.longest)
    enough = min(wanted, comfortable)
    cache, sizes = min(wanted, least + room), (SEQUENCES[0], BATCHED_TOKENS[0])
    for larger in LARGER if machine.device == "cuda" else ():
        needed = buffer_bytes(
            shape, EngineSizes(0, *larger), machine.tensor_parallel, margin_tokens=machine.margin_tokens
        )
        rest = min(wanted, least + room - needed)
        held = int(rest / (shared.token_cache_bytes * work.longest * LEARNED_SHARE))
        side_by_side = min(held, work.answers_of_one(machine.engines))
        has_cache = rest >= enough or not needed
        if needed <= room and has_cache and is_useful(larger[0], side_by_side):
            cache, sizes = rest, larger
            break
    context = _context(shared, work, machine, cache)
    found = EngineSizes(context, *sizes, longest=work.longest, state_block_bytes=shared.state_block_bytes)
    return cache, found.within(cache)


def _context(shape: Shape, work: Workload, machine: Machine, cache: int) -> int:
    """The context of an engine: rounded up, if the cache holds a sequence of it."""
    rounded = min(context_bucket(work.longest), max(work.limit, work.longest))
    is_compiled = machine.device == "cuda"
    return rounded if is_compiled and shape.cache_bytes(rounded) <= cache else work.longest


@dataclass(frozen=True)
class MemoryPlan:
    """The memory plan of a run."""

    token_budget: int  # of a micro-batch, padding included
    cache_bytes: int
    checkpointed: bool  # activations are computed twice
    estimate: Estimate
    main_memory: int = 0  # bytes beside the GPUs, for weights of engines that sleep, or for adapters
    undo: int = 0  # bytes beside the GPUs, for updates that are undone
    saved_seconds: float | None = None  # of each step, by sleep; None: without sleep the job does not fit
    engine: EngineSizes | None = None  # of each of the job's engines; None: it has none

    @property
    def degree(self) -> int:
        """GPUs that share one copy of the trainer's weights."""
        return self.estimate.degree

    @property
    def sleeps(self) -> bool:
        """Whether vLLM sleeps while the job learns."""
        return self.estimate.sleeps

    def described(self, shape: Shape, work: Workload) -> str:
        """For the job's owner: what was chosen, with numbers."""
        kept = "Activations are computed twice, to save memory. " if self.checkpointed else ""
        batches = f"{kept}Micro-batches have up to {self.token_budget} tokens"
        if not self.cache_bytes:  # a fleet samples, or nothing is sampled
            return f"{batches}. {self.copies_sentence}{self.undo_sentence}Memory: {self.estimate}."
        cached = shape.divided(self.estimate.tensor_parallel)
        is_trainers = self.estimate.copies == 1 and self.estimate.cache > 0
        each = shape.own_token_bytes if is_trainers else cached.token_cache_bytes
        sequences = self.cache_bytes // (each * work.longest)
        return (
            f"{batches}, and the KV cache holds {sequences} sequences of {work.longest} tokens. "
            f"{self.sleep_sentence}{self.copies_sentence}{self.undo_sentence}Memory: {self.estimate}."
        )

    @property
    def sleep_sentence(self) -> str:
        """Empty unless vLLM sleeps."""
        if not self.sleeps:
            return ""
        reason = "both do not fit at once"
        if self.saved_seconds is not None:
            reason = f"this saves about {self.saved_seconds:.0f} s of each step"
        return (
            f"vLLM sleeps while the job learns, because {reason}; its weights take "
            f"{self.main_memory / GIB:.1f} GiB of main memory meanwhile. "
        )

    @property
    def copies_sentence(self) -> str:
        """Empty unless adapters of earlier policies are in main memory beside GPUs."""
        if self.sleeps or not self.main_memory:
            return ""
        return f"Adapters of earlier policies take {self.main_memory / GIB:.1f} GiB of main memory. "

    @property
    def undo_sentence(self) -> str:
        """Empty unless copies for `step_kl` take GiB of main memory beside GPUs."""
        if self.undo < GIB:
            return ""
        return f"Copies for updates that step_kl undoes take {self.undo / GIB:.1f} GiB of main memory. "


def plan_sharded(name: str, shape: Shape, work: Workload, machine: Machine, gpus: int) -> MemoryPlan:
    """Plan with the smallest degree of sharding that fits: 1, which needs no communication, then 2, 4 and 8.

    If none fits beside vLLM, plan in the same order with a vLLM that sleeps while the trainer learns. It sleeps also if
    a step is faster then (`update_seconds`, `sleep_seconds`).

    Args:
        gpus: of this machine, that the run has.

    Raises:
        DoesNotFit: with no degree; the message has the numbers of the largest one.
    """
    # Packed layers are not sharded (worker/model/sharding.py).
    degrees = (1,) if shape.packed.parameters else degrees_of(machine, gpus, full=work.full)
    can_sleep = machine.may_sleep and machine.has_engine and machine.device == "cuda"
    by_choice = can_sleep and work.learned > 0 and not work.full
    for sleeps in (False, True) if can_sleep else (False,):
        for degree in degrees:
            try:
                ranks = gpus if work.full and degree == 1 else 1
                there = replace(machine, degree=degree, ranks=ranks, sleeps=sleeps)
                found = plan(name, shape, work, there)
                return cheaper(name, shape, work, there, found, gpus) if by_choice and not sleeps else found
            except DoesNotFit as cause:
                refusal = cause
    tried = [f"the weights sharded over {', '.join(map(str, degrees))} GPUs"] if len(degrees) > 1 else []
    tried += ["vLLM asleep while the job learns"] if can_sleep else []
    note = f" Tried with {', and with '.join(tried)}." if tried else ""
    raise DoesNotFit(f"{refusal}{note}{'' if work.full else _unsharded(shape, machine, gpus)}") from refusal


def cheaper(
    name: str, shape: Shape, work: Workload, machine: Machine, awake: MemoryPlan, gpus: int = 1
) -> MemoryPlan:
    """The plan with sleep if that makes a step faster than the one without, by SLEEP_GAIN."""
    try:
        asleep = plan(name, shape, work, replace(machine, sleeps=True))
    except DoesNotFit:  # main memory has no room for the engine's weights
        return awake
    before = update_seconds(shape, work, awake) / gpus
    after = update_seconds(shape, work, asleep) / gpus + sleep_seconds(shape, machine.tensor_parallel)
    if after * SLEEP_GAIN > before:
        return awake
    return replace(asleep, saved_seconds=before - after)


def update_seconds(shape: Shape, work: Workload, planned: MemoryPlan) -> float:
    """The seconds of a step's update on one GPU, roughly; 0 if the tokens of a step are unknown."""
    passes = (
        3 if work.full else 2
    )  # forward, backward to the inputs, and to the weights, if these are trained
    flops = 2 * (passes + planned.checkpointed) * shape.parameters * work.learned * LEARNED_SHARE
    rate = LARGE_BATCH_RATE if planned.token_budget >= GPU_TOKEN_BUDGETS[1] else SMALL_BATCH_RATE
    return flops / rate


def sleep_seconds(shape: Shape, tensor_parallel: int, *, full: bool = False) -> float:
    """The seconds that sleep and wake add to a step. Frozen weights have a copy, and are only copied back."""
    copied = math.ceil(shape.weight_bytes / tensor_parallel) * (2 if full else 1)
    return SLEEP_SECONDS + copied / HOST_BANDWIDTH


def degrees_of(machine: Machine, gpus: int, *, full: bool = False) -> tuple[int, ...]:
    """How many GPUs may share a copy of the weights: those that divide the GPUs of a machine.

    With `full` the GPUs have a copy each or all of them share one: copies that are trained would have to be kept equal.
    The transformers sampler decodes on rank 0 alone with the trainer's weights, so these are whole there.
    """
    if machine.sampler != "vllm" or machine.device != "cuda":
        return (1,)
    if full:
        return tuple(sorted({1, gpus}))
    return tuple(degree for degree in DEGREES if gpus % degree == 0)


def _unsharded(shape: Shape, machine: Machine, gpus: int) -> str:
    if machine.device != "cuda" or gpus == 1:
        return ""
    if shape.packed.parameters:
        return (
            " The weights are not sharded over GPUs, because they are packed: use a larger GPU, or set "
            '`sampler = "transformers"` in the model\'s entry, which keeps them once.'
        )
    if machine.sampler == "vllm":
        return ""
    return " The weights are not sharded over GPUs, because the sampler `transformers` uses them: use `vllm`."


def plan(name: str, shape: Shape, work: Workload, machine: Machine) -> MemoryPlan:
    """Choose the KV cache, the micro-batch and whether activations are computed twice.

    In this order, on a GPU:
    1. room for one sequence in the cache and for the longest answer in a micro-batch: otherwise it is refused;
    2. COMFORTABLE_SEQUENCES in the cache, as far as the job has so many;
    3. activations kept instead of computed twice, with micro-batches of 2,048 tokens;
    4. a cache for all that the job can have in flight;
    5. larger micro-batches, up to 8,192 tokens.
    Values that the operator has set are used unchanged.

    Raises:
        DoesNotFit: the message has the model's `name` and the numbers.
    """
    if machine.split:
        learning = plan(name, shape, work, replace(machine, engines=0, split=False))
        cache, engine = cache_without_trainer(name, shape, work, machine)
        return replace(learning, cache_bytes=cache, engine=engine)
    wanted, comfortable, least = _cache_sizes(name, shape, work, machine)
    choices = _choices(work, machine, comfortable, least)
    for choice in choices:
        if choice.estimate(shape, work, machine).total <= machine.usable:
            choice = choice.enlarged(shape, work, machine, wanted)
            return MemoryPlan(
                choice.token_budget,
                choice.cache_bytes,
                choice.checkpointed,
                choice.estimate(shape, work, machine),
                _beside_gpus(name, shape, work, machine),
                undo_bytes(shape, work, machine) if machine.device == "cuda" else 0,
                engine=choice.engine,
            )
    raise _does_not_fit(name, work, machine, choices[-1].estimate(shape, work, machine))


@dataclass(frozen=True)
class _Choice:
    """Values of a plan, as MemoryPlan has them."""

    token_budget: int
    cache_bytes: int
    checkpointed: bool
    engine: EngineSizes | None = None

    def estimate(self, shape: Shape, work: Workload, machine: Machine) -> Estimate:
        return estimate(
            shape,
            rank=work.rank,
            targets=work.targets,
            full=work.full,
            references=work.references,
            adapter_copies=work.adapter_copies,
            has_values=work.has_values,
            undo=undo_bytes(shape, work, machine) if machine.device == "cpu" else 0,
            token_budget=self.token_budget,
            cache=self.cache_bytes,
            checkpointed=self.checkpointed,
            machine=machine,
            engine=self.engine,
        )

    def enlarged(self, shape: Shape, work: Workload, machine: Machine, wanted: int) -> "_Choice":
        """The choice with the memory that it leaves: for the engine (`with_sizes`), then for the micro-batch."""
        found = self.estimate(shape, work, machine)
        room = machine.usable - (found.sampling if machine.sleeps else found.total)
        # On a CPU the margin grows with the rest, by a fifth.
        cache, engine = with_sizes(
            shape,
            work,
            machine,
            least=self.cache_bytes,
            room=room if machine.device == "cuda" else room * 5 // 6,
            wanted=wanted,
        )
        grown = replace(self, cache_bytes=cache, engine=engine)
        is_free = cache == wanted or machine.sleeps  # memory that the cache does not take
        if machine.token_budget is not None or machine.device == "cpu" or not is_free:
            return grown
        larger = [
            replace(grown, token_budget=width) for width in widths(self.token_budget, GPU_TOKEN_BUDGETS[1])
        ]
        fitting = [one for one in larger if one.estimate(shape, work, machine).total <= machine.usable]
        return max([grown, *fitting], key=lambda one: one.token_budget)


def _cache_sizes(name: str, shape: Shape, work: Workload, machine: Machine) -> tuple[int, int, int]:
    """Bytes of the cache: wanted, comfortable and least. Raises DoesNotFit: the operator's own value is too small."""
    wanted = wanted_cache(shape, work, machine)
    least = min(least_cache(shape, work, machine), wanted)
    one = shape.divided(machine.tensor_parallel).cache_bytes(work.longest) if machine.engines else 0
    if machine.kv_cache_bytes is not None and machine.has_engine:
        if machine.kv_cache_bytes < one:
            raise DoesNotFit(
                f"{name} at {work.longest} tokens needs a KV cache of {one / GIB:.2f} GiB "
                f"for one sequence, and REGRAFT_KV_CACHE_GIB is {machine.kv_cache_bytes / GIB:g}. Have the operator "
                "raise or unset it, or choose a smaller max_completion_tokens."
            )
        wanted = least = machine.kv_cache_bytes
    return wanted, max(least, min(wanted, COMFORTABLE_SEQUENCES * one)), least


def _choices(work: Workload, machine: Machine, *cache_sizes: int) -> list[_Choice]:
    """The values that a plan tries, in this order; the last ones need the least memory."""
    if machine.token_budget is not None:
        budgets = [_width(max(machine.token_budget, work.longest), machine)]
    elif machine.device == "cpu":
        budgets = [_width(max(CPU_TOKEN_BUDGET, work.longest), machine)]
    else:
        budgets = [_width(max(GPU_TOKEN_BUDGETS[0], work.longest), machine), _width(work.longest, machine)]
    kept_or_recomputed = [(budgets[0], False), *((budget, True) for budget in budgets)]
    return [
        _Choice(budget, cache, checkpointed)
        for cache in cache_sizes
        for budget, checkpointed in kept_or_recomputed
    ]


def _beside_gpus(name: str, shape: Shape, work: Workload, machine: Machine) -> int:
    """Bytes of main memory that a run on GPUs needs. Raises DoesNotFit."""
    if machine.device != "cuda":
        return 0
    needed_by = _for_sleep if machine.sleeps else _for_copies
    needed, undo = needed_by(name, shape, work, machine), undo_bytes(shape, work, machine)
    if machine.main_memory is not None and undo and needed + undo > machine.main_memory:
        raise DoesNotFit(
            f"{name} needs {undo / GIB:.1f} GiB of main memory to undo updates that go too far, and "
            f"{max(0, machine.main_memory - needed) / GIB:.1f} GiB are free. Set optimizer.step_kl to 0, or have the "
            "operator give the worker more main memory."
        )
    return needed


def _does_not_fit(name: str, work: Workload, machine: Machine, needed: Estimate) -> DoesNotFit:
    """The refusal of a job that needs at least this much memory."""
    spared = f", of which a plan uses {1 - SAFETY_SHARE:.0%}" if machine.spared else ""
    size = f"{machine.available / GIB:.1f} GiB"
    place = f"the GPU class `{machine.gpu_class}` has {size}" if machine.gpu_class else f"{size} are free"
    # A copy less is the largest part that a choice can save.
    hint = " or the sampler `transformers`, which needs no copy of the weights" if machine.copies > 1 else ""
    smaller = "train 'lora', a smaller model or" if work.full else "a smaller model, lora_rank or"
    return DoesNotFit(
        f"{name} at {work.longest} tokens needs {needed}; {place}{spared}. Choose {smaller} "
        f"max_completion_tokens, a GPU with more memory{hint}."
    )


def _for_copies(name: str, shape: Shape, work: Workload, machine: Machine) -> int:
    """Bytes beside the GPUs that copies of adapters need. Raises DoesNotFit."""
    needed = 4 * work.adapter_copies * adapter_parameters(shape, work.rank, work.targets)
    if machine.main_memory is not None and needed > machine.main_memory:
        raise DoesNotFit(
            f"{name} needs {needed / GIB:.1f} GiB of main memory for the adapters of earlier policies, and "
            f"{machine.main_memory / GIB:.1f} GiB are free. Choose smaller schedule.steps or lora.rank, or have "
            "the operator give the worker more main memory."
        )
    return needed


def pinned_bytes(shape: Shape, work: Workload, engines: int, tensor_parallel: int = 1) -> int:
    """Bytes beside the GPUs that engines need for their weights and adapters while they sleep.

    PyTorch rounds pinned memory up to a power of two, so it takes up to twice as much.
    """
    slots = tensor_parallel * slot_bytes(
        shape, work.slot_rank, tensor_parallel=tensor_parallel, targets=work.targets
    )
    return 2 * engines * (shape.weight_bytes + slots)


def _for_sleep(name: str, shape: Shape, work: Workload, machine: Machine) -> int:
    """As `pinned_bytes`. Raises DoesNotFit."""
    needed = pinned_bytes(shape, work, machine.engines, machine.tensor_parallel)
    if machine.main_memory is not None and needed > machine.main_memory:
        raise DoesNotFit(
            f"{name} at {work.longest} tokens fits only if vLLM sleeps while the job learns, with its weights in main "
            f"memory: {needed / GIB:.1f} GiB for engines x {machine.engines}, and {machine.main_memory / GIB:.1f} GiB "
            "are free. Have the operator give the worker more main memory or fewer engines (REGRAFT_ENGINES), or "
            "choose a smaller max_completion_tokens."
        )
    return needed


def without_trainer(shape: Shape, work: Workload, machine: Machine) -> int:
    """Bytes on a device of an engine that shares it with no trainer, without its KV cache."""
    weights = math.ceil(shape.weight_bytes / machine.tensor_parallel)
    slot = slot_bytes(shape, work.slot_rank, tensor_parallel=machine.tensor_parallel, targets=work.targets)
    return weights + slot + (MARGIN_SERVING if machine.device == "cuda" else GIB // 2)


def cache_without_trainer(
    name: str, shape: Shape, work: Workload, machine: Machine
) -> tuple[int, EngineSizes | None]:
    """The KV cache of an engine that shares its devices with no trainer, and its sizes. Raises DoesNotFit."""
    room = machine.usable - without_trainer(shape, work, machine)
    one = shape.divided(machine.tensor_parallel).cache_bytes(work.longest)
    wanted = machine.kv_cache_bytes or wanted_cache(shape, work, machine)
    if wanted < one or room < one:
        raise DoesNotFit(
            f"{name} at {work.longest} tokens needs a KV cache of {one / GIB:.2f} GiB for one sequence, and the GPUs "
            f"that only sample have room for {min(room, wanted) / GIB:.2f} GiB beside the weights. Have the operator "
            "raise `tensor_parallel` in the model's entry or REGRAFT_KV_CACHE_GIB, or choose a smaller "
            "max_completion_tokens."
        )
    return with_sizes(shape, work, machine, least=one, room=room - one, wanted=wanted)


def wanted_cache(shape: Shape, work: Workload, machine: Machine) -> int:
    """The largest KV cache that the job can fill."""
    if machine.sampler == "transformers":
        return shape.own_token_bytes * min(MAX_TOKENS_IN_FLIGHT, max(work.longest, work.in_flight))
    if not machine.engines:
        return 0
    cached = shape.divided(machine.tensor_parallel)
    one = cached.cache_bytes(work.longest)
    in_flight = math.ceil(work.in_flight / machine.engines)
    full = max(one, min(in_flight * cached.token_cache_bytes, MAX_SEQUENCES * one))
    return max(one, min(full, CPU_CACHE_BYTES)) if machine.device == "cpu" else full


def least_cache(shape: Shape, work: Workload, machine: Machine) -> int:
    """Without which nothing can be sampled."""
    # The transformers sampler takes the answers to a prompt in turns where they do not fit together.
    if machine.sampler == "vllm" and (machine.device == "cpu" or not machine.engines):
        return wanted_cache(shape, work, machine)
    return smallest_cache(shape, work.longest, machine.sampler, machine.tensor_parallel)


def smallest_cache(shape: Shape, tokens: int, sampler: SamplerName, tensor_parallel: int = 1) -> int:
    """The cache of one sequence of these tokens."""
    if sampler == "transformers":
        return shape.own_token_bytes * tokens
    return shape.divided(tensor_parallel).cache_bytes(tokens)


def bucket(tokens: int) -> int:
    """The width of a row on a GPU: the next multiple of 128, above 1,024 the next of eight steps to twice as much.

    Kernels are chosen for each shape anew; rows as long as their answers make a new one almost every time. These
    are 48 widths up to 32,768, and above 1,024 at most an eighth is padding.
    """
    width = 128
    while width < tokens:
        width = _next_width(width)
    return width


def widths(above: int, most: int) -> list[int]:
    """The widths of `bucket` above one of them, up to `most`."""
    found = []
    while (above := _next_width(above)) <= most:
        found.append(above)
    return found


def kernel_tokens(tokens: int) -> int:
    """The tokens of a micro-batch, with padding, that a kernel of FlexAttention is compiled for.

    Powers of two from 128 to 1,024, then the next of four steps to twice as much: the first step of a job compiles a
    few kernels and not one for each width and number of rows. Only attention has this padding, and it computes nothing
    of it; above 1,024 less than a quarter of the tokens is added.
    """
    size = 128
    while size < tokens:
        size += size if size < 1024 else 1 << (size.bit_length() - 3)
    return size


def _next_width(width: int) -> int:
    """Steps of 128, then eighths of a power of two; above 8,192, where padding costs more than a kernel, 32nds."""
    if width < 1024:
        return width + 128
    return width + (1 << (width.bit_length() - (4 if width < 8192 else 6)))


def _width(tokens: int, machine: Machine) -> int:
    return tokens if machine.device == "cpu" else bucket(tokens)


def least(
    shape: Shape, tokens: int, *, sampler: SamplerName, rank: int = 16, device: Device = "cuda"
) -> Estimate:
    """The least that training with prompt and answer of `tokens` together needs: one sequence at a time."""
    there = Machine(device, 0, sampler)
    work = Workload(rank, 0, tokens, tokens)
    return estimate(
        shape,
        rank=rank,
        token_budget=_width(tokens, there),
        cache=least_cache(shape, work, there),
        checkpointed=True,
        machine=there,
    )


@dataclass(frozen=True)
class Serving:
    """What vLLM needs to answer for a model, in bytes of each of its GPUs."""

    weights: int
    adapters: int
    least_cache: int  # one sequence of the model's context
    margin: int

    @property
    def without_cache(self) -> int:
        return self.weights + self.adapters + self.margin

    @property
    def least(self) -> int:
        return self.without_cache + self.least_cache

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "adapters": self.adapters,
            "KV cache": self.least_cache,
            "margin": self.margin,
        }
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB)
        return f"{self.least / GIB:.1f} GiB: {shown}"


def serving(
    shape: Shape, *, context: int, slots: int, rank: int, device: Device = "cuda", tensor_parallel: int = 1
) -> Serving:
    """On each of `tensor_parallel` GPUs. `slots` adapters of the highest `rank` in a batch, each as large as that."""
    return Serving(
        weights=math.ceil(shape.weight_bytes / tensor_parallel),
        adapters=slot_bytes(shape, rank, slots=slots, tensor_parallel=tensor_parallel),
        least_cache=shape.divided(tensor_parallel).cache_bytes(context),
        margin=MARGIN_SERVING if device == "cuda" else 2 * GIB,
    )


def serving_cache(shape: Shape, need: Serving, *, context: int, free: int, others: Sequence[int] = ()) -> int:
    """The KV cache of a model that is served, where `free` bytes are left for it.

    `others`: what each other model of the registry needs at least. If all fit beside this one, the rest is shared in
    equal parts; otherwise models take turns, and this one takes everything. Always room for one sequence of `context`.
    """
    most = MAX_SEQUENCES * shape.cache_bytes(context)
    rest = free - need.least
    if others and rest >= sum(others):
        rest = (rest - sum(others)) // (1 + len(others))
    return min(most, need.least_cache + max(0, rest))


def serving_sizes(
    shape: Shape, need: Serving, context: int, cache: int, *, is_automatic: bool
) -> tuple[int, EngineSizes]:
    """The cache of a model that is served on a GPU, and the engine's other sizes.

    MARGIN_SERVING has room for the smallest number of sequences. More take their memory from an automatic cache, if
    that holds as many chats.
    """
    sizes = EngineSizes(context, batched_tokens=BATCHED_TOKENS[-1], state_block_bytes=shape.state_block_bytes)
    for sequences in reversed(SEQUENCES[1:]) if is_automatic else ():
        needed = buffer_bytes(shape, EngineSizes(context, sequences))
        rest = cache - needed
        chats = rest // (shape.token_cache_bytes * SERVED_TOKENS)
        if needed <= BUFFER_SHARE * cache and rest >= need.least_cache and is_useful(sequences, chats):
            return rest, replace(sizes, sequences=sequences).within(rest)
    return cache, sizes.within(cache)


def shape_of_config(config: Mapping[str, Any], bytes_each: int) -> Shape | None:
    """Of a model that is described by its config.json. None: it does not have the fields of a Llama-like decoder.

    Biases are left out: they are less than 0.01 %. worker/model/memory.py counts exactly, with transformers.

    Raises:
        UnsupportedModel: its weights are quantized in a way that is refused.
    """
    text = config.get("text_config") or config
    try:
        hidden, layers, heads = (
            int(text[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        vocabulary, dense = int(text["vocab_size"]), int(text["intermediate_size"])
    except (KeyError, TypeError, ValueError):
        return None
    size = int(text.get("head_dim") or hidden // heads)
    queries = heads * size
    keys = int(text.get("num_key_value_heads") or heads) * size
    attention = hidden * (2 * queries + 2 * keys)
    experts = experts_in(text) or 0
    feed_forward, intermediate = _feed_forward(text, layers, hidden, dense, experts)
    linear = layers * attention + feed_forward + vocabulary * hidden
    family = str(text.get("model_type", ""))
    head_norms = family.startswith(("qwen3", "gemma3", "gemma4"))
    layer_norms = 4 if family.startswith(("gemma2", "gemma3", "gemma4")) else 2
    norms = layers * (layer_norms * hidden + (2 * size if head_norms else 0)) + hidden
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    stored = config.get("quantization_config") or text.get("quantization_config") or {}
    format = None if experts else format_in(stored)
    blocks = _block_layers(layers, hidden, queries, keys, intermediate)
    adaptable = [LinearLayer(name, kind, rows + columns) for name, kind, rows, columns in blocks]
    return Shape(
        parameters=linear + norms + (0 if tied else vocabulary * hidden),
        linear_parameters=linear,
        layers=layers,
        hidden=hidden,
        queries=queries,
        heads=heads,
        intermediate=intermediate,
        key_values=2 * keys,
        vocabulary=vocabulary,
        bytes_each=bytes_each,
        head_norms=head_norms,
        layer_norms=layer_norms,
        recomputes_norms=True,
        recomputes_gates=not experts,
        adaptable=(*adaptable, *_expert_layers(text, layers, hidden, dense, experts)),
        packed=PackedSizes.of(format, _packed(format, blocks), bytes_each),
    )


def _feed_forward(
    text: Mapping[str, Any], layers: int, hidden: int, dense: int, experts: int
) -> tuple[int, int]:
    """Parameters of the feed-forward parts of all blocks, and the width that one token goes through."""
    if not experts:
        return layers * 3 * hidden * dense, dense
    each = int(text.get("moe_intermediate_size") or dense)
    sparse = len(_sparse_layers(text, layers))
    parameters = sparse * (experts * 3 * hidden * each + experts * hidden)
    parameters += (layers - sparse) * 3 * hidden * dense
    return parameters, each * (active_experts_in(text) or 1)


def _block_layers(
    layers: int, hidden: int, queries: int, keys: int, intermediate: int
) -> Sequence[tuple[str, Kind, int, int]]:
    """Name, kind, outputs and inputs of the seven linear layers of each Llama block.

    For a mixture: of a block as wide as the experts of a token.
    """
    in_each: Sequence[tuple[str, Kind, int, int]] = [
        ("self_attn.q_proj", "attention", queries, hidden),
        ("self_attn.k_proj", "attention", keys, hidden),
        ("self_attn.v_proj", "attention", keys, hidden),
        ("self_attn.o_proj", "attention", hidden, queries),
        ("mlp.gate_proj", "feed-forward", intermediate, hidden),
        ("mlp.up_proj", "feed-forward", intermediate, hidden),
        ("mlp.down_proj", "feed-forward", hidden, intermediate),
    ]
    return [
        (f"model.layers.{number}.{name}", kind, rows, columns)
        for number in range(layers)
        for name, kind, rows, columns in in_each
    ]


def _sparse_layers(text: Mapping[str, Any], layers: int) -> Sequence[int]:
    """The numbers of the layers of a mixture that have experts. All, if the config names no dense ones."""
    if isinstance(kinds := text.get("mlp_layer_types"), list):
        return [number for number, kind in enumerate(kinds[:layers]) if kind != "dense"]
    dense = {*range(int(text.get("first_k_dense_replace") or 0)), *(text.get("mlp_only_layers") or ())}
    # Every such layer has experts, the first one at the end of an interval.
    interval = int(text.get("decoder_sparse_step") or text.get("moe_layer_interval") or 1)
    return [number for number in range(layers) if number not in dense and (number + 1) % interval == 0]


def _expert_layers(
    text: Mapping[str, Any], layers: int, hidden: int, dense: int, experts: int
) -> list[LinearLayer]:
    """The experts of each of the sparse layers of a mixture."""
    if not experts:
        return []
    each = int(text.get("moe_intermediate_size") or dense)
    active = active_experts_in(text) or 1
    width = experts * (2 * hidden + 3 * each)
    return [
        LinearLayer(f"model.layers.{number}.mlp.experts", "experts", width, experts, active, each)
        for number in _sparse_layers(text, layers)
    ]


def _packed(
    format: PackedFormat | None, blocks: Sequence[tuple[str, Kind, int, int]]
) -> list[tuple[int, int]]:
    """Outputs and inputs of the layers that are packed."""
    if format is None:
        return []
    return [(rows, columns) for name, _, rows, columns in blocks if not format.skips(name)]
