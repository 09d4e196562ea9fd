"""Predict the placement, the memory and the time of a step of a job on GPUs that are not here. Pure; imports no torch.

The memory is that of the plan of a real run (sizing.py). The time is a roofline: the larger of what the arithmetic and
the memory traffic take at a share of a GPU's data sheet. docs/measured/h200.md has the trainer's measured rates.
"""

import math
import re
from dataclasses import dataclass, replace

from core.jobs import full
from core.units import GIB
from worker.gpu_ratio import gpus, settings_of, side_by_side
from worker.model import sizing
from worker.model.sizing import DoesNotFit, Machine, MemoryPlan, Shape, Workload


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
# Of a few rows of hidden states inside a machine: two in each layer for each token. Assumed.
ALL_REDUCE_SECONDS = 15e-6


class UnknownGpus(ValueError):
    """Not a number of known GPUs."""


class NotDivisible(ValueError):
    """The GPUs cannot be divided between sampling and learning."""


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
    off_policy_steps: int = 0  # how far ahead some GPUs sample while the others learn

    @property
    def workload(self) -> Workload:
        in_flight = self.prompts * (self.prompt + self.group * self.completion)
        references = int(self.full and self.has_reference)
        return Workload(
            self.rank,
            self.prompt,
            self.completion,
            in_flight,
            full=self.full,
            references=references,
            adapter_copies=sizing.adapter_copies(self.off_policy_steps),
            learned=in_flight,
            answers=self.answers,
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
    sampling_gpus: int = 0  # of the first machine, that do not learn; 0: colocated

    @property
    def ranks(self) -> int:
        """GPUs of each machine that learn."""
        return self.cluster.per_node - self.sampling_gpus

    @property
    def learning_gpus(self) -> int:
        return self.cluster.nodes * self.ranks

    @property
    def answers_of_engine(self) -> int:
        """Of the engine that has the most. All answers to a prompt are sampled by one engine."""
        return math.ceil(self.size.prompts / self.engines) * self.size.group

    @property
    def sampling_bytes(self) -> int:
        """Of a GPU that only samples."""
        machine = Machine("cuda", 0, "vllm", tensor_parallel=self.tensor_parallel, split=True)
        buffers = sizing.buffer_bytes(
            self.shape, self.plan.engine, self.tensor_parallel, margin_tokens=machine.margin_tokens
        )
        return (
            sizing.without_trainer(self.shape, self.size.workload, machine) + buffers + self.plan.cache_bytes
        )

    @property
    def concurrent(self) -> int:
        """Answers that an engine decodes side by side: those it has, as far as its cache and vLLM's limit allow.

        A cache for its share of all that the step can have in flight allows all: they share their prompts' blocks.
        """
        longest = self.size.workload.longest
        cached = self.shape.divided(self.tensor_parallel).cache_bytes(longest)
        assert self.plan.engine is not None, "vLLM samples"
        most = min(self.answers_of_engine, self.plan.engine.sequences)
        engines = Machine("cuda", 0, "vllm", engines=self.engines, tensor_parallel=self.tensor_parallel)
        if self.plan.cache_bytes >= sizing.wanted_cache(self.shape, self.size.workload, engines):
            return most
        return max(1, min(most, self.plan.cache_bytes // cached))

    @property
    def decode_seconds(self) -> float:
        """Of all answers: each token reads the weights once for all answers side by side, and their keys and values."""
        gpu, size, tp = self.cluster.gpu, self.size, self.tensor_parallel
        waves = math.ceil(self.answers_of_engine / self.concurrent)
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
        return flops / (self.learning_gpus * gpu.flops * COMPUTE_SHARE)

    @property
    def gathering_seconds(self) -> float:
        """Of the layers of sharded weights, once in each pass of each micro-batch. Not overlapped here.

        If all weights are trained, the float32 gradients of a micro-batch are added up and divided in the same way.
        """
        degree = self.plan.degree
        if degree == 1:
            return 0.0
        passes = 3 if self.plan.checkpointed else 2
        batches = math.ceil(self.size.tokens / self.learning_gpus / self.plan.token_budget)
        each = passes * self.shape.bytes_each + 4 * self.size.full
        layers = self.shape.inside_parameters * each
        return batches * layers * (degree - 1) / degree / (self.cluster.gpu.link * BANDWIDTH_SHARE)

    @property
    def sampling_seconds(self) -> float:
        return self.decode_seconds + self.prefill_seconds

    @property
    def updating_seconds(self) -> float:
        return self.learning_seconds + self.gathering_seconds

    @property
    def sleeping_seconds(self) -> float:
        """Of engines that sleep while the job learns."""
        if not self.plan.sleeps:
            return 0.0
        return sizing.sleep_seconds(self.shape, self.tensor_parallel, full=self.size.full)

    @property
    def publishing_seconds(self) -> float:
        """Of all weights, which the run writes into files and then each engine reads."""
        return 2 * self.shape.weight_bytes / FILE_BANDWIDTH if self.size.full else 0.0

    @property
    def seconds(self) -> float:
        """Of a step, without grading."""
        if self.sampling_gpus:
            return max(self.sampling_seconds, self.updating_seconds)
        moving = self.publishing_seconds + self.sleeping_seconds
        return self.sampling_seconds + self.updating_seconds + moving

    def __str__(self) -> str:
        engine = "1 vLLM engine" if self.engines == 1 else f"{self.engines} vLLM engines"
        parallel = f" of tensor parallel degree {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        degree = self.plan.degree
        count = self.learning_gpus // degree
        copies = "1 copy" if count == 1 else f"{count} copies"
        where = f", sharded over {degree} GPUs" if degree > 1 else ""
        size = self.size
        return "\n".join(
            [
                f"{self.shape.parameters / 1e9:.1f} billion parameters on {self.cluster}; a step of {size.prompts} "
                f"prompts of {size.prompt} tokens, {size.group} answers of {size.answer} (at most {size.completion})",
                f"  placement  {self._placement}",
                f"  sampling   {engine}{parallel}, {self.concurrent} answers side by side in each",
                f"  learning   {copies} of the weights{where}, micro-batches of "
                f"{self.plan.token_budget} tokens"
                + (", activations computed twice" if self.plan.checkpointed else ""),
                f"  memory     {self._memory}; a GPU has {self.cluster.gpu.memory_gib}",
                f"  seconds    {self.seconds:.1f}: {self._sides}decoding {self.decode_seconds:.1f}, prompts "
                f"{self.prefill_seconds:.1f}, learning {self.learning_seconds:.1f}"
                + (f", gathering layers {self.gathering_seconds:.1f}" if degree > 1 else "")
                + (f", weights to vLLM {self.publishing_seconds:.1f}" if size.full else "")
                + (f", vLLM's sleep {self.sleeping_seconds:.1f}" if self.plan.sleeps else ""),
                "  By calculation, not measured on GPUs (docs/howto/scale-plan.md).",
            ]
        )

    @property
    def _placement(self) -> str:
        sampling, learning = self.sampling_gpus, self.learning_gpus
        if not sampling:
            sampling = self.engines * self.tensor_parallel
            return f"colocated: sampling on {gpus(sampling)}, then learning on {learning}"
        steps = self.size.off_policy_steps
        ahead = "1 step" if steps == 1 else f"{steps} steps"
        idle = (self.cluster.nodes - 1) * sampling
        return (
            f"split: sampling on {gpus(sampling)}, {ahead} ahead of learning on {learning} "
            f"({settings_of(sampling, self.ranks)})"
            + (f"; {gpus(idle)} of other machines without work" if idle else "")
        )

    @property
    def _memory(self) -> str:
        if not self.sampling_gpus:
            return f"{self.plan.sleep_sentence}{self.plan.estimate}"
        sampling, cache = self.sampling_bytes / GIB, self.plan.cache_bytes / GIB
        return (
            f"{self.plan.copies_sentence}To sample {sampling:.1f} GiB, of which the KV cache is {cache:.1f}. To learn "
            f"{self.plan.estimate}"
        )

    @property
    def _sides(self) -> str:
        if not self.sampling_gpus:
            return ""
        sides = (self.sampling_seconds, self.sampling_gpus, self.updating_seconds, self.learning_gpus)
        return f"{side_by_side(*sides)} Of these "


def forecast(
    name: str,
    shape: Shape,
    size: StepSize,
    cluster: Cluster,
    tensor_parallel: int | None = None,
    sampling_gpus: int | None = None,
) -> Forecast:
    """Find the tensor parallel degree with the shortest step, each with the least sharding that fits.

    Without `off_policy_steps` the engines are on the GPUs of the first machine, which also learn. They sleep meanwhile
    as those of a run would; main memory is taken to suffice for that. With them the GPUs are split.

    Args:
        tensor_parallel: the only degree to try.
        sampling_gpus: with `off_policy_steps`, the only number of GPUs that sample to try.

    Raises:
        DoesNotFit: with no degree.
        NotDivisible: the GPUs cannot be split so.
    """
    if size.off_policy_steps:
        return _forecast_split(name, shape, size, cluster, tensor_parallel, sampling_gpus)
    if size.full:
        _refuse_full(name, shape, cluster)
    degrees = _degrees(shape, cluster.per_node, tensor_parallel)
    if not degrees:
        raise DoesNotFit(
            f"{name} has {shape.heads} attention heads, and tensor parallel degree {tensor_parallel} does not divide "
            f"them and the {cluster.per_node} GPUs of a machine."
        )
    machine = _machine(cluster, may_sleep=True)
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


def _degrees(shape: Shape, count: int, fixed: int | None) -> list[int]:
    """The tensor parallel degrees to try for engines on `count` GPUs."""
    kv_heads = max(1, shape.key_values * shape.heads // (2 * shape.queries))
    return [
        degree
        for degree in ([fixed] if fixed else [1, 2, 4, 8])
        if count % degree == 0 and shape.heads % degree == 0 and (fixed or degree <= kv_heads)
    ]


def _machine(cluster: Cluster, **options: bool) -> Machine:
    free = cluster.gpu.memory_gib * GIB
    spared = sizing.spared("cuda", free)
    return Machine("cuda", free, "vllm", spared, gpu_class=cluster.name, **options)


def _forecast_split(
    name: str,
    shape: Shape,
    size: StepSize,
    cluster: Cluster,
    tensor_parallel: int | None,
    sampling_gpus: int | None,
) -> Forecast:
    """Some GPUs of the first machine sample while the others learn, and as many of each other machine learn.

    Finds the number that samples and the tensor parallel degree with the shortest step.

    Raises:
        DoesNotFit: with no number and degree.
        NotDivisible: as `forecast` does.
    """
    if size.full:
        raise NotDivisible(
            "off_policy_steps cannot be combined with train 'full': only earlier adapters are kept."
        )
    if cluster.per_node < 2 or (sampling_gpus is not None and not 0 < sampling_gpus < cluster.per_node):
        raise NotDivisible(
            f"Of the {gpus(cluster.per_node)} of a machine some have to sample and others to learn"
            + (", which needs two." if sampling_gpus is None else f", and {sampling_gpus} are to sample.")
        )
    refusal: DoesNotFit | None = None
    found: list[Forecast] = []
    for sampling in range(1, cluster.per_node) if sampling_gpus is None else [sampling_gpus]:
        for degree in _degrees(shape, sampling, tensor_parallel):
            engines = sampling // degree
            machine = replace(_machine(cluster, split=True), engines=engines, tensor_parallel=degree)
            try:
                plan = sizing.plan_sharded(name, shape, size.workload, machine, cluster.per_node - sampling)
            except DoesNotFit as cause:
                refusal = cause
            else:
                found.append(Forecast(cluster, shape, size, plan, engines, degree, sampling))
    if found:
        return min(found, key=lambda one: one.seconds)
    if refusal is not None:
        others = " Nor does another ratio of the GPUs fit." if sampling_gpus is None else ""
        raise DoesNotFit(f"{refusal}{others}") from refusal
    raise NotDivisible(
        f"Tensor parallel degree {tensor_parallel} does not divide the {shape.heads} attention heads of {name} and the "
        f"{cluster.per_node - 1 if sampling_gpus is None else sampling_gpus} GPUs that may sample."
    )


def _refuse_full(name: str, shape: Shape, cluster: Cluster) -> None:
    """Raises DoesNotFit: not all weights of the model can be trained there."""
    if problem := full.too_large(shape.parameters):
        raise DoesNotFit(problem)
    if cluster.nodes > 1:
        raise DoesNotFit(
            f"train 'full' is for one machine: plan {name} on {cluster.per_node}x{cluster.name}."
        )
