"""The class of our methods for vLLM's workers in an engine whose adapters are on experts, too.

As worker_class.py, but vLLM allocates slots for experts, and its own function says which kernels have adapters.
"""

from vllm.lora import model_manager
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from worker.engine.extension import linear_layers_and_experts
from worker.engine.worker_class import SamplingWorker, supports_adapters

__all__ = ["SamplingWorker"]

model_manager.get_supported_lora_modules = linear_layers_and_experts
unquantized._trtllm_bf16_lora_supported = supports_adapters
