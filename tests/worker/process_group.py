"""A world of several processes on this machine, of which the test is rank 0."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._C._distributed_c10d import FileStore

from worker.learn.world import World


@contextmanager
def followed(folder: Path, size: int) -> Iterator[World]:
    """A process group whose other ranks follow until the context ends (tests/worker/follower.py)."""
    path = folder / "store"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else dict(os.environ)
    program = [sys.executable, "-m", "tests.worker.follower", str(os.getpid()), str(path)]
    followers = [
        subprocess.Popen(
            [*program, str(rank), str(size)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for rank in range(1, size)
    ]
    with World.join(600, FileStore(str(path), size), rank=0, size=size) as world:
        yield world
    for rank, follower in enumerate(followers, start=1):
        said, _ = follower.communicate(timeout=60)
        assert said.decode() == f"rank {rank} has followed to the end\n"
