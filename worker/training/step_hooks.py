"""A trainer whose steps are coordinated with the sampler."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from worker.interfaces import Trainer
from worker.types import Group, UpdateMetrics


def _nothing() -> None:
    pass


class HookedTrainer:
    """Implements Trainer. Calls `before_step` and `after_step` around each step.

    Engines sleep before a step (`VllmSampler.sleep`) and are awake again in their next `sample`; after it, answers in
    flight continue with the new policy (`VllmSampler.update_in_flight`).
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        before_step: Callable[[], None] = _nothing,
        after_step: Callable[[], None] = _nothing,
    ) -> None:
        self._trainer, self._before_step, self._after_step = trainer, before_step, after_step

    def add(self, group: Group) -> None:
        self._trainer.add(group)

    def step(self) -> UpdateMetrics:
        self._before_step()
        update = self._trainer.step()
        self._after_step()
        return update

    def save(self, folder: Path) -> None:
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)

    def policy_before(self, steps: int) -> AbstractContextManager[int]:
        return self._trainer.policy_before(steps)
