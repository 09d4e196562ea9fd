"""The class of our methods for vLLM's workers. Importing it patches vLLM in this process.

Only workers import it: vLLM resolves `worker_extension_cls` in `WorkerWrapperBase.init_worker`, which each executor
calls before it loads the model. In the plugin the same imports would cost every process of vLLM seconds.
"""

from typing import Any

from vllm.lora import model_manager
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from worker.engine.extension import SamplingWorker, linear_layers

__all__ = ["SamplingWorker"]


def experts_without_adapters(config: Any) -> bool:
    """Return that FlashInfer's kernel for experts with adapters is not supported.

    In place of vLLM's own function. Adapters being on, vLLM would choose this kernel for a mixture in bfloat16 on
    Blackwell, and it fails for experts without slots. The others compute them without an adapter.
    """
    return False


model_manager.get_supported_lora_modules = linear_layers
unquantized._trtllm_bf16_lora_supported = experts_without_adapters
