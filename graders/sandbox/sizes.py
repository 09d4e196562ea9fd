"""The number of concurrent python graders on this host, and the memory limit of each.

Graders get at most half of the container's memory, so that they cannot cause an OOM kill of the API or a trainer.
The kernel kills graders first (`oom_score_adj`), but many container runtimes then kill the whole container.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MAX_MEMORY = 2 << 30
MAX_SCRATCH = 256 << 20
# A grade that imports the largest packages of the environment takes 530 MB of address space before it runs any code.
MIN_SLOT = 1 << 30
# The share of two idle processes that have imported most of the packages.
_IDLE_SHARE = 3 / 16
_SCRATCH_SHARE = 1 / 16


@dataclass(frozen=True)
class Sizes:
    """The number of concurrent grades, and the address space and scratch folder of each, in bytes."""

    slots: int
    memory: int
    scratch_bytes: int


def sizes(memory: int, cores: int) -> Sizes:
    """Return the sizes for a host with `memory` bytes: at most one grade per core, and half of the memory.

    The slots share that half equally. The number of slots is reduced so that each gets at least MIN_SLOT. If half of
    the memory is less than MIN_SLOT, there is one slot with all of that half.
    """
    slots = min(cores, max(1, memory // 2 // MIN_SLOT))
    slot = memory // 2 // slots
    scratch = min(MAX_SCRATCH, int(slot * _SCRATCH_SHARE))
    return Sizes(slots, min(MAX_MEMORY, slot - scratch - int(slot * _IDLE_SHARE)), scratch)


def sizes_of_this_machine() -> Sizes:
    return sizes(memory(), cores())


def cores(cgroup: Path = CGROUP) -> int:
    """Return the number of cores that this process may use, which the container's CPU quota may limit."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup / "cpu.max"
    if limit.exists():
        quota, period = limit.read_text().split()
        if quota != "max":
            usable = min(usable, math.ceil(int(quota) / int(period)))
    return max(1, usable)


def memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that this process may use: the container's limit, or the memory of the machine."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes"):
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            return min(machine, int(text))
    return machine
