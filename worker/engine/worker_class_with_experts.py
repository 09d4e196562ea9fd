"""The class of our methods for vLLM's workers in an engine whose adapters are on experts, too.

vLLM allocates slots for experts, and its own function says which kernels have adapters: see worker_class.py.
"""

from vllm.lora import model_manager

from worker.engine.extension import SamplingWorker, linear_layers_and_experts

__all__ = ["SamplingWorker"]

model_manager.get_supported_lora_modules = linear_layers_and_experts
