"""Predict the placement, the memory and the time of a step of a job on GPUs that are not here. Pure; imports no torch.

The memory is that of the plan of a real run (sizing.py). The time is a roofline: the larger of what the arithmetic and
the memory traffic take at a share of a GPU's data sheet. Nothing of it has been measured on a GPU.
"""

import math
import re
from dataclasses import dataclass, replace

from core.jobs import full
from worker.model import sizing
from worker.model.sizing import GIB, DoesNotFit, Machine, MemoryPlan, Shape, Workload


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, by its maker's data sheet."""

    memory_gib: int  # that nvidia-smi shows, less one for the driver
    flops: float  # a second, dense, in bfloat16
    bandwidth: float  # bytes a second of its memory
    link: float  # bytes a second to its neighbors, in one direction


GPUS = {
    "A100-40": Gpu(39, 312e12, 1.56e12, 300e9),
    "A100-80": Gpu(79, 312e12, 2.04e12, 300e9),
    "L40S-48": Gpu(44, 362e12, 0.864e12, 32e9),
    "H100-80": Gpu(78, 989e12, 3.35e12, 450e9),
    "H200-141": Gpu(139, 989e12, 4.8e12, 450e9),
    "B200-180": Gpu(178, 2250e12, 8.0e12, 900e9),
}

# Shares of the data sheet that well-kept kernels reach. Assumed; a machine with GPUs should replace them.
COMPUTE_SHARE = 0.4
BANDWIDTH_SHARE = 0.6
FILE_BANDWIDTH = 2e9  # bytes a second of files in /dev/shm, written or read by one process. Assumed
HOST_BANDWIDTH = 25e9  # bytes a second between a GPU and main memory, in one direction: PCIe 4. Assumed
ALL_REDUCE_SECONDS = (
    15e-6  # of a few rows of hidden states inside a machine: two in each layer for each token. Assumed
)


class UnknownGpus(ValueError):
    """Not a number of known GPUs."""


@dataclass(frozen=True)
class Cluster:
    nodes: int
    per_node: int
    name: str  # of GPUS

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.name]

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        machines = f"{self.nodes} machines with " if self.nodes > 1 else ""
        return f"{machines}{self.per_node} x {self.name}"


def cluster_of(text: str) -> Cluster:
    """Parse `8xH100-80`, or `2x8xH100-80` for two machines. Raises UnknownGpus."""
    found = re.fullmatch(r"(?:(?:([1-9]\d*)x)?([1-9]\d*)x)?([A-Z0-9]+-\d+)", text)
    if found is None or found[3] not in GPUS:
        raise UnknownGpus(
            f"{text!r} is not GPUS, MACHINESxGPUS or a single GPU of a kind, such as 8xH100-80 or 2x8xH100-80. "
            f"Known kinds: {', '.join(GPUS)}."
        )
    return Cluster(int(found[1] or 1), int(found[2] or 1), found[3])


@dataclass(frozen=True)
class StepSize:
    """The prompts and answers of a step."""

    prompts: int
    group: int  # answers to each prompt
    prompt: int  # tokens of the longest prompt, and of each here
    completion: int  # max_completion_tokens
    answer: int  # mean tokens of an answer
    rank: int  # of the adapter
    full: bool = False  # all weights are trained, and there is no adapter
    has_reference: bool = False  # with `full`: a KL penalty keeps a copy of the first weights

    @property
    def workload(self) -> Workload:
        in_flight = self.prompts * (self.prompt + self.group * self.completion)
        references = int(self.full and self.has_reference)
        return Workload(
            self.rank, self.prompt, self.completion, in_flight, full=self.full, references=references
        )

    @property
    def answers(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """That the trainer computes: a prompt once for all of its answers."""
        return self.prompts * (self.prompt + self.group * self.answer)


@dataclass(frozen=True)
class Forecast:
    cluster: Cluster
    shape: Shape
    size: StepSize
    plan: MemoryPlan
    engines: int
    tensor_parallel: int

    @property
    def concurrent(self) -> int:
        """Answers that an engine decodes side by side: those it has, as far as its cache and vLLM's limit allow."""
        longest = self.size.workload.longest
        cached = self.shape.divided(self.tensor_parallel).cache_bytes(longest)
        own = math.ceil(self.size.answers / self.engines)
        return max(1, min(own, sizing.MAX_SEQUENCES, self.plan.cache_bytes // cached))

    @property
    def decode_seconds(self) -> float:
        """Of all answers: each token reads the weights once for all answers side by side, and their keys and values."""
        gpu, size, tp = self.cluster.gpu, self.size, self.tensor_parallel
        waves = math.ceil(size.answers / self.engines / self.concurrent)
        context = size.prompt + size.answer / 2
        cached = self.concurrent * context * self.shape.divided(tp).token_cache_bytes
        read = (self.shape.weight_bytes / tp + cached) / (gpu.bandwidth * BANDWIDTH_SHARE)
        computed = 2 * self.shape.parameters * self.concurrent / (tp * gpu.flops * COMPUTE_SHARE)
        summed = 2 * self.shape.layers * ALL_REDUCE_SECONDS if tp > 1 else 0.0
        return waves * size.answer * (max(read, computed) + summed)

    @property
    def prefill_seconds(self) -> float:
        """Of all prompts, each computed once."""
        prompts = math.ceil(self.size.prompts / self.engines)
        flops = 2 * self.shape.parameters * prompts * self.size.prompt
        return flops / (self.tensor_parallel * self.cluster.gpu.flops * COMPUTE_SHARE)

    @property
    def learning_seconds(self) -> float:
        """2 FLOPs a parameter and token forward, 2 backward, 2 for gradients of weights, 2 for activations again."""
        gpu = self.cluster.gpu
        each = 4 + 2 * self.plan.checkpointed + 2 * self.size.full
        flops = each * self.shape.parameters * self.size.tokens
        return flops / (self.cluster.gpus * gpu.flops * COMPUTE_SHARE)

    @property
    def gathering_seconds(self) -> float:
        """Of the layers of sharded weights, once in each pass of each micro-batch. Not overlapped here.

        If all weights are trained, the float32 gradients of a micro-batch are added up and divided in the same way.
        """
        degree = self.plan.degree
        if degree == 1:
            return 0.0
        passes = 3 if self.plan.checkpointed else 2
        batches = math.ceil(self.size.tokens / self.cluster.gpus / self.plan.token_budget)
        each = passes * self.shape.bytes_each + 4 * self.size.full
        layers = self.shape.inside_parameters * each
        return batches * layers * (degree - 1) / degree / (self.cluster.gpu.link * BANDWIDTH_SHARE)

    @property
    def sleeping_seconds(self) -> float:
        """Of the weights of an engine that sleeps while the job learns, to main memory and back."""
        if not self.plan.sleeps:
            return 0.0
        return 2 * self.shape.weight_bytes / self.tensor_parallel / HOST_BANDWIDTH

    @property
    def publishing_seconds(self) -> float:
        """Of all weights, which the run writes into files and then each engine reads."""
        return 2 * self.shape.weight_bytes / FILE_BANDWIDTH if self.size.full else 0.0

    @property
    def seconds(self) -> float:
        """Of a step, without grading."""
        sampling = self.publishing_seconds + self.decode_seconds + self.prefill_seconds
        return sampling + self.learning_seconds + self.gathering_seconds + self.sleeping_seconds

    def __str__(self) -> str:
        engine = "1 vLLM engine" if self.engines == 1 else f"{self.engines} vLLM engines"
        parallel = f" of tensor parallel degree {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        degree = self.plan.degree
        count = self.cluster.gpus // degree
        copies = "1 copy" if count == 1 else f"{count} copies"
        where = f", sharded over {degree} GPUs" if degree > 1 else ""
        size = self.size
        return "\n".join(
            [
                f"{self.shape.parameters / 1e9:.1f} billion parameters on {self.cluster}; a step of {size.prompts} "
                f"prompts of {size.prompt} tokens, {size.group} answers of {size.answer} (at most {size.completion})",
                f"  sampling   {engine}{parallel}, {self.concurrent} answers side by side in each",
                f"  learning   {copies} of the weights{where}, micro-batches of "
                f"{self.plan.token_budget} tokens"
                + (", activations computed twice" if self.plan.checkpointed else ""),
                f"  memory     {self.plan.sleep}{self.plan.estimate}; a GPU has {self.cluster.gpu.memory_gib}",
                f"  seconds    {self.seconds:.1f}: decoding {self.decode_seconds:.1f}, prompts "
                f"{self.prefill_seconds:.1f}, learning {self.learning_seconds:.1f}"
                + (f", gathering layers {self.gathering_seconds:.1f}" if degree > 1 else "")
                + (f", weights to vLLM {self.publishing_seconds:.1f}" if size.full else "")
                + (f", vLLM's sleep {self.sleeping_seconds:.1f}" if self.plan.sleeps else ""),
                "  By calculation, not measured on GPUs (docs/howto/scale.md).",
            ]
        )


def forecast(
    name: str, shape: Shape, size: StepSize, cluster: Cluster, tensor_parallel: int | None = None
) -> Forecast:
    """Find the tensor parallel degree with the shortest step, each with the least sharding that fits.

    The engines are on the GPUs of the first machine, which also learn. If the memory asks for it they sleep meanwhile;
    main memory is taken to suffice for that.

    Args:
        tensor_parallel: the only degree to try.

    Raises:
        DoesNotFit: with no degree.
    """
    if size.full:
        _refuse_full(name, shape, cluster)
    given = [tensor_parallel] if tensor_parallel else [1, 2, 4, 8]
    kv_heads = max(1, shape.key_values * shape.heads // (2 * shape.queries))
    degrees = [
        degree
        for degree in given
        if cluster.per_node % degree == 0
        and shape.heads % degree == 0
        and (tensor_parallel or degree <= kv_heads)
    ]
    if not degrees:
        raise DoesNotFit(
            f"{name} has {shape.heads} attention heads, and tensor parallel degree {tensor_parallel} does not divide "
            f"them and the {cluster.per_node} GPUs of a machine."
        )
    machine = Machine("cuda", cluster.gpu.memory_gib * GIB, "vllm", gpu_class=cluster.name, may_sleep=True)
    found: list[Forecast] = []
    for degree in degrees:
        engines = cluster.per_node // degree
        there = replace(machine, engines=engines, tensor_parallel=degree)
        try:
            plan = sizing.plan_sharded(name, shape, size.workload, there, cluster.per_node)
        except DoesNotFit:
            if degree == degrees[-1] and not found:
                raise
        else:
            found.append(Forecast(cluster, shape, size, plan, engines, degree))
    return min(found, key=lambda one: one.seconds)


def _refuse_full(name: str, shape: Shape, cluster: Cluster) -> None:
    """Raises DoesNotFit: not all weights of the model can be trained there."""
    if problem := full.too_large(shape.parameters):
        raise DoesNotFit(problem)
    if cluster.nodes > 1:
        raise DoesNotFit(
            f"train 'full' is for one machine: plan {name} on {cluster.per_node}x{cluster.name}."
        )
