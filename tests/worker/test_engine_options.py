"""The options of vLLM on each device and for each kind of engine. Needs no vLLM."""

import asyncio
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from worker.engine.names import PLUGIN
from worker.engine.options import (
    EngineConfig,
    engine_options,
    environment,
    fleet_options,
    server_options,
)
from worker.engine.routes import Routes
from worker.model.engine_sizes import BATCHED_TOKENS, SEQUENCES, EngineSizes

# vLLM's own choice depends on the device, on the memory of the GPU or on who starts the engine.
DEPENDENT = {
    "max_num_seqs",
    "max_num_batched_tokens",
    "async_scheduling",
    "enable_chunked_prefill",
    "enforce_eager",
    "optimization_level",
    "distributed_executor_backend",
    "enable_flashinfer_autotune",
    "enable_sleep_mode",
    "gpu_memory_utilization",
    "generation_config",
    "logprobs_mode",
}
Options = Callable[[EngineConfig], Mapping[str, Any]]
KINDS: dict[str, Options] = {
    "of a job": engine_options,
    "of the inference server": lambda config: server_options(config, None),
    "of a fleet": lambda config: fleet_options(config, "hermes"),
}


def config(device: str, **changes: Any) -> EngineConfig:
    usual: dict[str, Any] = {"sizes": EngineSizes(4096), "rank": 8, "kv_cache_bytes": 1 << 30, "threads": 0}
    return EngineConfig("folder", "float32", device, **usual | changes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_option_that_we_rely_on_is_left_to_the_device(kind: str, device: str) -> None:
    told = KINDS[kind](config(device))

    assert told.keys() >= DEPENDENT
    assert {name for name in DEPENDENT if told[name] is None} == set()


def test_log_probabilities_are_after_temperature_where_jobs_sample() -> None:
    modes = {kind: options(config("cuda"))["logprobs_mode"] for kind, options in KINDS.items()}

    assert modes == {
        "of a job": "processed_logprobs",
        "of the inference server": "raw_logprobs",
        "of a fleet": "processed_logprobs",
    }


def test_a_prompt_fits_into_one_step_on_a_cpu() -> None:
    """A generator on a CPU cannot be turned back, which vLLM does for a prompt that it computes in two steps."""
    for context in (128, 10_000):
        told = engine_options(config("cpu", sizes=EngineSizes(context)))
        assert told["max_num_batched_tokens"] >= max(context, BATCHED_TOKENS[0])
        assert told["enable_chunked_prefill"] is False


@pytest.mark.parametrize("is_server", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_engine_compiles_a_sampler_that_no_request_uses(
    device: str, is_server: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be compiled for a minute when the engine starts."""
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")

    assert environment(config(device), is_server=is_server)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def documented() -> dict[str, tuple[str, str]]:
    """The last two columns of the table in docs/explain/engines.md, by option: set on a CPU, set on a GPU."""
    text = (Path(__file__).parents[2] / "docs/explain/engines.md").read_text()
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    found = {}
    for row in rows:
        name = re.search(r"`([A-Za-z_0-9]+)`", row[0])
        if len(row) == 5 and name:
            cpu, gpu = (cell.strip().replace("`", "") for cell in row[3:])
            found[name[1]] = (cpu, cpu if gpu == "the same" else gpu)
    return found


# In the words of the table: what is not a number or a switch.
WORDS: dict[str, tuple[str, str]] = {
    "max_model_len": (
        "the longest prompt and answer of a job, the model's context in servers",
        "the same of a job, rounded up; the model's context in servers",
    ),
    "max_num_seqs": (
        f"{SEQUENCES[0]}",
        "by the memory plan: " + ", ".join(f"{size:,}" for size in SEQUENCES),
    ),
    "max_num_batched_tokens": (
        "the context, at least 2,048",
        "by the memory plan: {:,} or {:,}; {:,} in servers".format(*BATCHED_TOKENS, BATCHED_TOKENS[-1]),
    ),
    "distributed_executor_backend": (
        "uni with one worker, else mp; vLLM's server always has mp",
        "uni with one worker, else mp",
    ),
    "block_size": ("32", "vLLM's"),
    "fuse_allreduce_rms": ("vLLM's", "off"),
    "VLLM_USE_V2_MODEL_RUNNER": ("first", "vLLM's"),
    "VLLM_USE_FLASHINFER_SAMPLER": ("PyTorch", "PyTorch and Triton"),
    "enable_chunked_prefill": ("off: seeds need whole prompts", "on"),
    "logprobs_mode": (
        "processed_logprobs for jobs and fleets, raw_logprobs in the inference server",
        "processed_logprobs for jobs and fleets, raw_logprobs in the inference server",
    ),
    "generation_config": ("vllm: none", "vllm: none"),
    "gpu_memory_utilization": ("0.01, with an exact cache", "0.01, with an exact cache"),
}


def shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def test_the_table_of_options_says_what_is_set() -> None:
    table = documented()
    cpu, gpu = (engine_options(config(device)) for device in ("cpu", "cuda"))
    plain = table.keys() - WORDS.keys()

    assert table.keys() >= DEPENDENT - {"enable_sleep_mode"}
    assert {name: table[name] for name in plain} == {
        name: (shown(cpu[name]), shown(gpu[name])) for name in plain
    }
    assert {name: table[name] for name in WORDS} == WORDS


def test_the_words_of_the_table_are_what_is_set() -> None:
    cpu, gpu = (engine_options(config(device)) for device in ("cpu", "cuda"))
    apart = [engine_options(config(device, tensor_parallel=2)) for device in ("cpu", "cuda")]
    environments = [environment(config(device)) for device in ("cpu", "cuda")]

    assert (cpu["max_num_batched_tokens"], cpu["max_num_seqs"]) == (4096, SEQUENCES[0])
    planned = config("cuda", sizes=EngineSizes(6144, 1024, 8192))
    for told in (engine_options(planned), server_options(planned, None), fleet_options(planned, None)):
        assert (told["max_model_len"], told["max_num_seqs"], told["max_num_batched_tokens"]) == (
            6144,
            1024,
            8192,
        )
    assert (cpu["block_size"], gpu.get("block_size")) == (32, None)
    assert gpu["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    assert {one["distributed_executor_backend"] for one in (cpu, gpu)} == {"uni"}
    assert {one["distributed_executor_backend"] for one in apart} == {"mp"}
    assert [one.get("VLLM_USE_V2_MODEL_RUNNER") for one in environments] == ["0", None]
    assert {one["VLLM_USE_FLASHINFER_SAMPLER"] for one in environments} == {"0"}
    assert {one["generation_config"] for one in (cpu, gpu)} == {"vllm"}
    assert {one["gpu_memory_utilization"] for one in (cpu, gpu)} == {0.01}


def test_a_foreign_server_of_this_environment_gets_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `app.state` has nothing of what they read."""
    monkeypatch.delenv("REGRAFT_ENGINE", raising=False)
    [entry] = entry_points(group="vllm.endpoint_plugins", name=PLUGIN)
    plugin = entry.load()()
    app = FastAPI(routes=[])

    plugin.attach_router(app)
    asyncio.run(plugin.init_state(None, app.state, Namespace()))

    assert plugin.name == PLUGIN and not plugin.required_tasks
    assert not any(getattr(route, "path", "").startswith("/regraft") for route in app.routes)


def test_a_server_of_ours_gets_its_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(config("cpu")).items():
        monkeypatch.setenv(name, value)
    [entry] = entry_points(group="vllm.endpoint_plugins", name=PLUGIN)

    assert isinstance(entry.load()(), Routes)
