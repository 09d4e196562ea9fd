"""What the tests of a file have freed goes back to the system: without that a process of all of them grew to 5 GB."""

import ctypes
import gc
import os
import sys
from pathlib import Path

LARGE = 200 << 20  # a full pass of the collector takes a fifth of a second, so it must be worth it


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """The memory of this process, which models of tests leave in cycles and in the allocator's heaps."""

    def __init__(self) -> None:
        self.least = resident()  # after the last time that it was given back

    def give_back(self) -> None:
        if resident() > self.least + LARGE:
            gc.collect()
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
                trim(0)
            self.least = resident()
