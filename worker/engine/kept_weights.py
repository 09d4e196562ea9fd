"""Sleep of an engine whose weights do not change: their copies in main memory are made once.

vLLM allocates pinned memory and copies all weights into it at each sleep; for 15 GiB that took 10.6 s on an A100, and
waking 2.2 s (vLLM #48337). The adapter's slots and the mapping of rows to them are among the weights: the engine gets
both anew when it wakes (extension.py). What is not a weight, the state of the runner and of CUDA graphs, is copied at
each sleep.

The calls into what vLLM does not promise to keep are here, in stepped.py and in extension.py.
"""

from collections.abc import Callable
from typing import Any

WEIGHTS = "weights"  # vLLM's tag


class KeptWeights:
    """Replaces `sleep` of vLLM's CuMemAllocator, whose `wake_up` reads the copies and forgets them."""

    def __init__(
        self, allocator: Any, release: Callable[[Any], None], synchronize: Callable[[], None]
    ) -> None:
        """
        Args:
            release: vLLM's `unmap_and_release`.
            synchronize: waits for the device.
        """
        self._allocator, self._release, self._synchronize = allocator, release, synchronize
        self._sleep = allocator.sleep
        self._copies: dict[int, tuple[Any, Any]] = {}  # by address: the allocation, and its copy
        allocator.sleep = self.sleep

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """As vLLM's. Weights that have a copy are released without another one."""
        self._synchronize()
        for address, data in self._allocator.pointer_to_data.items():
            allocation, copy = self._copies.get(address, (None, None))
            # Another allocation may have the address of one that was freed.
            if allocation is data and not data.is_asleep:
                self._release(data.handle)
                data.is_asleep, data.cpu_backup_tensor = True, copy
        self._sleep(offload_tags)
        self._copies = {
            address: (data, data.cpu_backup_tensor)
            for address, data in self._allocator.pointer_to_data.items()
            if data.tag == WEIGHTS and data.cpu_backup_tensor is not None
        }
