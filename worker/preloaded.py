"""Modules that a process has imported when it is forked (worker/forking.py): torch, and the code of runs and inference.

No import here may start a thread or use a GPU: neither works after a fork (tests/worker/test_forking.py).
"""

import os

from worker import process

os.environ.update(process.quiet_environment())
with process.importing():
    import worker.assemble
    import worker.offline.assemble
    import worker.record.recorder
    import worker.serve.server  # noqa: F401
