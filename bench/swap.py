"""Seconds from a changed policy to a vLLM engine that samples from it, by the rank of the adapter.

What a swap adds to `sample`: one answer of one token right after every weight of the adapter has changed, less the same
with nothing changed, each the median of ROUNDS taken in turn. It is all of it: packing, the socket, writing into the
engine's slot. The prompt is shorter than a block of the prefix cache, so that both compute it anew.

`files_written` counts files that are new or differ after the swaps, in every folder the two processes know of: the
data folder, and their own home, TMPDIR and working folder. `engine_bytes_written` is what the kernel says the
engine wrote to storage meanwhile.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save

from bench.models import smollm2
from bench.report import report
from bench.sizes import sized
from core.settings import Settings
from tests.own_engines import engines_of
from worker.model.policy import Policy
from worker.packages import vllm_version
from worker.sampling import Sampling
from worker.sampling.vllm import VllmSampler, with_own_engines
from worker.types import Prompt

RANKS, ROUNDS = (8, 32), sized(9, 1)
Listing = dict[Path, tuple[int, int]]


def main() -> None:
    if vllm_version() is None:
        raise SystemExit("bench.swap needs vLLM, which is not installed")
    folders = [Settings().data_dir.resolve(), Path("/dev/shm")]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders += settle_in(Path(scratch))
        assert_seen(folders)
        for rank in RANKS:
            figures |= {f"{name}_rank_{rank}": value for name, value in measure(rank, folders).items()}
    for name in ("files_written", "engine_bytes_written"):
        figures[name] = sum(figures.pop(f"{name}_rank_{rank}") for rank in RANKS)
    report("swap", figures)


def settle_in(scratch: Path) -> list[Path]:
    """Give this process and the engines it starts folders that no other process writes to."""
    os.environ["REGRAFT_DATA_DIR"] = str(Settings().data_dir.resolve())
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])  # the engine is a module of this tree
    folders = [scratch / name for name in ("home", "tmp", "work")]
    for folder in folders:
        folder.mkdir()
    os.environ["HOME"], os.environ["TMPDIR"] = str(folders[0]), str(folders[1])
    tempfile.tempdir = str(folders[1])
    os.chdir(folders[2])
    return folders


def measure(rank: int, folders: list[Path]) -> dict[str, float]:
    policy = Policy(smollm2(), rank=rank, alpha=2 * rank, seed=0)
    sampler = with_own_engines(policy, kv_cache_bytes=1 << 28, threads=torch.get_num_threads())
    try:
        for number in range(2):  # starts the engine, and lets it allocate what it keeps
            change(policy, number)
            seconds(sampler)
        pid, published = engines_of(sampler)[0].child.pid, sampler.weights.version
        before, bytes_before = listing(folders), bytes_written(pid)
        changed, same = [], []
        for number in range(ROUNDS):
            change(policy, number + 2)
            changed.append(seconds(sampler))
            same.append(seconds(sampler))
        assert sampler.weights.version == published + ROUNDS, "each change is published once"
        return {
            "swap_seconds": statistics.median(changed) - statistics.median(same),
            "sample_seconds": statistics.median(same),
            "adapter_bytes": len(save(policy.adapter())),
            "files_written": len(listing(folders).items() - before.items()),
            "engine_bytes_written": bytes_written(pid) - bytes_before,
        }
    finally:
        sampler.close()


def change(policy: Policy, seed: int) -> None:
    """Other weights, in place, as an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.normal_(std=0.01, generator=generator)


def seconds(sampler: VllmSampler) -> float:
    start = time.perf_counter()
    [_] = sampler.answers([Prompt(0, tuple(range(100, 116)), {})], Sampling(1, 1.0, 1, job_seed=0, step=0))
    return time.perf_counter() - start


def listing(folders: list[Path]) -> Listing:
    return dict(one for folder in folders for one in walk(folder))


def walk(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            yield path, (status.st_mtime_ns, status.st_size)


def assert_seen(folders: list[Path]) -> None:
    """Assert that a new file in each folder is counted."""
    before = listing(folders)
    probes = [Path.home() / "probe", Path(tempfile.gettempdir()) / "probe", Path.cwd() / "probe"]
    for probe in probes:
        probe.write_text("x")
    assert len(listing(folders).items() - before.items()) == len(probes)
    for probe in probes:
        probe.unlink()


def bytes_written(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


if __name__ == "__main__":
    main()
