"""An engine whose weights do not change copies them to main memory once."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from worker.engine.extension import replace_adapter
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
    allocator.sleep(("weights", "runtime", "cudagraph"))
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


@pytest.mark.parametrize("tag", ["runtime", "cudagraph"])
def test_what_is_no_weight_is_copied_at_each_sleep(tag: str) -> None:
    allocator = keeping(Allocation("weights", "w0"), Allocation(tag, "first"))
    asleep(allocator)
    allocator.pointer_to_data[1].value = "second"

    asleep(allocator)

    assert [data.value for data in allocator.pointer_to_data.values()] == ["w0", "second"]
    assert allocator.copied == [0, 1, 1]


class Manager:
    """Stands in for vLLM's LoRAModelManager: it writes a mapping to the device if it is not the last."""

    _last_mapping: str | None = None
    on_device = ""

    def remove_adapter(self, adapter: int) -> None: ...
    def add_adapter(self, model: object) -> None: ...
    def activate_adapter(self, adapter: int) -> None: ...
    def pin_adapter(self, adapter: int) -> None: ...

    def set_adapter_mapping(self, mapping: str) -> None:
        if mapping != self._last_mapping:
            self.on_device = self._last_mapping = mapping


def test_the_mapping_of_rows_is_written_anew_with_the_adapter_after_a_sleep() -> None:
    """The copy of the first sleep has that of another step."""
    manager = Manager()
    manager.set_adapter_mapping("two rows")
    manager.on_device = "of the first sleep"

    replace_adapter(manager, object())
    manager.set_adapter_mapping("two rows")

    assert manager.on_device == "two rows"


def test_an_allocation_at_the_address_of_one_that_was_freed_is_copied() -> None:
    allocator = keeping(Allocation("weights", "w0"))
    asleep(allocator)
    allocator.pointer_to_data[0] = Allocation("weights", "another")

    asleep(allocator)

    assert allocator.pointer_to_data[0].value == "another"
    assert allocator.copied == [0, 0]
