"""What we use of vLLM that it does not promise to keep. Run as a script: prints what a new version has changed.

What differs between its two model runners is in test_vllm_runners.py.

A script, because importing vLLM rearranges the threads and the environment of the process that does.
"""

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, get_args

import torch
from vllm import SamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.logprobs import FlatLogprobs
from vllm.lora import model_manager
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models.registry import ModelRegistry
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GpuWorker
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from worker.engine import extension, worker_class
from worker.engine.options import (
    EngineConfig,
    engine_options,
    fleet_options,
    sampling_options,
    server_options,
)
from worker.engine.protocol import AnswerRequest, GroupRequest
from worker.model import experts
from worker.model.engine_sizes import RANKS, EngineSizes
from worker.model.expert_files import FUSED_IN_VLLM, PerExpert

TAKES = {
    LLMEngine.add_request: ["request_id", "prompt", "params", "lora_request"],
    LLMEngine.abort_request: ["request_ids", "internal"],
    LLMEngine.collective_rpc: ["method", "args"],
    LLMEngine.from_engine_args: ["engine_args"],
    LLMEngine.reset_prefix_cache: ["reset_running_requests"],
    GPUModelRunner.reload_weights: ["weights_iterator"],
    LLMEngine.sleep: ["level"],
    LLMEngine.step: [],
    LLMEngine.wake_up: [],
    LLMEngine.has_unfinished_requests: [],
    LoRAModel.from_lora_tensors: [
        *["lora_model_id", "tensors", "peft_helper", "device", "dtype", "model_vocab_size", "weights_mapper"]
    ],
    safe_apply_chat_template: [
        "model_config",
        "tokenizer",
        "conversation",
        "tools",
        "chat_template",
        "tokenize",
    ],
    PEFTHelper.from_dict: ["config_dict"],
    PEFTHelper.validate_legal: ["lora_config"],
    LRUCacheLoRAModelManager.remove_adapter: ["adapter_id"],
    LRUCacheLoRAModelManager.add_adapter: ["lora"],
    LRUCacheLoRAModelManager.activate_adapter: ["lora_id"],
    LRUCacheLoRAModelManager.pin_adapter: ["lora_id"],
    PunicaWrapperCPU.add_lora_linear: [
        *["y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"]
    ],
}
MENTIONS = {
    HfRenderer: "self._apply_chat_template_async(",
    OutputProcessor: "self.request_states",
    LRUCacheWorkerLoRAManager: "self._adapter_manager = ",
    LoRAModelManager: "self.model",
    LoRAModelManager.__init__: "self.supported_lora_modules = get_supported_lora_modules(self.model)",
    unquantized.select_unquantized_moe_backend: "if _trtllm_bf16_lora_supported(moe_config):",
    LoRAModelManager.set_adapter_mapping: "self._last_mapping != mapping",
    GpuWorker.reload_weights: "self.model_runner.reload_weights(*args, **kwargs)",
    UnquantizedEmbeddingMethod.process_weights_after_loading: "dispatch_cpu_unquantized_gemm(layer,",
    dispatch_cpu_unquantized_gemm: "layer.cpu_linear = ",
    ParallelLMHead.tie_weights: "self.quant_method.tie_weights(self, embed_tokens)",
    layerwise: "logger = init_logger(__name__)",
    GpuWorker.load_model: '_maybe_get_memory_pool_context(tag="weights")',
    GpuWorker.sleep: "self.sleep_mode_backend.suspend(level)",
    LoRAModelRunnerMixin: "self.lora_manager = ",
    _gen_lora_extra_hash_keys: "lora_request.lora_path",
    LoRAModelManager._create_lora_modules: "self._register_packed_modules(module_name)",
    LoRAModelManager._register_packed_modules: "self.packed_modules[module_full_name] = [",
}


def changed() -> Iterator[str]:
    for attribute in ("self.lora_config", "self.vocab_size"):
        if attribute not in inspect.getsource(WorkerLoRAManager):
            yield f"WorkerLoRAManager no longer has {attribute}"
    for function, names in TAKES.items():
        if missing := [name for name in names if name not in inspect.signature(function).parameters]:
            yield f"{function.__qualname__} no longer takes {missing}"
    for thing, words in MENTIONS.items():
        if words not in inspect.getsource(thing):
            yield f"{thing.__name__} no longer has {words!r}"
    known = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    http = {f.name for f in dataclasses.fields(FrontendArgs)}
    for config in (
        EngineConfig("", "float32", "cpu", EngineSizes(16), 8, 1, 1),
        EngineConfig("", "bfloat16", "cuda", EngineSizes(16), 8, 1, 0, tensor_parallel=2, sleeps=True),
        EngineConfig("", "bfloat16", "cuda", EngineSizes(16), 0, 1, 0),
    ):
        if unknown := set(engine_options(config)) - known:
            yield f"EngineArgs no longer takes {unknown}"
        for options in (server_options(config, "hermes"), fleet_options(config, None)):
            if unknown := set(options) - known - http:
                yield f"vLLM's server no longer takes {unknown}"
    options = sampling_options(GroupRequest("", b"", (), 1.0, ()), AnswerRequest("", 0, 1))
    if unknown := set(options) - set(SamplingParams.__struct_fields__):
        yield f"SamplingParams no longer takes {unknown}"
    if unknown := {"lora_name", "lora_int_id", "lora_path"} - set(LoRARequest.__struct_fields__):
        yield f"LoRARequest no longer takes {unknown}"
    if ranks := set(RANKS) - set(get_args(MaxLoRARanks)):
        yield f"max_lora_rank may no longer be {ranks}"
    if not hasattr(FlatLogprobs(), "logprobs"):
        yield "FlatLogprobs has no logprobs"
    if model_manager.get_supported_lora_modules is not extension.linear_layers:
        yield "workers allocate slots for embeddings, head and experts"
    if unquantized._trtllm_bf16_lora_supported is not worker_class.experts_without_adapters:
        yield "workers may choose a kernel that fails for experts without slots"
    yield from changed_for_experts()
    gap = difference_of_the_linears()
    if gap > 1e-5:
        yield f"one_adapter_linear differs from PunicaWrapperCPU.add_lora_linear by {gap}"


def changed_for_experts() -> Iterator[str]:
    """What vLLM no longer reads as worker/model/expert_files.py writes it."""
    if differs := fused_architectures() ^ FUSED_IN_VLLM:
        yield f"the adapters of experts of {sorted(differs)} have another layout"
    layout = PerExpert("gate_proj", "up_proj", "down_proj", 2, "", "")
    config = {"r": 8, "lora_alpha": 16, "target_modules": []}
    name = "model.layers.0.mlp.experts"
    for ranks, layer in (
        (layout.ranks(2), f"{name}.1.up_proj"),
        (experts.rank_pattern(2), f"{name}.base_layer"),
        (experts.rank_pattern(2), name),
    ):
        found = PEFTHelper.from_dict(config | {"rank_pattern": ranks}).get_rank_and_scaling(layer)
        if found != (2, 8.0):
            yield f"the rank and the scale of {layer} are {found}"


FUSED_FLAG = "is_3d_moe_weight"


def fused_architectures() -> set[str]:
    """The architectures whose class has `is_3d_moe_weight`, by itself or from a base class.

    Their sources are read: to import all of them takes minutes, and some need packages that we do not install.
    """
    models, found, fused = ModelRegistry.models, set[str](), {FUSED_FLAG}
    while True:
        more = {
            architecture
            for architecture, model in models.items()
            if architecture not in found and model.class_name in _fused_classes(model.module_name, fused)
        }
        if not more:
            return found
        found |= more
        fused |= {models[architecture].class_name for architecture in more}


def _fused_classes(module: str, fused: set[str]) -> set[str]:
    """The classes of a module that set the flag, or have a base with it.

    Args:
        fused: the flag, and the names of classes of other modules that have it.
    """
    text = _source(module)
    if not any(name in text for name in fused):
        return set()
    found = set(fused)
    for defined in ast.parse(text).body:
        if isinstance(defined, ast.ClassDef):
            own = {one.target.id: one.value for one in defined.body if _is_named(one)}
            bases = {ast.unparse(base) for base in defined.bases}
            flag = own.get(FUSED_FLAG)
            if bases & found if flag is None else ast.literal_eval(flag):
                found.add(defined.name)
    return found


def _is_named(statement: ast.stmt) -> TypeGuard[Any]:
    return isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)


@cache
def _source(module: str) -> str:
    origin = getattr(importlib.util.find_spec(module), "origin", None)
    return "" if origin is None else Path(origin).read_text()


def difference_of_the_linears() -> float:
    """Ours and vLLM's on the same packed layer (three slices of unequal width), all rows with the one adapter."""
    rows, width, rank, slices = 5, 12, 4, (8, 4, 4)
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    y = torch.randn(rows, sum(slices))
    a = tuple(torch.randn(1, 1, rank, width) for _ in slices)
    b = tuple(torch.randn(1, 1, out, rank) for out in slices)
    punica: Any = PunicaWrapperCPU(rows, rows, "cpu")
    punica.is_prefill = False
    punica._token_lora_indices = torch.zeros(rows, dtype=torch.int64)
    punica.indices_len = [rows] * 5
    theirs, ours = y.clone(), y.clone()

    PunicaWrapperCPU.add_lora_linear(punica, theirs, x, a, b, 0.5, slices)
    extension.one_adapter_linear(punica, ours, x, a, b, 0.5, slices)

    return (theirs - ours).abs().max().item()


if __name__ == "__main__":
    for line in changed():
        print(line)  # noqa: T201 - a script: the test reads what it prints
