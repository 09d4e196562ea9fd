"""Enforces the budget of a run while its items are in progress."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.errors import BudgetReached
from core.evals.budgets import CAPS
from worker.evals.record import Call


@dataclass
class ItemCost:
    """Usage of one item in progress, by the names of CAPS."""

    tokens: int = 0
    judge_calls: int = 0

    def add(self, call: Call) -> None:
        self.tokens += call.tokens
        self.judge_calls += call.judge


class Spending:
    """Lets an item start only if its run stays within the budget. Belongs to one event loop.

    An item that has started is finished, so that nothing is paid for in vain. As with jobs, the cap on tokens counts
    as reached if the next item would exceed it, predicted by the mean of the finished ones; until one is finished,
    one item is in progress at a time. The cap on judge calls is exact.

    Args:
        caps: The run's budget; None: unlimited.
        used: Usage of earlier attempts.
        finished: Number of items that they have finished.
    """

    def __init__(self, caps: Mapping[str, int] | None, used: Mapping[str, int], finished: int) -> None:
        self._caps = caps or {}
        self._used = {name: used[name] for name in CAPS}
        self._finished = finished
        self._open = 0  # items in progress
        self._reserved = 0  # judge calls that they may make
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def item(self, judge_calls: int) -> AsyncIterator[ItemCost]:
        """The time of an item that makes at most this number of judge calls. Waits for others if they may leave room.

        Raises:
            BudgetReached: the budget has no room for this item, and no other one is in progress.
        """
        async with self._changed:
            while (why := self._lacking(judge_calls)) is not None:
                if not self._open:
                    raise BudgetReached(f"The run has reached its budget: {why}.")
                await self._changed.wait()
            self._open += 1
            self._reserved += judge_calls
        cost = ItemCost()
        try:
            yield cost
        finally:
            self._open -= 1
            self._reserved -= judge_calls
            self._finished += 1
            self._used["tokens"] += cost.tokens
            self._used["judge_calls"] += cost.judge_calls
            async with self._changed:
                self._changed.notify_all()

    def _lacking(self, judge_calls: int) -> str | None:
        """The reason why an item must not start now; None: it may."""
        used = self._used
        cap = self._caps.get("judge_calls")
        if cap is not None and used["judge_calls"] + self._reserved + judge_calls > cap:
            return (
                f"{used['judge_calls']} of {cap} judge calls are made, and the next item needs {judge_calls}"
            )
        cap = self._caps.get("tokens")
        if cap is None:
            return None
        if used["tokens"] >= cap:
            return f"{used['tokens']} of {cap} tokens are used"
        if not self._finished:
            return "the first item is in progress" if self._open else None
        mean = used["tokens"] / self._finished
        if used["tokens"] + (self._open + 1) * mean > cap:
            return f"{used['tokens']} of {cap} tokens are used, and the next item would take about {mean:.0f} more"
        return None
