"""What the fork server of own_engines.py imports: vLLM, as the process of an engine on a CPU has it."""

import os
from importlib import import_module

from worker.engine.options import EVERYWHERE, ON_CPU
from worker.process import importing

# vLLM reads a part of its environment when it is imported.
os.environ.update(
    {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | EVERYWHERE | ON_CPU
)

with importing():
    for name in (
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
        "worker.engine.worker_class",
        "worker.engine.child",
    ):
        import_module(name)
