"""Modules that worker/fork_server.py imports before it is forked: torch, and the code of runs and inference.

No import here may start a thread or use a GPU: neither works after a fork (tests/worker/test_forking.py).
"""

import pyarrow
from sqlalchemy.orm import configure_mappers

from worker import process

with process.importing():
    import worker.assemble
    import worker.recording.recorder
    import worker.serving.server  # noqa: F401

    # What each process would do once more: an array imports pandas where that is installed, and a query does the other.
    pyarrow.array([])
    configure_mappers()
