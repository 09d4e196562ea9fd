"""Choose the rows of each step from the seed and the step number alone, so that no cursor has to be stored."""

import random
from collections.abc import Sequence

from worker.offline.rows import TokenizedRow
from worker.types import Pack


class RowStream:
    """The training rows, epoch after epoch, shuffled anew in each. The last batch of an epoch may be smaller."""

    def __init__(
        self, rows: Sequence[TokenizedRow], *, batch_size: int, steps_per_epoch: int, seed: int
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # of the newest epoch

    def batch(self, step: int) -> list[Pack]:
        """The packs of step 1, 2, ..."""
        epoch, number = divmod(step - 1, self.steps_per_epoch)
        if self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = epoch, order
        first = number * self.batch_size
        return packs_of([self.rows[index] for index in self._order[1][first : first + self.batch_size]])


def sample(rows: Sequence[TokenizedRow], count: int, *, seed: int, step: int) -> list[Pack]:
    """The packs of `count` validation rows of this step, in the order of the file."""
    chosen = random.Random(f"{seed}/valid/{step}").sample(range(len(rows)), min(count, len(rows)))
    return packs_of([rows[index] for index in sorted(chosen)])


def packs_of(rows: Sequence[TokenizedRow]) -> list[Pack]:
    return [pack for row in rows for pack in row.packs]
