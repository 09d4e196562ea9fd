"""Out-of-memory errors of the device: what they are, and the numbers in them. Imports no torch.

They come from torch, from CUDA's libraries and from vLLM, and those of an engine's process come as text.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

# The messages of CUDA and its libraries, of torch's allocator on a CPU, and of vLLM at its start.
_TEXTS = re.compile(
    r"(?i)CUDA out of memory|CUDA error: out of memory|CUDA driver error: out of memory|OutOfMemoryError"
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|Free memory on device|No available memory for the cache blocks|not enough GPU memory"
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)")
_FREE = re.compile(r"of which ([\d.]+) (bytes|[KMG]iB) is free|Free memory on device \S+ \(([\d.]+)/")

Place = Literal["trainer", "sampler"]


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or the text of one, says that the device has too little memory. Also by its cause."""
    if isinstance(error, str):
        return _TEXTS.search(error) is not None
    return any(
        isinstance(one, MemoryError | OutOfDeviceMemory)
        or any(kind.__name__ == "OutOfMemoryError" for kind in type(one).__mro__)
        or (isinstance(one, RuntimeError | ValueError) and is_out_of_memory(str(one)))
        for one in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and the errors that it was raised from."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


@dataclass(frozen=True)
class Shortage:
    """An out-of-memory error without its traceback, which would keep the memory of the computation."""

    place: Place
    reason: str  # the first line of the error
    wanted: int | None = None  # bytes of the allocation that failed; None: the error does not say
    free: int | None = None  # bytes of the device at that moment
    tokens: int = 0  # of the micro-batch that did not fit, with padding; 0: it was not one
    divisible: bool = False  # the micro-batch can be divided further

    @classmethod
    def of(
        cls,
        error: BaseException | str,
        place: Place,
        *,
        free: int | None = None,
        tokens: int = 0,
        divisible: bool = False,
    ) -> "Shortage":
        """Args: `free` is used where the error does not say it."""
        if isinstance(error, OutOfDeviceMemory):
            return error.shortage
        text = str(error)
        line = (text.strip().splitlines() or [type(error).__name__])[0][:300]
        found = _FREE.search(text)
        stated = None
        if found:
            stated = _bytes(found[1], found[2]) if found[1] else _bytes(found[3], "GiB")
        wanted = _WANTED.search(text)
        return cls(
            place,
            line,
            _bytes(wanted[1], wanted[2]) if wanted else None,
            free if stated is None else stated,
            tokens,
            divisible,
        )


class OutOfDeviceMemory(Exception):
    """The device has too little memory for what the run computes."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.reason)
        self.shortage = shortage


class LostPass(OutOfDeviceMemory):
    """The same in a pass of ranks with a sharded base: the others wait in the middle of it, so the attempt ends."""


class FirstAnswer:
    """Which thread answers a shortage that ends the attempt: ranks that share a pass run out of memory together."""

    def __init__(self, wait: Callable[[], object] = threading.Event().wait) -> None:
        """`wait`: waits for the end of this process."""
        self._taken = threading.Lock()
        self._wait = wait

    def take(self) -> None:
        """Return in the first thread that calls this, which lowers the sizes and ends the process; others wait."""
        if not self._taken.acquire(blocking=False):
            self._wait()


@contextmanager
def naming_place(place: Place) -> Iterator[None]:
    """Raise out-of-memory errors as OutOfDeviceMemory of this place."""
    try:
        yield
    except Exception as cause:
        if isinstance(cause, OutOfDeviceMemory) or not is_out_of_memory(cause):
            raise
        shortage = Shortage.of(cause, place)
    else:
        return
    raise OutOfDeviceMemory(shortage)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
