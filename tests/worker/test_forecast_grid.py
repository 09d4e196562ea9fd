"""The plans of 8B, 32B and 70B models on all machines of docs/howto/scale-plan.md, with its formulas written again.

Parameters are counted by hand from the models' papers, and expected numbers use nothing of worker/model/sizing.py.
"""

import math
from dataclasses import dataclass, replace
from itertools import product

import pytest

from core.units import GIB
from tests.present import present
from tests.worker.test_forecast import SIZE, on, shape
from worker.model import sizing
from worker.model.forecast import Forecast, cluster_of, forecast
from worker.model.sizing import DoesNotFit, Machine

# 5 % stay free.
MEMORY = {"H100-80": 78 * GIB - 78 * GIB // 20, "H200-141": 139 * GIB - 139 * GIB // 20}
BANDWIDTH = {"H100-80": 3.35e12, "H200-141": 4.8e12}
FLOPS, LINK = 989e12, 450e9
LONGEST = (
    512 + 2048 + 128
)  # tokens of a prompt and its answer in vLLM's cache: whole blocks of 128, and one more


@dataclass(frozen=True)
class ByHand:
    """A model as its paper describes it: 8 heads of keys, 128 numbers a head, bfloat16."""

    layers: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    normed_heads: bool = False  # queries and keys have norms

    @property
    def layer(self) -> int:
        queries, keys = self.heads * 128, 8 * 128
        linear = 2 * self.hidden * queries + 2 * self.hidden * keys + 3 * self.hidden * self.inner
        return linear + 2 * self.hidden + 2 * 128 * self.normed_heads

    @property
    def ends(self) -> int:
        """Embeddings and head."""
        return 2 * self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.ends + self.layers * self.layer + self.hidden

    @property
    def adapter(self) -> int:
        """Of rank 16: for each linear layer 16 rows and 16 columns."""
        queries, keys = self.heads * 128, 8 * 128
        widths = 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.inner)
        return 16 * self.layers * widths

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token."""
        return 2 * self.layers * 8 * 128 * 2

    def slot(self, parallel: int) -> int:
        """The buffer of an engine for the adapter, in bfloat16: the side of the hidden states is whole on each GPU."""
        queries, keys = self.heads * 128, 8 * 128
        divided = 2 * queries + 2 * keys + 3 * self.inner
        return 2 * 16 * self.layers * (7 * self.hidden + divided // parallel)

    def buffers(self, found: Forecast, margin_tokens: int = 2048) -> int:
        """What an engine computes with beyond 256 sequences and these tokens: logits, and activations in bfloat16."""
        engine = present(found.plan.engine)
        divided = 2 * self.heads * 128 + 2 * 2 * 8 * 128 + 3 * self.inner
        token = 2 * (4 * self.hidden + divided // found.tensor_parallel)
        return (engine.sequences - 256) * self.vocabulary * 10 + (
            engine.batched_tokens - margin_tokens
        ) * token

    def weights(self, degree: int) -> float:
        """Bytes of a trainer's weights: sharded, whole ends, a part of the layers, and two whole layers."""
        if degree == 1:
            return 2 * self.parameters
        return 2 * (self.ends + (self.layers * self.layer + self.hidden) / degree + 2 * self.layer)


MODELS = {
    "Llama 3 8B": ByHand(32, 4096, 14_336, 32, 128_256),
    "Qwen 3 32B": ByHand(64, 5120, 25_600, 64, 151_936, normed_heads=True),
    "Llama 3 70B": ByHand(80, 8192, 28_672, 64, 128_256),
}
MACHINES = [f"{count}{kind}" for kind in MEMORY for count in ("", "2x", "8x", "2x8x")]
# Trainer and sampler have a copy each, which do not fit even if they are divided by all GPUs.
TOO_SMALL = {
    ("Qwen 3 32B", "H100-80"),
    ("Llama 3 70B", "H100-80"),
    ("Llama 3 70B", "2xH100-80"),
    ("Llama 3 70B", "H200-141"),
    ("Llama 3 70B", "2xH200-141"),
}


def test_the_parameters_are_those_of_the_papers() -> None:
    counted = {name: model.parameters for name, model in MODELS.items()}

    assert counted == {
        "Llama 3 8B": 8_030_261_248,
        "Qwen 3 32B": 32_762_123_264,
        "Llama 3 70B": 70_553_706_496,
    }
    assert all(shape(name).parameters == parameters for name, parameters in counted.items())


@pytest.mark.parametrize(("name", "gpus"), [*product(MODELS, MACHINES)])
def test_nothing_that_fits_is_refused(name: str, gpus: str) -> None:
    """What fits needs weights, adapter and the keys and values of one answer at least, however they are divided."""
    model, kind = MODELS[name], gpus.rpartition("x")[2]
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= in_a_machine(gpus)]
    least = min(
        model.weights(degree) + (2 * model.parameters + LONGEST * model.token_bytes) / parallel
        for degree, parallel in product(degrees, degrees)
    )

    assert (least + 16 * model.adapter > MEMORY[kind]) == ((name, gpus) in TOO_SMALL)
    if (name, gpus) in TOO_SMALL:
        with pytest.raises(DoesNotFit):
            on(name, gpus)
    else:
        assert on(name, gpus).plan.estimate.total <= MEMORY[kind]


FITTING = [one for one in product(MODELS, MACHINES) if one not in TOO_SMALL]


@pytest.mark.parametrize(("name", "gpus"), FITTING)
def test_the_memory_of_a_gpu_is_the_sum_of_its_parts(name: str, gpus: str) -> None:
    model, found = MODELS[name], on(name, gpus)
    of, parallel = found.plan.estimate, found.tensor_parallel
    parts = of.adapter + of.activations + of.attention + of.head

    assert of.own == pytest.approx(model.weights(found.plan.degree), rel=1e-6)
    assert of.engine == math.ceil(2 * model.parameters / parallel) + model.slot(parallel) + model.buffers(
        found
    )
    assert of.adapter == 16 * model.adapter  # weight, gradient and two moments in float32
    assert of.cache == found.plan.cache_bytes >= LONGEST * model.token_bytes / parallel
    if of.sleeps:
        sampling = of.own + of.adapter + of.engine + of.cache + 4 * GIB
        assert of.total == max(sampling, of.own + parts + of.margin)
    else:
        assert of.total == of.own + of.engine + parts + of.cache + of.margin


@pytest.mark.parametrize(("name", "gpus"), FITTING)
def test_the_seconds_of_a_step_are_the_sum_of_the_formulas(name: str, gpus: str) -> None:
    model, found, kind = MODELS[name], on(name, gpus), gpus.rpartition("x")[2]
    count = 16 if gpus.startswith("2x8x") else in_a_machine(gpus)

    assert found.engines * found.tensor_parallel == in_a_machine(gpus)
    assert found.seconds == pytest.approx(
        decoding(model, found, kind)
        + prompts(model, found)
        + learning(model, found, count)
        + gathering(model, found, count)
        + sleeping(model, found)
    )


def decoding(model: ByHand, found: Forecast, kind: str) -> float:
    parallel = found.tensor_parallel
    own = math.ceil(8 / found.engines) * 8  # whole groups
    in_flight = math.ceil(8 * (512 + 8 * 2048) / found.engines) * model.token_bytes // parallel
    cached = found.plan.cache_bytes // (LONGEST * model.token_bytes // parallel)
    together = own if found.plan.cache_bytes >= in_flight else min(own, cached)
    assert together == found.concurrent
    read = (2 * model.parameters + together * (512 + 1024 / 2) * model.token_bytes) / parallel
    read_seconds = read / (0.6 * BANDWIDTH[kind])
    computed_seconds = 2 * model.parameters * together / parallel / (0.4 * FLOPS)
    summed = 2 * model.layers * 15e-6 if parallel > 1 else 0
    waves = math.ceil(own / together)
    return waves * 1024 * (max(read_seconds, computed_seconds) + summed)


def prompts(model: ByHand, found: Forecast) -> float:
    tokens = math.ceil(8 / found.engines) * 512
    return 2 * model.parameters * tokens / found.tensor_parallel / (0.4 * FLOPS)


def learning(model: ByHand, found: Forecast, gpus: int) -> float:
    flops = 6 if found.plan.checkpointed else 4
    return flops * model.parameters * (8 * 512 + 64 * 1024) / gpus / (0.4 * FLOPS)


def gathering(model: ByHand, found: Forecast, gpus: int) -> float:
    degree = found.plan.degree
    if degree == 1:
        return 0
    passes = 3 if found.plan.checkpointed else 2
    batches = math.ceil((8 * 512 + 64 * 1024) / gpus / found.plan.token_budget)
    layers = 2 * (model.parameters - model.ends)
    return batches * passes * layers * (degree - 1) / degree / (0.6 * LINK)


def sleeping(model: ByHand, found: Forecast) -> float:
    return 2 + 2 * model.parameters / found.tensor_parallel / 25e9 if found.plan.sleeps else 0


def in_a_machine(gpus: str) -> int:
    """Of `2x8xH100-80`, 8."""
    counts = gpus.split("x")[:-1]
    return int(counts[-1]) if counts else 1


SPLIT = replace(SIZE, off_policy_steps=2)
EIGHT = [
    (name, f"{machines}{kind}")
    for name in ("Llama 3 8B", "Qwen 3 32B")
    for machines in ("8x", "2x8x")
    for kind in MEMORY
]


@pytest.mark.parametrize(("name", "gpus"), EIGHT)
@pytest.mark.parametrize("sampling", range(1, 8))
def test_a_split_step_takes_the_longer_of_both_sides_and_each_fits_on_its_gpus(
    name: str, gpus: str, sampling: int
) -> None:
    model, kind, machines = MODELS[name], gpus.rpartition("x")[2], 2 if gpus.startswith("2x") else 1

    found = forecast(name, shape(name), SPLIT, cluster_of(gpus), sampling_gpus=sampling)

    learning_gpus = machines * (8 - sampling)
    assert found.engines * found.tensor_parallel == sampling
    sides = (
        decoding(model, found, kind) + prompts(model, found),
        learning(model, found, learning_gpus) + gathering(model, found, learning_gpus),
    )
    assert found.seconds == pytest.approx(max(sides))
    of, parallel = found.plan.estimate, found.tensor_parallel
    assert found.sampling_bytes == math.ceil(2 * model.parameters / parallel) + model.slot(
        parallel
    ) + model.buffers(found, margin_tokens=8192) + 3 * GIB + (found.plan.cache_bytes)
    assert found.plan.cache_bytes >= LONGEST * model.token_bytes / parallel
    assert (of.engine, of.cache) == (0, 0)
    assert of.total == of.own + of.adapter + of.activations + of.attention + of.head + of.margin
    assert max(found.sampling_bytes, of.total) <= MEMORY[kind]
    assert found.plan.main_memory == 6 * 4 * model.adapter  # copies of the adapter, in float32


@pytest.mark.parametrize(("name", "gpus"), EIGHT)
def test_of_all_ratios_the_one_with_the_shortest_step_is_planned(name: str, gpus: str) -> None:
    def seconds(sampling: int | None, parallel: int | None = None) -> float:
        return forecast(name, shape(name), SPLIT, cluster_of(gpus), parallel, sampling).seconds

    assert seconds(None) == min(seconds(sampling) for sampling in range(1, 8))
    assert seconds(4) == min(seconds(4, parallel) for parallel in (1, 2, 4))


@pytest.mark.parametrize(("name", "kind", "parallel"), [*product(MODELS, MEMORY, (2, 4))])
def test_split_four_gpus_sample_with_one_copy_and_four_learn_with_another(
    name: str, kind: str, parallel: int
) -> None:
    """Neither counts the weights of the other."""
    model, engines = MODELS[name], 4 // parallel
    machine = Machine("cuda", MEMORY[kind], "vllm", engines=engines, tensor_parallel=parallel, split=True)

    def planned() -> sizing.MemoryPlan:
        return sizing.plan_sharded(name, shape(name), SIZE.workload, machine, 4)

    room = MEMORY[kind] - 2 * model.parameters / parallel - model.slot(parallel) - 3 * GIB
    if room < LONGEST * model.token_bytes / parallel:
        with pytest.raises(DoesNotFit, match="the GPUs that only sample"):
            planned()
        return
    found = planned()
    of, wanted = found.estimate, 8 * (512 + 8 * 2048) / engines * model.token_bytes / parallel

    assert of.own == pytest.approx(model.weights(found.degree), rel=1e-6)
    assert (of.engine, of.cache) == (0, 0)
    assert of.total <= MEMORY[kind]
    smaller = [degree for degree in (1, 2) if degree < found.degree]
    assert all(model.weights(degree) + of.parts + of.margin > MEMORY[kind] for degree in smaller)
    assert found.cache_bytes == pytest.approx(min(wanted, room), abs=1)
    alone = sizing.plan_sharded(name, shape(name), SIZE.workload, replace(machine, engines=0, split=False), 4)
    assert (found.estimate, found.token_budget) == (alone.estimate, alone.token_budget)
