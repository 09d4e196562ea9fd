"""Have sampling and learning take turns on the same GPUs."""

from pathlib import Path
from typing import Protocol

from worker.learn.trainer import Trainer
from worker.types import Group, UpdateMetrics


class Sleeper(Protocol):
    """A sampler whose engines can sleep. Its next `sample` wakes them."""

    def sleep(self) -> None:
        """Wait until they have released their memory."""
        ...


class AlternatingTrainer:
    """Implements Trainer. The sampler sleeps while the trainer computes, which is in `step` alone without `overlap`."""

    def __init__(self, trainer: Trainer, sampler: Sleeper) -> None:
        self._trainer, self._sampler = trainer, sampler

    def add(self, group: Group) -> None:
        self._trainer.add(group)

    def step(self) -> UpdateMetrics:
        self._sampler.sleep()
        return self._trainer.step()

    def save(self, folder: Path) -> None:
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)
