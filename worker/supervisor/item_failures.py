"""Items of the reconciler's passes that failed, so that one of them does not stop the others."""

from collections.abc import Callable, Collection

from core.claims import back_off


class ItemFailures:
    """The failures of this process by the id of an item. Each item is tried again after a back-off."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tries: dict[str, tuple[int, float]] = {}  # with the time of the next one

    def add(self, item_id: str) -> int:
        """Note a failure, and return their number in a row."""
        tries = self._tries.get(item_id, (0, 0.0))[0] + 1
        self._tries[item_id] = tries, self._clock() + back_off(tries)
        return tries

    def forget(self, item_id: str) -> None:
        self._tries.pop(item_id, None)

    def forget_all_but(self, item_ids: Collection[str]) -> None:
        """Call it when each item that was due has been tried, or is gone."""
        self._tries = {item_id: tries for item_id, tries in self._tries.items() if item_id in item_ids}

    def waiting(self) -> list[str]:
        """The ids of items that are not due."""
        now = self._clock()
        return [item_id for item_id, (_, due) in self._tries.items() if due > now]
