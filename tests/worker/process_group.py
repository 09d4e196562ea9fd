"""A world of several processes on this machine, of which the test is rank 0."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._C._distributed_c10d import FileStore

from worker import forking
from worker.training.world import World


@contextmanager
def followed(folder: Path, size: int) -> Iterator[World]:
    """A process group whose other ranks follow until the context ends (tests/worker/follower.py)."""
    path = folder / "store"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else dict(os.environ)
    program = [sys.executable, "-m", "tests.worker.follower", str(os.getpid()), str(path)]
    said = [(folder / f"said-{rank}").open("w+b") for rank in range(1, size)]
    followers = [
        forking.start([*program, str(rank), str(size)], environment, stderr=file)
        for rank, file in enumerate(said, start=1)
    ]
    with World.join(600, FileStore(str(path), size), rank=0, size=size) as world:
        yield world
    for rank, (follower, file) in enumerate(zip(followers, said, strict=True), start=1):
        follower.wait(60)
        with file:
            file.seek(0)
            assert file.read().decode().endswith(f"rank {rank} has followed to the end\n")
