"""A rank above 0, as `python -m tests.worker.follower PARENT STORE RANK SIZE`: follows until rank 0 leaves."""

import sys

import torch
from torch._C._distributed_c10d import FileStore

from worker import process
from worker.training.distributed import follow
from worker.training.world import BrokenWorld, World


def main() -> None:
    parent, path, rank, size = sys.argv[1:]
    process.die_with_parent(int(parent))
    torch.set_num_threads(1)
    with World.join(600, FileStore(path, int(size)), rank=int(rank), size=int(size)) as world:
        try:
            follow(world)
        except BrokenWorld:
            sys.stderr.write(f"rank {rank} has followed to the end\n")


if __name__ == "__main__":
    main()
