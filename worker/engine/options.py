"""vLLM's options and environment: everything of it that we rely on, set here and nowhere else.

Many of vLLM's defaults depend on the device, on the memory of the GPU or on who starts the engine. An option that we
rely on is therefore set, also to its default; docs/explain/engines.md has the table.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from regraft_server.vllm_plugin import ENGINE
from worker.engine.names import PLUGIN, THOUGHTS
from worker.engine.protocol import AnswerRequest, GroupRequest
from worker.model.engine_sizes import EngineSizes, slot_rank


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of the engine. `source` is the folder (or hub id) of the trainer's weights."""

    source: str
    dtype: str
    device: str  # cpu | cuda
    sizes: EngineSizes
    rank: int  # of the adapter; 0: there is none, and weights come from files
    kv_cache_bytes: int  # of each process
    threads: int  # of torch, on a CPU; 0 leaves torch's own choice
    tensor_parallel: int = 1  # processes that share each layer
    gpus: tuple[str, ...] = ()  # their GPUs, as in CUDA_VISIBLE_DEVICES; () leaves it as it is
    sleeps: bool = False  # between sampling; a CPU has no memory to release
    continues: bool = False  # answers in flight may continue with another adapter
    experts: bool = False  # the adapter is on experts, too

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """From what `dataclasses.asdict` made of one, in JSON."""
        return cls(**{**row, "sizes": EngineSizes(**row["sizes"]), "gpus": tuple(row["gpus"])})


ADAPTERS_AT_ONCE = 8  # of a server, in one batch, each in a slot of the device's memory
ADAPTERS_IN_MEMORY = 64  # of the machine
FLEET_ADAPTERS_IN_MEMORY = 16

# Of every process with an engine, before its first import of vLLM.
EVERYWHERE = {
    "VLLM_PLUGINS": PLUGIN,  # and no other of the environment
    ENGINE: "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Every request has a seed, and no request with a seed is sampled by FlashInfer. Its sampler would only be compiled
    # when the engine starts, with a compiler that may not be installed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # A forked worker would keep this process's socket open, and the run would not see that the engine has ended.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
ON_CPU = {
    # Left to itself vLLM wants a NUMA node for each worker, and binds several engines to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Or a CPU with AMX quantizes the activations of layers with 4-bit weights, too.
    "VLLM_CPU_INT4_W4A8": "0",
    # On a GPU vLLM takes the second version of its model runner, unless the model needs the first.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
# Of an engine behind vLLM's own HTTP server.
BEHIND_HTTP = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # or vLLM resolves no adapter
    # A required call is held to the schema of its arguments by llguidance, which has checked the schema. vLLM's
    # structural tags need xgrammar, which the API does not check schemas with.
    "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
}


def environment(config: EngineConfig, *, is_server: bool = False) -> dict[str, str]:
    """The environment of an engine's process."""
    fixed = EVERYWHERE | (BEHIND_HTTP if is_server else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    fixed |= ON_CPU if config.device == "cpu" else {}
    fixed |= {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    fixed |= {"CUDA_VISIBLE_DEVICES": ",".join(config.gpus)} if config.gpus else {}
    return {"VLLM_LOGGING_LEVEL": "WARNING"} | dict(os.environ) | fixed


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """vLLM's EngineArgs for a job's own engine."""
    return {
        "model": config.source,
        "dtype": config.dtype,
        "max_model_len": config.sizes.context,
        "max_num_seqs": config.sizes.sequences,
        **(_adapter_options(config) if config.rank else {}),
        # The exact size, because the trainer uses the same device. vLLM then uses the share only to check at start-up
        # that this much memory is free, so it is close to 0.
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "gpu_memory_utilization": 0.01,
        # A model's own generation_config would change what we sample from, unseen by the trainer.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        # By the same library as the trainer and the other sampler, so that all three allow the same tokens.
        "structured_outputs_config": {"backend": "guidance"},
        "enable_flashinfer_autotune": False,  # it would tune, and compile, whenever an engine starts
        "disable_log_stats": True,
        "worker_extension_cls": f"worker.engine.{_worker_module(config)}.SamplingWorker",
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else "uni",
        **(_cpu_options(config) if config.device == "cpu" else _gpu_options(config)),
    }


def _worker_module(config: EngineConfig) -> str:
    """The module of our methods for vLLM's workers: without experts, vLLM allocates no slots for these."""
    return "worker_class_with_experts" if config.experts else "worker_class"


def _adapter_options(config: EngineConfig) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": slot_rank(config.rank),
    }


def _cpu_options(config: EngineConfig) -> dict[str, Any]:
    return {
        # Only whole blocks are shared in a group. Left to itself vLLM takes 128 here, more than most prompts have.
        "block_size": 32,
        "enforce_eager": True,  # compiling takes longer than it saves
        "optimization_level": 0,
        "async_scheduling": False,
        # A prompt cut in two discards a sampled token, and vLLM then turns the request's generator back, which a
        # generator on a CPU refuses ("CPU Generator does not use offset"). So a prompt has to fit into one step.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.sizes.context, config.sizes.batched_tokens),
        "enable_sleep_mode": False,
    }


def _gpu_options(config: EngineConfig) -> dict[str, Any]:
    return {
        "enforce_eager": False,
        "optimization_level": 2,  # torch.compile, and CUDA graphs of whole steps and of their parts
        "async_scheduling": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": config.sizes.batched_tokens,
        "enable_sleep_mode": config.sleeps,
        # FlashInfer's, with a workspace beside the memory plan.
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
    }


def server_options(config: EngineConfig, tool_parser: str | None) -> dict[str, Any]:
    """vLLM's options for its HTTP server: an engine with many adapters, in the inference server's charge.

    `tool_parser`: vLLM's name for the parser of the model's tool calls; None: it has none.
    """
    return engine_options(config) | {
        "max_loras": ADAPTERS_AT_ONCE,
        "max_cpu_loras": ADAPTERS_IN_MEMORY,
        # The model's own log-probabilities, before temperature and the rest: what both engines report.
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": False,
        "structured_outputs_config": {
            "backend": "guidance",
            # Of the schemas that vLLM makes of tools, which a small model would else fill without an end.
            "disable_any_whitespace": True,
            "disable_additional_properties": True,
            "reasoning_parser": THOUGHTS,  # of every model, by the tags in the request
        },
        # Only an inference server sets it: a user's request has no template.
        "trust_request_chat_template": True,
        "chat_template_content_format": "string",
        "enable_auto_tool_choice": tool_parser is not None,
        "tool_call_parser": tool_parser,
        "enable_prompt_tokens_details": True,
        "enable_per_request_metrics": True,
    }


def fleet_options(config: EngineConfig, tool_parser: str | None) -> dict[str, Any]:
    """vLLM's options for a member of a rollout fleet: a server with a job's log-probabilities, alone on its GPUs."""
    return server_options(config, tool_parser) | {
        "logprobs_mode": "processed_logprobs",
        "max_cpu_loras": FLEET_ADAPTERS_IN_MEMORY,
    }


def sampling_options(group: GroupRequest, answer: AnswerRequest) -> dict[str, Any]:
    """vLLM's SamplingParams. Every field that changes the distribution is set, whatever its default.

    The engine reports a greedy answer's log-probabilities at temperature 1, as the transformers sampler does.
    """
    return {
        "n": 1,
        "seed": answer.seed,
        "temperature": group.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "repetition_detection": None,
        "thinking_token_budget": None,
        "watermarking": False,
        # The policy's own stop tokens, and no others; they stay in the answer, so that ending is learned too.
        "stop": None,
        "stop_token_ids": list(group.stop_ids),
        "ignore_eos": True,
        "min_tokens": 0,
        "max_tokens": answer.max_tokens,
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": False,
    }
