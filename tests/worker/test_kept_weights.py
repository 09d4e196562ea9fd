"""An engine whose weights do not change copies them to main memory once."""

from dataclasses import dataclass, field
from typing import Any

from worker.engine.kept_weights import KeptWeights


@dataclass
class Allocation:
    """As vLLM's AllocationData."""

    tag: str
    value: str
    handle: Any = None
    is_asleep: bool = False
    cpu_backup_tensor: Any = None

    def __post_init__(self) -> None:
        self.handle = self


@dataclass
class Allocator:
    """Stands in for vLLM's CuMemAllocator: its memory is a string, which release discards."""

    pointer_to_data: dict[int, Allocation] = field(default_factory=dict)
    copied: list[int] = field(default_factory=list)

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        for address, data in self.pointer_to_data.items():
            if data.is_asleep:
                continue
            if data.tag in (offload_tags or ()):
                data.cpu_backup_tensor = data.value
                self.copied.append(address)
            release(data)
            data.is_asleep = True

    def wake_up(self) -> None:
        for data in self.pointer_to_data.values():
            data.is_asleep = False
            if data.cpu_backup_tensor is not None:
                data.value, data.cpu_backup_tensor = data.cpu_backup_tensor, None


def release(handle: Allocation) -> None:
    assert handle.value, "it is released once"
    handle.value = ""


def asleep(allocator: Allocator) -> list[str]:
    """What is in the memory of the device while the engine sleeps; then wake it."""
    allocator.sleep(("weights",))
    found = [data.value for data in allocator.pointer_to_data.values()]
    allocator.wake_up()
    return found


def keeping(*allocations: Allocation) -> Allocator:
    allocator = Allocator(dict(enumerate(allocations)))
    KeptWeights(allocator, release, lambda: None)
    return allocator


def test_weights_are_copied_at_the_first_sleep_only_and_are_there_after_each() -> None:
    allocator = keeping(
        Allocation("weights", "w0"), Allocation("kv_cache", "cache"), Allocation("weights", "w1")
    )

    for _ in range(3):
        assert asleep(allocator) == ["", "", ""]
        assert [allocator.pointer_to_data[address].value for address in (0, 2)] == ["w0", "w1"]
        allocator.pointer_to_data[1].value = "new keys"

    assert allocator.copied == [0, 2]


def test_an_allocation_at_the_address_of_one_that_was_freed_is_copied() -> None:
    allocator = keeping(Allocation("weights", "w0"))
    asleep(allocator)
    allocator.pointer_to_data[0] = Allocation("weights", "another")

    asleep(allocator)

    assert allocator.pointer_to_data[0].value == "another"
    assert allocator.copied == [0, 0]
