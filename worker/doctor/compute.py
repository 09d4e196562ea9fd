"""`python -m worker.doctor.compute PARENT PART FILE DEVICE`: the checks that compute, each in a separate process.

It writes what it has found into the file, as JSON. An error is its exit status and the last line of stderr.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from typing import Any

import torch

from core.settings import Settings
from worker import compile_caches, process
from worker.doctor.exact import BOUNDS, SIZES, gradient_difference, logprob_difference, tiny_policy
from worker.model.batch import tensors_of
from worker.model.engine_sizes import EngineSizes
from worker.model.policy import Policy
from worker.model.token_logprobs import logprobs
from worker.sampling import Answer, Sampling, grouped
from worker.sampling.vllm import VllmSampler, with_own_engines
from worker.training.sampler_gate import BOUNDS as GAPS
from worker.types import Pack, Prompt, Rollout, TrainingSequence

REDUCED_BYTES = 64 << 20
ROUNDS = 3
CPU_RANKS = 2
COLLECTIVE_SECONDS = 60.0


def attention(device: str) -> dict[str, Any]:
    """FlexAttention against dense masks, ||difference|| / ||dense||: gradients, or on a CPU log-probabilities."""
    if device == "cpu":
        policy = tiny_policy("llama", SIZES, device, torch.float32)
        return {"float32": {"difference": logprob_difference(policy), "bound": BOUNDS[torch.float32]}}
    return {
        str(dtype).rpartition(".")[2]: {
            "difference": gradient_difference(tiny_policy("llama", SIZES, device, dtype)),
            "bound": bound,
        }
        for dtype, bound in BOUNDS.items()
    }


def collective(device: str) -> dict[str, Any]:
    """Sums of 64 MiB over all GPUs by NCCL, or over two processes by gloo."""
    size = torch.cuda.device_count() if device == "cuda" else CPU_RANKS
    context = context_of(device)
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=run_rank, args=(rank, size, device, f"{folder}/store", sender))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(COLLECTIVE_SECONDS)
        running = [rank for rank in ranks if rank.exitcode is None]
        for rank in running:
            rank.kill()
        if running:
            raise TimeoutError(f"{len(running)} of {size} ranks did not finish in {COLLECTIVE_SECONDS:.0f} s")
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError(f"exit statuses of the ranks: {[rank.exitcode for rank in ranks]}")
        seconds = receiver.recv()
    # A ring sends and receives each byte about twice, less its own share.
    rate = 2 * (size - 1) / size * REDUCED_BYTES / seconds
    return {"ranks": size, "seconds": seconds, "bytes_per_second": rate}


def context_of(device: str) -> ForkContext | SpawnContext:
    """What starts ranks. Without NVML torch counts GPUs by CUDA, which cannot be used after a fork then."""
    return multiprocessing.get_context("spawn") if device == "cuda" else multiprocessing.get_context("fork")


def run_rank(rank: int, size: int, device: str, store: str, results: Any) -> None:
    from torch._C._distributed_c10d import FileStore

    from worker.training.world import World

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    with World.join(COLLECTIVE_SECONDS, FileStore(store, size), rank=rank, size=size) as world:
        values = torch.full((REDUCED_BYTES // 4,), float(rank + 1), device=device)
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            [total] = world.sum([values])
            correct = bool((total == size * (size + 1) / 2).all())  # waits for the GPU
            times.append(time.perf_counter() - started)
            if not correct:
                raise ValueError("a sum over the ranks is wrong")
        if rank == 0:
            results.send(min(times))


# Few words, so that some answers end early while others continue, as an update in flight needs.
WRITER = {**SIZES, "vocab_size": 64}
PROMPTS, MEMBERS, LONGEST = 2, 8, 96


def engine(device: str) -> dict[str, Any]:
    """An engine with a tiny model: start, sample, replace the adapter between and during answers, sleep and wake."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bound = GAPS["bfloat16" if device == "cuda" else "float32", "dense"]
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny_policy("llama", WRITER, device, dtype, Path(folder))
        started = time.perf_counter()
        sampler = with_own_engines(
            policy,
            sizes=EngineSizes(256),
            kv_cache_bytes=(256 if device == "cuda" else 16) << 20,
            threads=1,
            sleeps=device == "cuda",
            continues=True,
            max_restarts=0,
        )
        try:
            return {"bound": bound, **tried(policy, sampler, sleeps=device == "cuda", started=started)}
        finally:
            sampler.close()


def tried(policy: Policy, sampler: VllmSampler, *, sleeps: bool, started: float) -> dict[str, Any]:
    """The gaps between the log-probabilities of engine and trainer, in nats a token, after each thing it can do."""
    prompts = [Prompt(line, tuple(range(3 + line, 43 + line)), {}) for line in range(PROMPTS)]
    figures: dict[str, Any] = {}
    move(policy, 1)
    first = grouped(sampler.answers(prompts, sampling(1)), PROMPTS, MEMBERS)
    figures["start_seconds"] = time.perf_counter() - started
    figures["gap"] = gap(policy, prompts, first)
    move(policy, 2)
    figures["pushed_gap"] = gap(
        policy, prompts, grouped(sampler.answers(prompts, sampling(2)), PROMPTS, MEMBERS)
    )
    figures |= updated_in_flight(policy, sampler, prompts)
    if sleeps:
        before = torch.cuda.mem_get_info()[0]
        sampler.sleep()
        figures["freed_bytes"] = torch.cuda.mem_get_info()[0] - before
        woken = grouped(sampler.answers(prompts, sampling(4)), PROMPTS, MEMBERS)
        figures["woken_gap"] = gap(policy, prompts, woken)
    return figures


def updated_in_flight(policy: Policy, sampler: VllmSampler, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Replace the adapter once the first answer has ended; the others continue with the new one."""
    answers = sampler.answers(prompts, sampling(3, policy_steps=0))
    first: Answer = next(answers)
    move(policy, 3)
    sampler.update_in_flight()
    groups = grouped([first, *answers], PROMPTS, MEMBERS)
    continued = sum(len(set(rollout.policy_steps_T)) == 2 for group in groups for rollout in group)
    return {"continued": continued}


def sampling(step: int, policy_steps: int | None = None) -> Sampling:
    return Sampling(MEMBERS, 1.0, LONGEST, job_seed=1, step=step, policy_steps=policy_steps)


def move(policy: Policy, seed: int) -> None:
    """Give the adapter other weights, in place, as an optimizer does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(std=0.02)


def gap(policy: Policy, prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]) -> float:
    """The mean |difference| of the log-probabilities, in nats a token."""
    packs = [
        Pack(prompt.ids, tuple(sequence_of(rollout) for rollout in rollouts))
        for prompt, rollouts in zip(prompts, groups, strict=True)
    ]
    batch = tensors_of(packs, policy.device)
    with torch.no_grad():
        return float((logprobs(policy, batch, 1.0) - batch.sampled_logp_M).abs().mean())


def sequence_of(rollout: Rollout) -> TrainingSequence:
    weights = (1.0,) * len(rollout.output_ids_T)
    return TrainingSequence(rollout.output_ids_T, rollout.logprobs_T, weights, 1.0)


PARTS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "attention": attention,
    "collective": collective,
    "engine": engine,
}


def main() -> None:
    parent, part, answer, device = sys.argv[1:]
    process.die_with_parent(int(parent))
    os.dup2(2, 1)  # what libraries and engines print is not the page
    compile_caches.place(Settings().compile_cache, os.environ)
    Path(answer).write_text(json.dumps(PARTS[part](device)))


if __name__ == "__main__":
    main()
