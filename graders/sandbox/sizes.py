"""The number of concurrent python graders on this host, and the memory limit of each.

Graders get at most half of the container's memory, so that they cannot cause an OOM kill of the API or a trainer.
The kernel kills them first (`oom_score_adj`), but many container runtimes kill all of a container with them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MAX_MEMORY = 2 << 30
MAX_SCRATCH = 256 << 20
# Of a grade with the largest packages of the environment: 530 MB of address space before it does anything.
MIN_SLOT = 1 << 30
# What two idle processes that have imported most of the packages take.
_IDLE_SHARE = 3 / 16
_SCRATCH_SHARE = 1 / 16


@dataclass(frozen=True)
class Sizes:
    """`slots` grades at once, each with this address space and this much in its scratch folder, in bytes."""

    slots: int
    memory: int
    scratch_bytes: int


def sizes(memory: int, cores: int) -> Sizes:
    """The sizes for a host with this many bytes of memory: at most a grade per core, and half of the memory.

    A slot gets an equal part of that half, and no less than MIN_SLOT: fewer grades run at once where there is not
    enough. Where half of the memory is less than that, there is one slot, of half.
    """
    slots = min(cores, max(1, memory // 2 // MIN_SLOT))
    slot = memory // 2 // slots
    scratch = min(MAX_SCRATCH, int(slot * _SCRATCH_SHARE))
    return Sizes(slots, min(MAX_MEMORY, slot - scratch - int(slot * _IDLE_SHARE)), scratch)


def here() -> Sizes:
    return sizes(memory(), cores())


def cores(cgroup: Path = CGROUP) -> int:
    """Those that this process may use: a container sees all of its node's, and is held to a share of their time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup / "cpu.max"
    if limit.exists():
        quota, period = limit.read_text().split()
        if quota != "max":
            usable = min(usable, math.ceil(int(quota) / int(period)))
    return max(1, usable)


def memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process may use: the container's limit, or all of the machine's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes"):
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            return min(machine, int(text))
    return machine
