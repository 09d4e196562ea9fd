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

from worker.engine.options import EngineConfig, environment, sampling_options
from worker.engine.protocol import AdapterBytes, AnswerRequest, GroupRequest, pack_ids, unpack_ids
from worker.engine.stepped import SamplingEngine
from worker.model.engine_sizes import EngineSizes

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
        sizes=EngineSizes(512),
        rank=adapter_config["r"],
        kv_cache_bytes=1 << 24,
        threads=1,
        tensor_parallel=TENSOR_PARALLEL,
    )
    os.environ |= environment(config)
    engine = SamplingEngine(config)
    requests = tuple(
        GroupRequest(
            "",
            pack_ids(ids),
            (AnswerRequest(str(number), seed, task["max_tokens"]),),
            1.0,
            tuple(task["stop_ids"]),
        )
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
    engine.put(adapter, 1)
    for request in requests:
        engine.add(request.answers[0].id, prompt_of(request), params_of(request))
    result = Result(
        from_disk=from_disk,
        in_memory=answers(engine, requests),
        workers=[child.pid for child in multiprocessing.active_children() if child.pid is not None],
    )
    print(json.dumps(result), flush=True)  # noqa: T201 - a script: the test reads what it prints
    sys.stdin.read()


def add_with_adapter_of(engine: SamplingEngine, folder: Path, requests: tuple[GroupRequest, ...]) -> None:
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("disk", 2, str(folder))
    for request in requests:
        engine.vllm.add_request(
            request.answers[0].id, prompt_of(request), params_of(request), lora_request=adapter
        )


def prompt_of(request: GroupRequest) -> Any:
    return {"type": "token", "prompt_token_ids": list(unpack_ids(request.prompt))}


def params_of(request: GroupRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **sampling_options(request, request.answers[0]), output_kind=RequestOutputKind.FINAL_ONLY
    )


def answers(engine: SamplingEngine, requests: tuple[GroupRequest, ...]) -> list[list[int]]:
    finished: dict[str, list[int]] = {}
    while engine.busy:
        finished |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    return [finished[request.answers[0].id] for request in requests]


if __name__ == "__main__":
    main()
