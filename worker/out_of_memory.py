"""Out-of-memory errors: of which memory they are, and the numbers in them. Imports no torch.

They come from torch, from CUDA's libraries and from vLLM, and those of an engine's process come as text.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from core.units import GIB

# The messages of CUDA and its libraries, and of vLLM at its start.
_TEXTS = re.compile(
    r"(?i)CUDA out of memory|CUDA error: out of memory|CUDA driver error: out of memory|OutOfMemoryError"
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
    r"|Free memory on device|not enough GPU memory"
)
# That of torch's allocator in main memory, and how an engine's process writes Python's own.
_ALLOCATOR_TEXT = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")
_PYTHON_TEXT = re.compile(r"\bMemoryError\b")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)")
_FREE = re.compile(r"of which ([\d.]+) (bytes|[KMG]iB) is free|Free memory on device \S+ \(([\d.]+)/")

Place = Literal["trainer", "sampler"]


def lacking(error: BaseException | str, device: str) -> str | None:
    """Return the device whose memory did not suffice, by an error, its causes, or the text of one.

    Returns:
        `device`, where the process computes, or "cpu": main memory. None: it is no out-of-memory error.
    """
    for one in [error] if isinstance(error, str) else _chain(error):
        if _is_of_main_memory(one):
            return "cpu"
        if _is_of_device(one):
            return device
    return None


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether it is an out-of-memory error, of whichever memory."""
    return lacking(error, "") is not None


def memory_named(error: BaseException) -> str:
    """Which memory an out-of-memory error is of, for a message."""
    return "main memory" if lacking(error, "") == "cpu" else "memory"


def _is_of_main_memory(error: BaseException | str) -> bool:
    if isinstance(error, str):
        return any(text.search(error) for text in (_ALLOCATOR_TEXT, _PYTHON_TEXT))
    is_torchs = isinstance(error, RuntimeError) and _ALLOCATOR_TEXT.search(str(error)) is not None
    return isinstance(error, MemoryError) or is_torchs


def _is_of_device(error: BaseException | str) -> bool:
    if isinstance(error, str):
        return _TEXTS.search(error) is not None
    return (
        isinstance(error, OutOfDeviceMemory)
        or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
        or (isinstance(error, RuntimeError | ValueError) and _TEXTS.search(str(error)) is not None)
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


class OutOfMainMemory(Exception):
    """A run has used up main memory, by something that its plan has no sizes of. Another attempt may have more."""

    def __init__(self, error: BaseException, free: int, device: str) -> None:
        """`free`: bytes of main memory now; `device`: that the run computes on."""
        wanted = Shortage.of(error, "trainer").wanted
        size = "" if wanted is None else f"{wanted / GIB:.2f} GiB wanted, "
        other = "" if device == "cpu" else ", not of the GPU's"
        line = (str(error).strip().splitlines() or [""])[0][:300]
        super().__init__(
            f"Out of main memory{other} ({size}{free / GIB:.2f} GiB free). Give the worker's machine or "
            "container more main memory, or choose a smaller batch_size, group_size or schedule.steps. The error: "
            f"{type(error).__name__}: {line}"
        )


class LostPass(OutOfDeviceMemory):
    """The same in a pass of ranks with a sharded base: the others wait in the middle of it, so the attempt ends."""


class FirstAnswer:
    """Which thread answers a shortage that ends the attempt: ranks that share a pass run out of memory together."""

    def __init__(self, wait: Callable[[], object] = threading.Event().wait) -> None:
        """`wait`: waits for the end of this process."""
        self._first = threading.Lock()
        self._wait = wait

    def take(self) -> None:
        """Return in the first thread that calls this, which lowers the sizes and ends the process; others wait."""
        if not self._first.acquire(blocking=False):
            self._wait()


@contextmanager
def naming_place(place: Place, device: str) -> Iterator[None]:
    """Raise out-of-memory errors of this device as OutOfDeviceMemory of this place."""
    try:
        yield
    except Exception as cause:
        if isinstance(cause, OutOfDeviceMemory) or lacking(cause, device) != device:
            raise
        shortage = Shortage.of(cause, place)
    else:
        return
    raise OutOfDeviceMemory(shortage)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
