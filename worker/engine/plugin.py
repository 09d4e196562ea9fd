"""Our general plugin of vLLM, which loads it in each of its processes by an entry point of pyproject.toml.

regraft_server/vllm_plugin.py calls it in processes of our engines. routes.py has the plugin for vLLM's HTTP server, and
worker_class.py the patches that its workers need. Every process pays for what is imported here.
"""

import logging
import multiprocessing

from worker import process
from worker.engine import errors
from worker.engine.names import THOUGHTS


def register() -> None:
    """Prepare one of vLLM's processes: its server, its engine or a worker."""
    # vLLM does not end all of its processes when one is killed: a worker would wait for another one for ever.
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        process.die_with_parent(parent.pid)  # by its own number: it may be dead already
    errors.write_errors_of(logging.getLogger("vllm"))
    from vllm.reasoning import ReasoningParserManager

    ReasoningParserManager.register_lazy_module(THOUGHTS, "worker.engine.thoughts", "TaggedThoughts")
