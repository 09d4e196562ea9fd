"""A fair queue over owners."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """A queue for each owner, served fairly. Not thread-safe.

    `take` serves the owner with the fewest items in flight; ties are broken by the least recent turn. Each owner except
    "" has at most `most` items in flight.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._waiting: dict[str, deque[Item]] = {}  # ordered by the owners' turns
        self._under_way: Counter[str] = Counter()

    def put(self, owner: str, item: Item) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def take(self) -> tuple[str, Item] | None:
        """Take the next item, which is then in flight, and its owner. Returns None if no owner may have another one."""
        owners = [owner for owner in self._waiting if self._may_have_more(owner)]
        if not owners:
            return None
        owner = min(owners, key=self._under_way.__getitem__)
        queue = self._waiting.pop(owner)
        item = queue.popleft()
        if queue:
            self._waiting[owner] = queue  # after the other owners
        self._under_way[owner] += 1
        return owner, item

    def end(self, owner: str) -> None:
        """Mark an item of this owner as finished. The owner's next turn comes after those of other waiting owners."""
        self._under_way[owner] -= 1
        if not self._under_way[owner]:
            del self._under_way[owner]
        if (queue := self._waiting.pop(owner, None)) is not None:
            self._waiting[owner] = queue

    def _may_have_more(self, owner: str) -> bool:
        return self.most is None or owner == "" or self._under_way[owner] < self.most

    def clear(self) -> list[Item]:
        """Remove and return all queued items."""
        items = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        return items
