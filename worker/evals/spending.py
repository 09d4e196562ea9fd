"""Enforces the budget of a run while its items are in progress."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.errors import BudgetReached
from core.evals.budgets import CAPS
from core.evals.summary import PaidItems
from worker.evals.record import PaidCall


@dataclass(frozen=True)
class Calls:
    """The calls that an item may still make."""

    samples: bool = False
    judges: int = 0

    def __bool__(self) -> bool:
        return self.samples or self.judges > 0


@dataclass
class ItemCost:
    """Usage of one item in progress, by the names of CAPS, and the tokens that earlier attempts used for it."""

    earlier_tokens: int = 0
    tokens: int = 0
    judge_calls: int = 0

    @property
    def all_tokens(self) -> int:
        return self.earlier_tokens + self.tokens

    def add(self, call: PaidCall) -> None:
        self.tokens += call.tokens
        self.judge_calls += call.judge


class Spending:
    """Lets an item start only if its run stays within the budget. Belongs to one event loop.

    An item that has started is finished, also by a later attempt, so that nothing is paid for in vain. The cap on judge
    calls is exact. The cost of an item in tokens is known only at its end, so the cap on tokens may be exceeded:

    - An item starts beside others only if the cap has room for all of them, each at the largest cost of an item so far,
      and if at least as many items that used tokens are finished as are already in progress. A run thus begins with
      one item, and the number in progress at most doubles with each round. The excess is at most the sum by which
      these items cost more than the largest one before.
    - An item starts alone if the mean of the finished ones fits, as with jobs, so that one expensive item does not end
      a run early. The excess is at most the difference of its cost from the mean.

    Items that used no tokens say nothing about the next one and are not counted as finished here.

    Args:
        caps: The run's budget; None: unlimited.
        used: Usage of earlier attempts.
        paid: The items that they have finished and that used tokens.
    """

    def __init__(self, caps: Mapping[str, int] | None, used: Mapping[str, int], paid: PaidItems) -> None:
        self._caps = caps or {}
        self._used = {name: used[name] for name in CAPS}  # without items in progress
        self._paid = paid
        self._open: list[ItemCost] = []  # items in progress
        self._reserved = 0  # judge calls that they may make
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def item(self, calls: Calls, earlier_tokens: int = 0) -> AsyncIterator[ItemCost]:
        """The time of an item that makes at most these calls. Waits for others if they may leave room.

        Args:
            calls: The calls that earlier attempts have not made.
            earlier_tokens: Used by earlier attempts for this item.

        Raises:
            BudgetReached: the budget has no room for this item, and no other one is in progress.
        """
        cost = ItemCost(earlier_tokens)
        async with self._changed:
            while (why := self._lacking(calls, cost)) is not None:
                if not self._open:
                    raise BudgetReached(f"The run has reached its budget: {why}.")
                await self._changed.wait()
            self._open.append(cost)
            self._reserved += calls.judges
        try:
            yield cost
        finally:
            self._open = [other for other in self._open if other is not cost]
            self._reserved -= calls.judges
            self._paid = self._paid.plus(cost.all_tokens)
            self._used["tokens"] += cost.tokens
            self._used["judge_calls"] += cost.judge_calls
            async with self._changed:
                self._changed.notify_all()

    def _lacking(self, calls: Calls, cost: ItemCost) -> str | None:
        """The reason why an item must not start now; None: it may."""
        if not calls:
            return None
        made, cap = self._used["judge_calls"], self._caps.get("judge_calls")
        if cap is not None and made + self._reserved + calls.judges > cap:
            return f"{made} of {cap} judge calls are made, and the next item needs {calls.judges}"
        cap = self._caps.get("tokens")
        if cap is None or cost.earlier_tokens:  # an earlier attempt had room for it
            return None
        return self._lacking_tokens(cap)

    def _lacking_tokens(self, cap: int) -> str | None:
        used = self._used["tokens"] + sum(other.tokens for other in self._open)
        if used >= cap:
            return f"{used} of {cap} tokens are used"
        if len(self._open) > self._paid.count:
            return "the items in progress show what one costs"
        prediction = self._largest() if self._open else self._paid.mean
        ahead = sum(max(0, prediction - other.all_tokens) for other in self._open)
        if used + ahead + prediction > cap:
            return (
                f"{used} of {cap} tokens are used, and the next item would take about {prediction:.0f} more"
            )
        return None

    def _largest(self) -> int:
        return max([self._paid.largest, *(other.all_tokens for other in self._open)])
