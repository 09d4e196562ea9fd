"""Measure a job's own vLLM engine with its process beside the same engine without HTTP, frames and rollouts.

A tiny random model, whose steps take so little that whatever is around them weighs most: with a real model the ratios
are nearer to 1. Each side runs in a separate process, one after the other: `process` is the sampler of a job with its
own engine, `bare` is vLLM's engine stepped by a loop. Both sample the same answers at once, and the first batch
warms up and is not counted.

`tokens_ratio` is tokens a second of `process` over those of `bare`, and `start_ratio` its seconds until the engine is
loaded over those of `bare`. `wire_us_per_token` is packing and reading a frame, and `wire_share` the part of the
`process` side's time that it takes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import report
from bench.sizes import FORWARDED, sized
from core.registry import BaseModelEntry
from tests.tiny import make_tiny_model
from worker.engine.options import environment, sampling_options
from worker.engine.protocol import (
    AnswerFrame,
    FrameReader,
    GroupRequest,
    pack,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from worker.engine.stepped import SamplingEngine
from worker.model.policy import Policy, load_base
from worker.packages import vllm_version
from worker.sampling import Sampling
from worker.sampling.own import OwnEngines
from worker.sampling.vllm import VllmSampler, group_of_prompt, with_own_engines
from worker.sampling.weights import adapter_of
from worker.types import Prompt

PROMPTS, GROUP, TOKENS, ROUNDS = sized((16, 16, 128, 5), (2, 2, 8, 1))
HOW = Sampling(GROUP, 1.0, TOKENS, job_seed=0, step=0)
ROWS = [Prompt(line, tuple(range(10, 26 + line)), {}) for line in range(PROMPTS)]
FRAME_TOKENS, FRAMES = 4096, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES)
    side = parser.parse_args().side
    if vllm_version() is None:
        raise SystemExit("bench.engine needs vLLM, which is not installed")
    if side:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(SIDES[side](sampler_of(Path(folder)))))
        return
    process, bare = map(measured, SIDES)
    wire = wire_seconds()
    report(
        "engine",
        {
            "tokens_ratio": process["tokens_per_second"] / bare["tokens_per_second"],
            "start_ratio": process["start_seconds"] / bare["start_seconds"],
            "wire_us_per_token": wire * 1e6,
            "wire_share": wire * process["tokens_per_second"],
        },
    )


def measured(side: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.engine", "--side", side, *FORWARDED]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=one_thread)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(side, found, flush=True)
    return found


def sampler_of(folder: Path) -> VllmSampler:
    """A sampler whose engine has not started."""
    entry = BaseModelEntry(path=make_tiny_model(folder, head_dim=32), dtype="float32", context=512)
    policy = Policy(load_base("tiny", entry, folder, "cpu"), rank=4, alpha=8, seed=0)
    policy.stop_ids = frozenset()  # every answer runs to its full length
    return with_own_engines(policy, kv_cache_bytes=1 << 28, threads=1)


def timed(batch: Callable[[], int]) -> dict[str, float]:
    """`batch` samples all answers and returns their tokens."""
    batch()
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        tokens = batch()
        rates.append(tokens / (time.perf_counter() - start))
    return {"tokens_per_second": statistics.median(rates)}


def of_process(sampler: VllmSampler) -> dict[str, float]:
    start = time.perf_counter()
    list(sampler.answers(ROWS[:1], Sampling(1, 1.0, 1, job_seed=0, step=0)))
    started = {"start_seconds": time.perf_counter() - start}
    figures = timed(lambda: sum(len(one.rollout.output_ids_T) for one in sampler.answers(ROWS, HOW)))
    sampler.close()
    return started | figures


def of_bare(sampler: VllmSampler) -> dict[str, float]:
    policy = sampler.policy
    assert isinstance(sampler.engines, OwnEngines)
    config = sampler.engines.config
    os.environ.update(environment(config))
    start = time.perf_counter()
    engine = SamplingEngine(config)
    engine.put(adapter_of(policy, policy.adapter(), "mem://policy/v1"), 1)
    groups = [group_of_prompt(policy, HOW, place, prompt) for place, prompt in enumerate(ROWS)]
    started = {"start_seconds": time.perf_counter() - start}
    return started | timed(lambda: stepped(engine, groups))


def stepped(engine: SamplingEngine, groups: list[GroupRequest]) -> int:
    from vllm import SamplingParams

    for group in groups:
        prompt = {"type": "token", "prompt_token_ids": list(unpack_ids(group.prompt))}
        for answer in group.answers:
            engine.add(answer.id, dict(prompt), SamplingParams(**sampling_options(group, answer)))
    tokens = 0
    while engine.busy:
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
    return tokens


def wire_seconds() -> float:
    """Of one token of a long answer, packed and read."""
    ids, logprobs = tuple(range(FRAME_TOKENS)), (-0.5,) * FRAME_TOKENS
    start = time.perf_counter()
    for _ in range(FRAMES):
        [read] = FrameReader().feed(
            pack(AnswerFrame("0/0", pack_ids(ids), pack_logprobs(logprobs), "length"))
        )
        assert isinstance(read, AnswerFrame)
        assert (unpack_ids(read.ids), unpack_logprobs(read.logprobs)) == (ids, logprobs)
    return (time.perf_counter() - start) / FRAMES / FRAME_TOKENS


SIDES = {"process": of_process, "bare": of_bare}

if __name__ == "__main__":
    main()
