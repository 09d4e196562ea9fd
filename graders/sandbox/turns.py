"""A fair queue over owners."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """A queue for each owner. Not for two threads at once.

    `take` serves the owner with the fewest items under way; among those, the one whose last turn was longest ago. No
    owner but "" has more than `most` of them under way.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._waiting: dict[str, deque[Item]] = {}  # in the order of their turns
        self._under_way: Counter[str] = Counter()

    def put(self, owner: str, item: Item) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def take(self) -> tuple[str, Item] | None:
        """The next item with its owner, who has it under way from now on; None if there is none whose turn it is."""
        owners = [owner for owner in self._waiting if self._may_have_more(owner)]
        if not owners:
            return None
        owner = min(owners, key=self._under_way.__getitem__)
        queue = self._waiting.pop(owner)
        item = queue.popleft()
        if queue:
            self._waiting[owner] = queue  # behind the others
        self._under_way[owner] += 1
        return owner, item

    def end(self, owner: str) -> None:
        """An item of this owner is no longer under way. Its next one is behind those of owners that wait already."""
        self._under_way[owner] -= 1
        if not self._under_way[owner]:
            del self._under_way[owner]
        if (queue := self._waiting.pop(owner, None)) is not None:
            self._waiting[owner] = queue

    def _may_have_more(self, owner: str) -> bool:
        return self.most is None or owner == "" or self._under_way[owner] < self.most

    def clear(self) -> list[Item]:
        """Everything that waits; then nothing does."""
        items = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        return items
