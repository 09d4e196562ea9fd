"""Computation on the run's device, in threads beside the event loop.

Trainers and samplers do not know who else uses the device. A process whose job shares it sets a guard, which waits for
the job's turn (worker/sharing/turns.py).
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceWork:
    """`await DEVICE_WORK.run(compute, ...)`, or `with DEVICE_WORK:` in a thread that computes."""

    def __init__(self) -> None:
        self._guard: AbstractContextManager[object] = nullcontext()

    def guard_with(self, guard: AbstractContextManager[object]) -> None:
        """Compute inside of `guard` from now on. Several threads may be inside, and each may enter it again."""
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.__exit__(kind, raised, trace)

    async def run(self, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `compute` in a thread, and return its result."""

        def guarded() -> T:
            with self:
                return compute(*args, **kwargs)

        return await asyncio.to_thread(guarded)


DEVICE_WORK = DeviceWork()
"""That of this process, which is one attempt."""
