"""An engine whose layers are divided between two processes. Run as a script, because vLLM changes its process.

Reads a Task as JSON from a line of the standard input. Samples it with the adapter as vLLM itself loads it from its
folder, and once more with the adapter sent in memory, and prints a Result. Then it waits until it is killed.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, TypedDict

from worker.rollout.samplers.engine import SamplingEngine, environment, sampling_options
from worker.rollout.samplers.wire import AdapterBytes, EngineConfig, Request, SampleBatch

TENSOR_PARALLEL = 2


class Task(TypedDict):
    source: str
    adapter: str  # the folder
    prompts: list[tuple[list[int], int]]  # tokens and seed
    max_tokens: int
    stop_ids: list[int]


class Result(TypedDict):
    from_disk: list[list[int]]
    in_memory: list[list[int]]
    workers: list[int]  # process ids


def main() -> None:
    task: Task = json.loads(sys.stdin.readline())
    folder = Path(task["adapter"])
    adapter_config = json.loads((folder / "adapter_config.json").read_text())
    config = EngineConfig(
        source=task["source"],
        dtype="float32",
        device="cpu",
        context=512,
        rank=adapter_config["r"],
        kv_cache_bytes=1 << 24,
        threads=1,
        tensor_parallel=TENSOR_PARALLEL,
    )
    os.environ |= environment(config)
    engine = SamplingEngine(config)
    requests = tuple(
        Request(number, 0, tuple(ids), seed, 1.0, task["max_tokens"], tuple(task["stop_ids"]), "")
        for number, (ids, seed) in enumerate(task["prompts"])
    )
    add_with_adapter_of(engine, folder, requests)
    from_disk = answers(engine, requests)
    adapter = AdapterBytes(
        namespace="mem://1",
        tensors=(folder / "adapter_model.safetensors").read_bytes(),
        rank=adapter_config["r"],
        alpha=adapter_config["lora_alpha"],
        modules=tuple(adapter_config["target_modules"]),
    )
    engine.start(SampleBatch(adapter, requests))
    result = Result(
        from_disk=from_disk,
        in_memory=answers(engine, requests),
        workers=[child.pid for child in multiprocessing.active_children() if child.pid is not None],
    )
    print(json.dumps(result), flush=True)  # noqa: T201 - a script: the test reads what it prints
    sys.stdin.read()


def add_with_adapter_of(engine: SamplingEngine, folder: Path, requests: tuple[Request, ...]) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    for request in requests:
        params = SamplingParams(**sampling_options(request), output_kind=RequestOutputKind.FINAL_ONLY)
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        engine.vllm.add_request(request.id, prompt, params, lora_request=LoRARequest("disk", 2, str(folder)))


def answers(engine: SamplingEngine, requests: tuple[Request, ...]) -> list[list[int]]:
    finished: dict[str, list[int]] = {}
    while engine.busy:
        finished |= {one.id: list(one.output_ids_T) for one in engine.step().finished}
    return [finished[request.id] for request in requests]


if __name__ == "__main__":
    main()
