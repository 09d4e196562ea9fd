"""Sampling and learning with two processes against one: whether answers and adapters are the same.

Prompts of unequal length, SmolLM2-135M in float32 with an adapter that changes its answers. `answers_equal` is the
share of answers with exactly the tokens that one engine gives: with two engines (processes), with two engines after
another update of the adapter, and with one of the two killed after the first answer. `answers_equal_tp` is the share
with one engine of three processes (tensor parallelism), whose sums are rounded in another order. `busy_2` is how even
the tokens are that two engines have left after the first answer: those of the average over those of the busiest.

`adapter_difference` compares the adapters that two ranks (gloo) and one have learned in 3 steps of 2 updates over the
sampled answers: the norm of the difference over that of the movement.

Times are printed to see that nothing is idle. Two processes on the cores of one are not faster.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bench.report import report
from bench.sizes import sized
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.registry import Registry
from core.settings import Settings
from graders.types import Grade
from tests.own_engines import engines_of
from worker import process
from worker.model.engine_sizes import EngineSizes
from worker.model.policy import Policy, load_base
from worker.sampling import Answer, Sampling, grouped
from worker.sampling.placement import Placement
from worker.sampling.vllm import VllmSampler, with_own_engines
from worker.training.distributed import LoadModel, follow, load_checked, loading
from worker.training.launch import launch
from worker.training.rank_model import Model
from worker.training.trainer import PeftTrainer
from worker.training.world import World
from worker.types import Group, Prompt, Rollout

MODEL = "SmolLM2-135M-Instruct"
TOPICS = "rivers cats music trains bread iron winter salt".split()[: sized(8, 2)]
HOW = Sampling(group_size=4, temperature=1.0, max_completion_tokens=sized(24, 4), job_seed=3, step=1)
TENSOR_PARALLEL = 3  # of the model's 9 attention heads
REWARDS = (1.0, 0.0, 0.5, 0.2)
STEPS, UPDATES = sized((3, 2), (1, 1))
Groups = list[tuple[Rollout, ...]]


def main() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process would compile vLLM again
    settings = Settings()
    base = load_base(MODEL, Registry.load(None).get(MODEL), settings.model_cache, "cpu")
    policy = Policy(base, rank=16, alpha=32, seed=0)
    prompts = [prompt(policy, line, topic) for line, topic in enumerate(TOPICS, start=1)]
    with started(policy, engines=1) as one:
        expected = timed("one engine", one, prompts, policy)
        updated = timed("one engine after an update", one, prompts, policy, seed=6)
    with started(policy, engines=2) as two:
        shared = timed("two engines", two, prompts, policy)
        shared_updated = timed("two engines after an update", two, prompts, policy, seed=6)
        move(policy, seed=5)
        after_loss, busy = sampled_with_a_loss(two, prompts)
    with started(policy, engines=1, tensor_parallel=TENSOR_PARALLEL) as divided:
        parallel = timed(f"one engine of {TENSOR_PARALLEL} processes", divided, prompts, policy)
    report(
        "scale",
        {
            "answers_equal": equal([*shared, *shared_updated, *after_loss], [*expected, *updated, *expected]),
            "answers_equal_after_loss": equal(after_loss, expected),
            "answers_equal_tp": equal(parallel, expected),
            "busy_2": busy,
            "adapter_difference": learning_difference(policy, prompts, expected),
        },
    )


def prompt(policy: Policy, line: int, topic: str) -> Prompt:
    text = "Tell me about " + " and ".join([topic] * line)
    return Prompt(line, tuple(policy.render([{"role": "user", "content": text}])), {})


@contextmanager
def started(policy: Policy, *, engines: int, tensor_parallel: int = 1) -> Iterator[VllmSampler]:
    placement = Placement(tensor_parallel, ((),) * engines)
    sampler = with_own_engines(
        policy, placement=placement, sizes=EngineSizes(512), kv_cache_bytes=1 << 27, threads=1
    )
    try:
        yield sampler
    finally:
        sampler.close()


def timed(name: str, sampler: VllmSampler, prompts: list[Prompt], policy: Policy, *, seed: int = 5) -> Groups:
    """Sample with the adapter of this seed, after all engines have started and have it."""
    move(policy, seed)
    [*sampler.answers(prompts[:2], HOW)]
    began = time.perf_counter()
    answers = [*sampler.answers(prompts, HOW)]
    print(f"{name}: {time.perf_counter() - began:.1f} s for {len(answers)} answers")
    return grouped(answers, len(prompts), HOW.group_size)


def move(policy: Policy, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)


def sampled_with_a_loss(sampler: VllmSampler, prompts: list[Prompt]) -> tuple[Groups, float]:
    """Kill an engine after the first answer. Returns how even the loads were before, too."""
    answers: list[Answer] = []
    busy = 0.0
    for answer in sampler.answers(prompts, HOW):
        if not answers:
            engines = [*engines_of(sampler).values()]
            loads = [engine.load for engine in engines]
            busy = sum(loads) / (len(loads) * max(loads))
            os.kill(engines[0].child.pid, signal.SIGKILL)
        answers.append(answer)
    return grouped(answers, len(prompts), HOW.group_size), busy


def equal(found: Groups, expected: Groups) -> float:
    """The share of answers that are the same, token by token."""
    pairs = [
        (one.output_ids_T, other.output_ids_T)
        for rollouts, others in zip(found, expected, strict=True)
        for one, other in zip(rollouts, others, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)


def learning_difference(policy: Policy, prompts: list[Prompt], rollouts: Groups) -> float:
    grades = tuple(map(Grade, REWARDS))
    groups = [Group(one, several, grades) for one, several in zip(prompts, rollouts, strict=True)]
    move(policy, seed=5)
    start = [parameter.detach().clone() for parameter in policy.trainable]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            began = time.perf_counter()
            launch(learn, Path(folder), groups, start, ranks=ranks)
            print(f"{ranks} ranks: {time.perf_counter() - began:.1f} s for {STEPS * UPDATES} updates")
        one, two = (torch.load(Path(folder, f"{ranks}.pt")) for ranks in (1, 2))
    return relative_difference(two, one, start)


def learn(folder: Path, groups: list[Group], start: list[Tensor]) -> None:
    """Be one rank: the first writes the adapter that it has learned, and ends the others."""
    torch.set_num_threads(1)
    world = World.join(600)
    if world.rank > 0:
        follow(world)
    entry, cache = Registry.load(None).get(MODEL), Settings().model_cache
    settings = learning_settings()
    model = Model(MODEL, entry, cache, settings, seed=0, checkpointed=False, sampled=False)
    with loading(world, LoadModel(model, "cpu", 1, token_budget=512, response_schema="")):
        policy, _ = load_checked(model, "cpu", 1, world)
    with torch.no_grad():
        for parameter, value in zip(policy.trainable, start, strict=True):
            parameter.copy_(value)
    trainer = PeftTrainer(policy, settings, token_budget=512, world=world if world.size > 1 else None)
    for _ in range(STEPS):
        for group in groups:
            trainer.add(group)
        trainer.step()
    torch.save([parameter.detach() for parameter in policy.trainable], folder / f"{world.size}.pt")
    os._exit(process.ENDED)


def learning_settings() -> Resolved:
    advanced = {
        "lora": {"rank": 16, "alpha": 32},
        "optimizer": {"updates_per_batch": UPDATES, "max_grad_norm": 1e9},
    }
    asked = Hyperparameters.model_validate({"advanced": advanced})
    return resolve(asked, rows=len(TOPICS), parameters=135_000_000, context=512)


def relative_difference(found: list[Tensor], expected: list[Tensor], start: list[Tensor]) -> float:
    apart = torch.cat([(one - other).flatten() for one, other in zip(found, expected, strict=True)])
    moved = torch.cat([(one - other).flatten() for one, other in zip(expected, start, strict=True)])
    return float(apart.double().norm() / moved.double().norm())


if __name__ == "__main__":
    main()
